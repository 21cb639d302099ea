"""A run that protects persons: its record says so, is proved, and is believed with no other unit in it."""

import json

import numpy as np
import pytest

from raycloak.coordinator.console.output import json_text
from raycloak.coordinator.proof.verify import verify_parts
from raycloak.coordinator.record.run_reader import read_run
from raycloak.coordinator.report.facts import limits_of
from raycloak.coordinator.report.model_card import model_card
from raycloak.coordinator.training.assignment import ReplayedRun
from tests.coordinator.proof.proof_cases import Proved, packed, parts_of, proved, train, whole
from tests.coordinator.runs.test_resumed_runs import manifest_of
from tests.protocol import WholeRun, examples

OWNERS = np.repeat(np.arange(16), [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4])
FIELDS = {"expected_batch_size": 8, "micro_batch_size": 6}


@pytest.fixture(scope="module")
def persons(tmp_path_factory) -> WholeRun:
    """A run over the visits of sixteen patients, of whom a step sees two at most."""
    home = tmp_path_factory.mktemp("persons")
    features, labels = examples()
    columns = [*(f"f{i}" for i in range(6)), "label", "patient_id"]
    lines = [",".join(columns), *(",".join(map(str, each)) for each in zip(*features.T, labels, OWNERS, strict=True))]
    (home / "visits.csv").write_text("\n".join(lines) + "\n")
    return train(home, dataset=dataset_of(home), **FIELDS)


def dataset_of(home) -> dict[str, object]:
    path = str(home / "visits.csv")
    return {"kind": "csv", "path": path, "labels": "label", "unit": "patient_id", "rows_per_unit": 2}


@pytest.fixture(scope="module")
def record(persons) -> Proved:
    return proved(persons.home, persons)


def test_every_mechanism_of_the_run_counts_patients(persons):
    computation = manifest_of(persons).computation
    for mechanism in computation.mechanisms:
        assert (mechanism.unit, mechanism.rows_per_unit, mechanism.num_examples) == ("patient_id", 2, 16)


def test_the_record_of_a_run_of_persons_is_proved_and_says_whom_it_protects(record):
    report = verify_parts(record.parts, record.trust)
    assert not report.failed, [(claim.name, claim.says) for claim in report.failed]
    verdict = json.loads(record.contents["verdict.json"])
    assert (verdict["unit"], verdict["rows_per_unit"], verdict["copies"]) == ("patient_id", 2, 1)


@pytest.mark.parametrize(("name", "value"), [("unit", "hospital"), ("rows_per_unit", 1), ("copies", 2)])
def test_a_verdict_with_another_unit_than_the_manifest_s_is_refuted(record, name, value):
    verdict = json.loads(record.contents["verdict.json"]) | {name: value}
    altered = record.contents | {"verdict.json": json_text(verdict).encode() + b"\n"}
    (failed,) = verify_parts(parts_of(altered), record.trust).failed
    assert f"it states {name} {value}" in failed.says


def test_a_replay_draws_the_same_rows_of_the_same_persons(persons):
    again = whole(
        persons.home,
        dataset=dataset_of(persons.home),
        assignment=ReplayedRun(manifest_of(persons), packed(persons.home), 2, 4),
        **FIELDS,
    )
    assert again.train().model_digest == persons.finished.model_digest


def test_model_card_and_report_say_what_epsilon_protects(record):
    run = read_run(record.folder)
    card, limits = model_card(run), limits_of(run, run.opened_verdict())
    assert r"for one patient\_id." in card
    assert r"each patient\_id by itself" in card
    assert "16 units" in card
    assert any("one patient_id, from all its rows together" in each for each in limits)
    assert not any("about one example" in each for each in limits)
