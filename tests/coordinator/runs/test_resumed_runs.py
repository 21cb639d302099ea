"""A run that is stopped, killed or replayed: the same bytes, and no second charge."""

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.ledger.entries import StepCharged
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.record.folder import RunFolder, RunRecord, run_lock
from raycloak.coordinator.record.outcome import Ending
from raycloak.coordinator.record.run_list import read_summary
from raycloak.coordinator.runs.discard import discard
from raycloak.coordinator.runs.execution import Execution
from raycloak.coordinator.training.assignment import NewRun, ReplayedRun, ResumedRun
from raycloak.coordinator.training.pace import StopRequest
from raycloak.coordinator.training.phases import Coordinator
from raycloak.coordinator.training.steps import Training
from raycloak.metrics.errors import BudgetError, ConfigError, EvidenceError, RaycloakError, RefusedError, RunFailedError
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import model_digest, tensor_digests
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.models import small_model
from tests.protocol import FEW_FAILURES, WholeRun, examples, trained, whole_run, with_another_tensor

STEPS = 6
RUN_ID = "the one of SECRET"


class Killed(BaseException):
    """An error that stands for a driver that ends without any of its handlers."""


def archive(home: Path, run_id: str = RUN_ID, every: int = 2) -> Archive:
    config = CheckpointConfig(checkpoint_frequency=every, storage="packages")
    return Archive(config, run_id, home, lambda line: None)


def begun(home: Path, disturb: Callable, **fields) -> WholeRun:
    """Return a run of STEPS steps that seals packages and ends as ``disturb`` has it."""
    home.mkdir(parents=True, exist_ok=True)
    assignment = fields.pop("assignment", NewRun(archive(home)))
    run = whole_run(home, assignment=assignment, steps=STEPS, **fields)
    run.stage.disturb = partial(disturb, run) if disturb.__name__ == "kill" else disturb
    with pytest.raises((Killed, RunFailedError)) as ended:
        run.train()
    run.ended = ended.value
    return run


def manifest_of(run: WholeRun) -> Manifest:
    return Manifest.model_validate_json((run.folder / "manifest.json").read_bytes())


def resumed(home: Path, first: WholeRun, **fields) -> WholeRun:
    assignment = ResumedRun(manifest_of(first), archive(home))
    return whole_run(home, assignment=assignment, steps=STEPS, **fields)


def killed_at(method: str, index: int, member: str | None = None) -> Callable:
    """Kill the driver when it makes that call."""

    def disturb(call):
        if (call.method, call.index) == (method, index) and member in (None, call.member_id):
            raise Killed

    return disturb


def killed_when_sealed(method: str, index: int) -> Callable:
    """Kill it likewise, once everything that was handed over to be sealed is published."""

    def kill(run: WholeRun, call) -> None:
        if (call.method, call.index) == (method, index):
            run.coordinator._training.checkpoints.close(60)
            raise Killed

    return kill


def charges(home: Path) -> list[int]:
    ledger = PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", create=False)
    ledger.verify()
    steps = [entry.event.step for entry in ledger.history() if isinstance(entry.event, StepCharged)]
    ledger.close()
    return steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[str]:
    return trained(tmp_path_factory.mktemp("undisturbed"), steps=STEPS).digests


@pytest.mark.parametrize(("method", "step"), [("charge", 0), ("open_step", 2), ("step", 1), ("reduce", 5)])
def test_a_killed_driver_resumes_with_the_same_bytes_and_no_second_charge(tmp_path, undisturbed, method, step):
    first = begun(tmp_path, killed_at(method, step, "worker-1" if method == "step" else None))
    second = resumed(tmp_path, first)
    second.train()
    at = STEPS - len(second.digests)
    assert at <= len(first.digests)
    assert first.digests[:at] + second.digests == undisturbed
    assert second.finished.steps == STEPS
    assert charges(tmp_path) == list(range(STEPS))
    assert len(read_exported_log(second.folder / "evidence.jsonl", second.session.orchestrator_key).entries) > STEPS


@pytest.fixture(scope="module")
def killed_late(tmp_path_factory) -> WholeRun:
    """Return a run that was killed as it was to charge its last step, with packages of 2 and 4 steps."""
    return begun(tmp_path_factory.mktemp("late"), killed_when_sealed("charge", 5))


def copied(run: WholeRun, home: Path) -> WholeRun:
    """Return a run whose files are a copy, for a test that goes on with them."""
    shutil.copytree(run.home, home, dirs_exist_ok=True)
    return replace(run, home=home, folder=home / run.folder.relative_to(run.home))


def test_a_resumed_run_starts_from_the_newest_package(tmp_path, killed_late, undisturbed):
    second = resumed(tmp_path, copied(killed_late, tmp_path))
    second.train()
    assert second.digests == undisturbed[4:]


def test_a_run_may_be_killed_again_and_again(tmp_path, undisturbed):
    run = begun(tmp_path, killed_at("step", 1, "worker-0"))
    for index in (2, 2, 2):
        run = resumed(tmp_path, run)
        run.stage.disturb = killed_at("charge", index)
        with pytest.raises(Killed):
            run.train()
        run.folder.joinpath("manifest.json").write_bytes(run.coordinator.order.assignment.recorded.encode())
    run = resumed(tmp_path, run)
    run.train()
    assert run.digests[-1] == undisturbed[-1]
    assert charges(tmp_path) == list(range(STEPS))


def test_a_resumed_run_may_have_other_workers_and_ranges(tmp_path, undisturbed):
    first = begun(tmp_path, killed_when_sealed("charge", 3), optimizer={"name": "adam", "learning_rate": 0.01})
    other = trained(tmp_path / "other", steps=STEPS, optimizer={"name": "adam", "learning_rate": 0.01})
    second = resumed(tmp_path, first, num_workers=5, aggregators=3, optimizer={"name": "adam", "learning_rate": 0.01})
    second.train()
    assert second.digests == other.digests[2:]
    assert other.digests != undisturbed


def test_a_stop_ends_after_the_step_with_a_package_and_a_log_and_can_be_resumed(tmp_path, undisturbed):
    stop = StopRequest()
    run = whole_run(
        tmp_path,
        steps=STEPS,
        assignment=NewRun(archive(tmp_path, every=0), stop),
        disturb=lambda call: stop.make() if (call.method, call.index) == ("reduce", 2) else None,
    )
    finished = run.train()
    assert (finished.ending, finished.steps) == (Ending.STOPPED, 3)
    assert run.digests == undisturbed[:3]
    read_exported_log(run.folder / "evidence.jsonl", run.session.orchestrator_key)
    second = resumed(tmp_path, run)
    assert second.train().ending is Ending.COMPLETE
    assert second.digests == undisturbed[3:]


def test_a_run_that_fails_seals_what_it_has(tmp_path, undisturbed):
    run = whole_run(
        tmp_path,
        steps=STEPS,
        overrides=["failure.join_timeout_s=0"],
        assignment=NewRun(archive(tmp_path, every=0)),
        disturb=lambda call: "dies" if (call.method, call.index) == ("step", 3) else None,
    )
    with run.events:
        with pytest.raises(RaycloakError):
            run.coordinator.run()
        finished = run.coordinator.salvage(destroy=False)
        for actor in run.session.control.actors.values():
            actor.handle.close()
    assert (finished.steps, finished.ending, run.coordinator.step) == (3, None, 3)
    assert finished.model_digest.hex() == undisturbed[2]
    second = resumed(tmp_path, run)
    second.train()
    assert second.digests == undisturbed[3:]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> WholeRun:
    """Return a run that was stopped after two steps."""
    home, stop = tmp_path_factory.mktemp("stopped"), StopRequest()
    run = whole_run(
        home,
        steps=STEPS,
        assignment=NewRun(archive(home, every=0), stop),
        disturb=lambda call: stop.make() if (call.method, call.index) == ("reduce", 1) else None,
    )
    run.train()
    return run


def _ended_badly(
    home: Path, stopped: WholeRun, what: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunFolder, list[int], list[str]]:
    """Resume a stopped run of two steps, which fails after its fourth, where ``what`` cannot be saved.

    Returns:
        Its directory, the steps that the evidence log there has as committed, and the lines that a watcher was told.
    """
    first, said = copied(stopped, home), []
    second = resumed(
        home,
        first,
        overrides=["failure.join_timeout_s=0"],
        disturb=lambda call: "dies" if (call.method, call.index) == ("step", 2) else None,
    )
    # Here each execution has a directory of its own.
    shutil.copy(first.folder / "evidence.jsonl", second.folder)
    (second.folder / "verdict.json").write_text('{"steps": 2}')
    folder = RunFolder(second.folder, RunRecord(**RECORD))
    folder.mark("running")
    execution = Execution(second.config, ModelSource.of(small_model), "/", notice=said.append)
    with second.events:
        with pytest.raises(RaycloakError) as failure:
            second.coordinator.run()
        with monkeypatch.context() as patch:

            def fail(*_: object, **__: object) -> None:
                raise OSError(28, "No space left on device") if what != "log" else ActorLost("died")

            place = {
                "packages": (Training, "seal"),
                "checkpoints": (Coordinator, "_close_checkpoints"),
                "model": (RunFolder, "write_parameters"),
                "result": (Coordinator, "_result"),
                "log": (Coordinator, "_export_log"),
            }[what]
            patch.setattr(*place, fail)
            execution._fail(second.coordinator, folder, failure.value, time.monotonic())
        for actor in second.session.control.actors.values():
            actor.handle.close()
    return folder, [body["step"] for kind, body in second.evidence if kind == "committed"], said


RECORD = {"run_id": "", "name": "run", "base": "/", "secret_file": None, "started_at": 0.0, "status": "running"} | {
    "driver_base": "/"
}


@pytest.mark.parametrize("what", ["packages", "checkpoints", "model", "result"])
def test_guarantee_a_run_whose_salvage_fails_too_is_marked_beside_its_newest_log(tmp_path, stopped, what, monkeypatch):
    folder, committed, said = _ended_badly(tmp_path, stopped, what, monkeypatch)
    assert RunFolder.open(folder.path).record.status == "failed"
    assert committed == [0, 1, 2, 3]
    assert any("not everything could be saved: [Errno 28]" in line for line in said)
    # The verdict of two steps would contradict log and ledger.
    listed = read_summary(folder.path)
    assert (listed.state, listed.steps) == ("failed", 4)


def test_guarantee_a_run_whose_newest_log_is_lost_counts_as_killed(tmp_path, stopped, monkeypatch):
    """Marked as failed, it would give an auditor the log of an earlier execution beside newer charges."""
    folder, committed, said = _ended_badly(tmp_path, stopped, "log", monkeypatch)
    assert RunFolder.open(folder.path).record.status == "running"
    assert committed == [0, 1]
    assert any("not everything could be saved" in line for line in said)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> WholeRun:
    """Return a run that was killed as it was to charge its fourth step."""
    return begun(tmp_path_factory.mktemp("killed"), killed_at("charge", 3))


@pytest.mark.parametrize(
    ("fields", "item"),
    [
        ({"seed": 1}, "computation.initial_parameters was "),
        ({"optimizer": {"learning_rate": 0.25}}, "computation.optimizer.learning_rate was 0.5, now 0.25"),
        ({"model": "tests.models:wide_model"}, "computation.model was tests.models:small_model, now"),
        ({"dp_config": {"noise_multiplier": 3.0, "epsilon_cap": 20.0}}, "noise_multiplier was 2.0, now 3.0"),
    ],
)
def test_another_computation_is_refused_before_anything_is_charged(tmp_path, killed, fields, item):
    first = copied(killed, tmp_path)
    second = resumed(tmp_path, first, **fields)
    with pytest.raises(RefusedError, match="resume_differs") as refusal:
        second.train()
    assert item in refusal.value.message
    assert charges(tmp_path) == [0, 1, 2]


def test_other_data_is_refused_before_anything_is_charged(tmp_path, killed):
    first = copied(killed, tmp_path)
    features, labels = examples()
    features[3] += 1
    second = resumed(tmp_path, first, data=(features, labels), overrides=FEW_FAILURES)
    with pytest.raises(RefusedError, match="data_changed") as refusal:
        second.train()
    assert re.search(r"virtual worker 3 .* was [0-9a-f]{64}, now [0-9a-f]{64}", refusal.value.message)
    assert charges(tmp_path) == [0, 1, 2]


def test_a_run_that_cannot_continue_now_may_be_resumed_later(tmp_path, killed):
    first = copied(killed, tmp_path)
    refused = resumed(tmp_path, first, seed=1)
    with refused.events, pytest.raises(RefusedError, match="resume_differs") as refusal:
        refused.coordinator.run()
    record = RunRecord(
        run_id="", name="run", base="/", secret_file=None, started_at=0.0, status="running", driver_base="/"
    )
    folder = RunFolder(refused.folder, record)
    execution = Execution(refused.config, ModelSource.of(small_model), "/", notice=lambda line: None)
    execution._fail(refused.coordinator, folder, refusal.value, time.monotonic())
    assert folder.record.status == "failed"
    assert "finished" not in {kind for kind, _ in refused.evidence}, "that would destroy a generated secret"
    for actor in refused.session.control.actors.values():
        actor.handle.close()


def test_a_model_that_does_not_come_out_the_same_is_neither_kept_nor_sealed(tmp_path, undisturbed):
    """The vectors are the same, the update is not; what came before it, and why it ended, is saved all the same."""
    first = begun(tmp_path, killed_at("charge", 3), assignment=NewRun())

    def another(report, parameters, state):
        return with_another_tensor(report), parameters, state

    second = resumed(tmp_path, first)
    second.stage.disturb = lambda call: another if (call.method, call.index) == ("reduce", 1) else None
    with second.events:
        with pytest.raises(RunFailedError, match="not_reproducible"):
            second.coordinator.run()
        finished = second.coordinator.salvage(destroy=False)
        for actor in second.session.control.actors.values():
            actor.handle.close()
    assert (finished.steps, finished.model_digest.hex()) == (1, undisturbed[0])
    assert [body["step"] for kind, body in second.evidence if kind == "reproduced"] == [0]
    third = resumed(tmp_path, first)
    third.train()
    assert third.digests == undisturbed[1:]


@pytest.mark.parametrize("index", [2, 3], ids=["committed before", "only computed before"])
def test_vectors_that_do_not_come_out_the_same_are_never_summed(tmp_path, monkeypatch, index):
    """Step 2 was finished, or its vectors were computed and the driver died over them."""
    first = begun(tmp_path, killed_at("reduce", index), assignment=NewRun())
    genuine = VirtualWorkerComputer.vector

    def other_bits(self, v, keys, step, model, root, parameters, *rest):
        result = genuine(self, v, keys, step, model, root, parameters, *rest)
        return replace(result, tag=bytes(a ^ 1 for a in result.tag)) if (step, v) == (2, 5) else result

    monkeypatch.setattr(VirtualWorkerComputer, "vector", other_bits)
    second = resumed(tmp_path, first)
    with pytest.raises(RunFailedError, match="not_reproducible") as failure:
        second.train()
    assert failure.value.step == 2
    assert len(second.stage.calls("reduce")) == 2


def test_a_ledger_that_was_put_back_is_refused(tmp_path):
    home = tmp_path / "home"
    first = begun(home, killed_when_sealed("charge", 2))
    shutil.copytree(home, tmp_path / "old")
    second = resumed(home, first)
    second.train()
    for path in home.glob("ledger.sqlite*"):
        path.unlink()
    for path in (tmp_path / "old").glob("ledger.sqlite*"):
        shutil.copy(path, home)
    third = resumed(home, first)
    with pytest.raises(BudgetError, match="ledger_rolled_back"):
        third.train()


def test_an_older_package_put_back_is_refused(tmp_path, killed_late):
    first = copied(killed_late, tmp_path)
    packages = sorted((tmp_path / "packages" / RUN_ID).iterdir())
    assert len(packages) == 2
    shutil.rmtree(packages[-1])
    with pytest.raises(EvidenceError, match="package_rolled_back"):
        resumed(tmp_path, first).train()


def test_the_model_is_on_disk_before_the_secret_may_go(tmp_path, undisturbed):
    run = begun(tmp_path, killed_at("finish", 0), assignment=NewRun())
    computation = manifest_of(run).computation
    saved = load_file(run.folder / "parameters.safetensors")
    digests = [tensor_digests(saved[each.name].reshape(-1), (each,))[0] for each in computation.tensors]
    assert model_digest(computation.tensors, digests).hex() == undisturbed[-1]


# --- replay


def replayed(home: Path, run: WholeRun, first: int, last: int, **fields) -> WholeRun:
    assignment = ReplayedRun(manifest_of(run), archive(home), first, last)
    return whole_run(home, assignment=assignment, steps=STEPS, **fields)


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory) -> WholeRun:
    """Return a run that is done, with packages of 4 and 6 steps."""
    home = tmp_path_factory.mktemp("finished")

    def wait(call) -> None:
        """Wait until the package of 4 steps is out, so that the next one does not take its place."""
        end = time.monotonic() + 300
        checkpoints = run.coordinator._training.checkpoints if run.coordinator._training else None
        while (call.method, call.index) == ("charge", 4) and (checkpoints._job or checkpoints._waiting):
            assert time.monotonic() < end
            checkpoints.poll()

    run = whole_run(home, steps=STEPS, assignment=NewRun(archive(home)), disturb=wait)
    run.train()
    return run


@pytest.fixture
def finished(tmp_path, finished_once) -> WholeRun:
    """Return that run with files of the test's own."""
    return copied(finished_once, tmp_path)


@pytest.mark.parametrize("workers", [2, 5])
def test_a_replay_gives_the_logged_digests_and_charges_nothing(tmp_path, finished, undisturbed, workers):
    again = replayed(tmp_path, finished, 5, 6, num_workers=workers)
    again.train()
    assert again.digests == undisturbed[4:]
    assert charges(tmp_path) == list(range(STEPS))


def test_a_replay_starts_at_the_manifest_without_an_older_package(tmp_path, finished, undisturbed):
    again = replayed(tmp_path, finished, 1, 3)
    again.train()
    assert again.digests == undisturbed[:3]


def test_a_replay_of_a_step_that_was_never_charged_is_refused(tmp_path, killed):
    first = copied(killed, tmp_path)
    again = replayed(tmp_path, first, 2, 5)
    with pytest.raises(RefusedError, match="not_charged"):
        again.train()
    assert charges(tmp_path) == [0, 1, 2]


def test_a_replay_of_a_step_that_was_charged_but_not_committed_is_refused(tmp_path):
    # Four steps are in a package, and with it committed; a roster alone commits a step only when the next is reduced.
    first = begun(tmp_path, killed_at("reduce", 4))
    assert charges(tmp_path) == [0, 1, 2, 3, 4]
    again = replayed(tmp_path, first, 2, 5)
    with pytest.raises(RefusedError, match="not_charged"):
        again.train()
    assert again.digests == first.digests[2:]
    assert len(again.stage.calls("reduce")) == 2


def test_a_digest_that_differs_ends_a_replay_before_the_next_receipt(tmp_path, finished):
    def another(report, parameters, state):
        return with_another_tensor(report), parameters + np.float32(1), state

    again = replayed(tmp_path, finished, 4, 6)
    again.stage.disturb = lambda call: another if (call.method, call.index) == ("reduce", 0) else None
    with pytest.raises(RunFailedError, match="not_reproducible") as failure:
        again.train()
    assert failure.value.step == 4
    assert len(again.stage.calls("charge")) == 1


# --- discarding


def test_a_discarded_run_has_no_secret_and_cannot_be_resumed(raycloak_home):
    raycloak_home.mkdir()
    run = whole_run(raycloak_home, secret=None, steps=STEPS, disturb=killed_at("charge", 2))
    with pytest.raises(Killed):
        run.train()
    record = RunRecord(
        run_id=run.session.run_id,
        name="run",
        base="/",
        secret_file=None,
        started_at=0.0,
        status="running",
        driver_base="/",
    )
    folder = RunFolder(run.folder, record)
    folder.mark("failed")
    (secret,) = raycloak_home.rglob("*.secret")
    with run_lock(record.run_id), pytest.raises(RefusedError, match="run_in_progress"):
        discard(run.folder)
    assert secret.exists()
    assert discard(run.folder).record.status == "void"
    assert not secret.exists()
    kind, body = run.evidence[-1]
    assert (kind, body) == ("finished", {"secret_destroyed": True})
    with pytest.raises(ConfigError, match="run_done"):
        discard(run.folder)
