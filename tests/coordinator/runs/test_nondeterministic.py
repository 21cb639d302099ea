"""An operation without a deterministic kernel: refused by name, or allowed and then said everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest

from raycloak.coordinator.cli.views.verdict import verdict_text
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.report.words import verdict_rows
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.metrics.errors import ModelError, RunFailedError
from raycloak.workers import workload
from raycloak.workers.gradients import model_checks
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import WholeRun, config, examples, trained, whole_run, worker_setup

WITH_PUT = {"model": "tests.models:with_put"}


def failure(kind, home, **arguments) -> tuple[Exception, WholeRun]:
    run = whole_run(home, **arguments)
    with pytest.raises(kind) as error:
        run.train()
    return error.value, run


# --- refused


@pytest.mark.parametrize("found", ["trying the model", "the known answer"])
def test_an_operation_without_a_deterministic_kernel_is_refused_by_name_before_anything_is_charged(
    tmp_path, monkeypatch, found
):
    """At the known answer too: on a GPU, other operations lack such a kernel than on the CPU that tries the model."""
    if found == "the known answer":
        monkeypatch.setattr(workload, "check_trainable", lambda *_: None)
    error, run = failure(ModelError, tmp_path, **WITH_PUT)
    assert error.code == "nondeterministic_op"
    assert "operation put_ has no deterministic kernel" in error.message
    assert "allow_nondeterministic" in error.remedy
    assert run.stage.calls("compute_known_answer") == [] or found == "the known answer"
    assert run.stage.calls("register_run") == run.stage.calls("charge") == []


def test_a_plan_refuses_it_by_name_as_well(tmp_path):
    settings = config(**WITH_PUT)
    base = Path(worker_setup(settings, tmp_path).base)
    with pytest.raises(ModelError, match="operation put_ has no deterministic kernel"):
        plan_of(settings, base)
    assert plan_of(config(**WITH_PUT, allow_nondeterministic=True), base).exact is False


def test_one_that_only_private_examples_meet_is_a_code_and_nothing_else(tmp_path, monkeypatch):
    """The name of an operation could tell of examples that are in reach.

    A model with such a branch is refused before; here the check for it finds nothing.
    """
    monkeypatch.setattr(model_checks, "_check_reads", lambda *_: None)
    features, labels = examples()
    private = (features + np.float32(1e7), labels)
    error, run = failure(RunFailedError, tmp_path, model="tests.models:with_put_above_a_million", data=private)
    assert (error.code, error.step) == ("nondeterministic_op", 0)
    assert "put_" not in str(error)
    replies = [references[0].value for call, references in run.stage.log if call.method == "step"]
    assert {(reply.code, reply.header) for reply in replies} == {("nondeterministic_op", None)}


# --- allowed


@pytest.fixture(scope="module")
def loose(tmp_path_factory) -> WholeRun:
    return trained(tmp_path_factory.mktemp("loose"), **WITH_PUT, allow_nondeterministic=True)


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> WholeRun:
    return trained(tmp_path_factory.mktemp("exact"))


def test_an_allowed_one_trains_and_the_manifest_carries_it(loose, exact):
    for run, expected in ((loose, True), (exact, False)):
        manifest = Manifest.model_validate_json((run.folder / "manifest.json").read_bytes())
        assert manifest.computation.exact is not expected
        assert manifest.computation.numerics.deterministic is not expected
    assert len(set(loose.digests)) == 3


def test_the_permission_alone_makes_another_computation_and_so_other_keys(tmp_path, undisturbed):
    """Also for a model that does not need it: what may change a gradient is in every key."""
    run = trained(tmp_path, allow_nondeterministic=True)
    assert not set(run.digests) & set(undisturbed)
    assert run.finished.manifest.computation.exact is False


def test_verdict_plan_metrics_events_and_progress_say_not_exact(loose, exact):
    for run, marked in ((loose, True), (exact, False)):
        verdict = verdict_of(run.finished, run.folder, 1.0, "complete", run.finished.plan.warnings)
        assert json.loads(json.dumps(verdict.metrics()))["exact"] is not marked
        assert ("NOT EXACT" in verdict_text(verdict).splitlines()[0]) == marked
        assert ("exact" in [label for label, _ in verdict_rows(verdict)]) == marked
        assert any("NOT EXACT" in warning for warning in run.finished.plan.warnings) == marked
        mark = "NOT_EXACT" if marked else "exact"
        assert run.metric("raycloak_run_claims_info", exactness=mark) == 1
        (admitted,) = (line for line in run.told if line["event"] == "admitted")
        assert admitted["exactness"] == mark
        assert [report.exact for report in run.reports] == [not marked] * 3


def test_a_worker_that_was_set_up_otherwise_is_refused_by_name(tmp_path):
    """The numerics class has it, so a worker that lets such operations run is none of an exact run."""

    def tamper(worker: TrainWorker, member_id: str) -> None:
        def prepare(self, setup):
            allowed = worker_setup(config(allow_nondeterministic=True), tmp_path)
            return TrainWorker.prepare(self, allowed)

        if member_id == "worker-1":
            worker.prepare = prepare.__get__(worker)

    run = trained(tmp_path, tamper=tamper)
    assert run.left == [("worker-1", "manifest_mismatch")]
    assert "numerics" in run.departures[0].message


def test_the_known_answer_must_agree_still(tmp_path):
    """An operation that gives other bits on two workers puts two values under one noise, allowed or not."""

    def tamper(worker: TrainWorker, member_id: str) -> None:
        def varying(self, mechanism):
            answer = TrainWorker.compute_known_answer(self, mechanism)
            self._stage.known_answer = bytes(byte ^ 1 for byte in answer)
            return self._stage.known_answer

        if member_id == "worker-2":
            worker.compute_known_answer = varying.__get__(worker)

    run = trained(tmp_path, tamper=tamper, **WITH_PUT, allow_nondeterministic=True)
    assert run.left == [("worker-2", "manifest_mismatch")]
    assert "known_answer" in run.departures[0].message
