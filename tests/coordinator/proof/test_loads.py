"""A run that went on from earlier states of its own: proved with each jump, and with no jump that was not made."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from raycloak.coordinator.proof.verify import verify_parts
from raycloak.coordinator.training import state_requests
from raycloak.coordinator.training.steps import Training
from tests.coordinator.proof.proof_cases import STEPS, Entries, Proved, parts_of, proved, relogged, whole
from tests.coordinator.proof.test_runs import said
from tests.coordinator.training.test_sealed_evaluation import sealed
from tests.coordinator.training.test_state_requests import Script


def load(after: int) -> Callable[[Training], object]:
    """Load the package of two steps, which was sealed because the configuration says so."""

    def act(training: Training) -> None:
        training.checkpoints.settle(2, 60)
        state_requests.load(training, after, f"{training.order.assignment.archive.location}/step-000002.tssp")

    return act


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Proved:
    """Return a run that loads the state of step 2 after step 3, and again once all steps are done."""
    home = tmp_path_factory.mktemp("loads")
    run = whole(home)
    acts = {3: load(3), STEPS: load(STEPS)}
    run.coordinator.order = replace(run.coordinator.order, pace=Script(acts))
    run.train()
    assert run.finished.model_digest.hex() == run.digests[1]
    return proved(home, run)


def test_a_run_with_loads_is_proved_and_the_proof_names_them(record):
    found = said(record)
    assert found["steps"].endswith(
        f"in order; the state of step 2 loaded after 3; the state of step 2 loaded after {STEPS}"
    )
    assert found["lineage"].endswith(f"; parameters loaded at step 3; parameters loaded at step {STEPS}")
    assert found["released model"].endswith(f"after step {STEPS}")
    assert "agree" in found["metrics.jsonl"]


def test_a_loaded_state_is_evaluated_on_sealed_examples_under_an_order_of_its_own(tmp_path):
    run = whole(tmp_path, evaluation=sealed(tmp_path), measurements={})
    run.coordinator.order = replace(run.coordinator.order, pace=Script({STEPS: load(STEPS)}))
    run.train()
    ordered = [body["model_digest"] for kind, body in run.evidence if kind == "evaluation_ordered"]
    assert ordered == [run.digests[1], run.digests[3], run.digests[1]]
    assert said(proved(tmp_path, run))["rosters"]


def edited(place: int, **changes: object) -> Callable[[Entries], None]:
    def edit(entries: Entries) -> None:
        loads = [index for index, (kind, _) in enumerate(entries) if kind == "loaded"]
        entries[loads[place]] = "loaded", entries[loads[place]][1] | changes

    return edit


def dropped(place: int) -> Callable[[Entries], None]:
    def edit(entries: Entries) -> None:
        entries.pop([index for index, (kind, _) in enumerate(entries) if kind == "loaded"][place])

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (dropped(0), "gradient step 3: it was charged for other parameters"),
        (dropped(1), "other parameters than those after 4 steps"),
        (edited(0, model_digest="ab" * 32), "parameters that step 2 was not committed with"),
        (edited(0, package_digest="ab" * 32), "that was not published before"),
        (edited(0, step=1), "parameters that step 1 was not committed with"),
        (edited(0, after_step=2), "which is not the last by then"),
        (edited(0, reason="better"), "its field 'reason'"),
    ],
    ids=["the first dropped", "the last dropped", "parameters", "package", "step", "place", "a field"],
)
def test_a_load_that_was_tampered_with_breaks_the_chain_of_the_steps(record, edit, words):
    """By one who has the run's key, and signs the log again."""
    report = verify_parts(parts_of(relogged(record, edit)), record.trust)
    failed = {claim.name: f"{claim.record}: {claim.says}" for claim in report.failed}
    assert words in failed["steps"]
