"""A driver that exchanges a model between two steps of a whole run: nothing further is charged or committed for it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from raycloak.coordinator.checkpoints.archive import Restorer
from raycloak.coordinator.console.output import json_text
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.words import verdict_rows
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.coordinator.training.assignment import NewRun, ResumedRun
from raycloak.metrics.errors import RaycloakError
from raycloak.workers.terms.manifest import Manifest
from tests.coordinator.proof.proof_cases import packed
from tests.coordinator.training.test_state_requests import back, charges, scripted
from tests.protocol import RENYI, WholeRun, trained, whole_run, with_another_tensor


def on_first(method, fate):
    """Return what disturbs the first call of a method, by whatever aggregator."""
    return lambda call: fate if (call.method, call.index) == (method, 0) else None


def refused(home, fate, **fields) -> tuple[str, WholeRun]:
    """Return the code that a run ends with whose first step's result is exchanged, and the run."""
    run = whole_run(home, disturb=on_first("reduce", fate), **fields)
    with pytest.raises(RaycloakError) as error:
        run.train()
    return error.value.code, run


def test_a_result_that_was_exchanged_on_its_way_is_not_trained_on(tmp_path) -> None:
    """Report and parameters agree with each other, and not with what the aggregator signed."""

    def exchange(report, parameters, state):
        return with_another_tensor(report), parameters + np.float32(1), state

    code, run = refused(tmp_path, exchange)
    assert code == "release_mismatch"
    assert len(run.stage.calls("reduce")) == 1


def test_parameters_that_were_exchanged_beside_an_honest_report_are_computed_on_by_nobody(tmp_path) -> None:
    code, run = refused(tmp_path, lambda report, parameters, state: (report, parameters + np.float32(1), state))
    assert code == "receipt_mismatch"
    assert len(run.stage.calls("reduce")) == 1


def test_a_state_that_was_exchanged_ends_the_run_before_the_next_charge(tmp_path) -> None:
    """The momentum of the first step is scaled: the second one starts from the right parameters."""

    def scaled(report, parameters, state):
        return report, parameters, {key: array * np.float32(2) for key, array in state.items()}

    code, run = refused(tmp_path, scaled)
    assert code == "lineage_broken"
    assert len(run.stage.calls("reduce")) == 2


def test_a_report_without_a_signature_is_not_trained_on(tmp_path) -> None:
    def unsigned(report, parameters, state):
        return report.model_copy(update={"release": None}), parameters, state

    assert refused(tmp_path, unsigned)[0] == "lineage_missing"


def test_guarantee_a_run_goes_on_from_a_package_by_any_number_of_aggregators(tmp_path) -> None:
    """The chain is of whole models: three aggregators follow one, and the bytes are the same."""

    class Killed(BaseException):
        pass

    def kill(call):
        if (call.method, call.index) == ("charge", 3):
            raise Killed

    straight = trained(tmp_path / "straight", steps=4)
    options = {"steps": 4, "checkpoint": {"checkpoint_frequency": 2, "storage": "packages"}}
    first = whole_run(tmp_path, assignment=NewRun(packed(tmp_path)), disturb=kill, **options)
    with pytest.raises(Killed):
        first.train()
    manifest = Manifest.model_validate_json((first.folder / "manifest.json").read_bytes())
    second = whole_run(tmp_path, assignment=ResumedRun(manifest, packed(tmp_path)), aggregators=3, **options)
    second.train()
    assert second.finished.model_digest.hex() == straight.digests[-1]
    releases = [len(body["releases"]) for kind, body in second.evidence if kind == "committed"]
    assert releases[0] == 1
    assert releases[-1] == 3


def test_values_of_a_measurement_that_were_exchanged_are_never_committed(tmp_path) -> None:
    counts = {"class_counts": {"classes": 3, "noise_multiplier": 20}}

    def exchange(report, average):
        return report, average + 1

    run = whole_run(tmp_path, disturb=on_first("measure", exchange), measurements=counts, dp_config=RENYI)
    with pytest.raises(RaycloakError, match="lineage_broken: class_counts step 0 gives another result"):
        run.train()


def test_a_package_with_another_state_is_found_out_at_the_next_step(tmp_path, monkeypatch) -> None:
    """The parameters are those of the load; the optimizer state in the package is not the one that was signed."""
    genuine = Restorer.opened

    def scaled(self, package):
        restored = genuine(self, package)
        state = {key: array * np.float32(2) for key, array in restored.state.items()}
        return replace(restored, state=state)

    run = scripted(tmp_path, back(tmp_path))
    monkeypatch.setattr(Restorer, "opened", scaled)
    with pytest.raises(RaycloakError, match="lineage_broken"):
        run.train()
    assert [step for step, _ in charges(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_run_with_a_load_names_it_in_its_verdict(tmp_path) -> None:
    run = scripted(tmp_path, back(tmp_path))
    run.train()
    verdict = verdict_of(run.finished, run.folder, 1.0, "complete", ())
    assert verdict.loads == ((4, 2),)
    assert ("loaded", "parameters loaded at step 4: those of step 2") in verdict_rows(verdict)
    told = json.loads(json_text({"run_dir": str(run.folder), "metrics": verdict.metrics()}))
    assert Verdict.of(told).loads == verdict.loads
