"""A loop whose steps somebody else allows and releases: the bytes of the loop that waits for nobody."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from raycloak.attestation.orchestrator.revocations import revoke
from raycloak.attestation.orchestrator.state import state_file
from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_LIFETIME_S, SimulatedVendor
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.ledger.entries import StepCharged, VectorsBound
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.record.outcome import Ending
from raycloak.coordinator.training import state_requests
from raycloak.coordinator.training.assignment import NewRun, ResumedRun
from raycloak.coordinator.training.pace import GatedPace, StepLeft, StopRequest, stop_on_signals
from raycloak.coordinator.training.steps import Training
from raycloak.metrics.errors import RunFailedError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import NOW, Call, Clock, Fate, WholeRun, on, trained, whole_run

RUN_ID = "the one of SECRET"
STEPS = 3


@dataclass(frozen=True)
class Look:
    """A request that does nothing but to be told of."""

    after: int
    name: str = ""


class Owner:
    """The owner of a run's loop: by default it allows each step when it is asked for, and releases it at once.

    Attributes:
        leaving: called with the step that is held.
        waiting: called with the step that waits for its release, before it is released.
        between: called with each request, when it is due.
        at_end: called when no step will follow, before the run ends; over has why.
        releases: whether it releases what waits.
        told: (finished steps, request) of each request that was done.
    """

    def __init__(self, run: WholeRun) -> None:
        self.run = run
        self.over: list[str] = []
        self.at_end: Callable[[], object] = lambda: None
        self.stop = run.coordinator.order.assignment.stop
        self.pace = GatedPace(self.stop, self._computed, self._held, self._over)
        self.computed: list[tuple[int, float | None]] = []
        self.held: list[tuple[int, float | None]] = []
        self.leaving: Callable[[int], None] = lambda step: None
        self.told: list[tuple[int, Look]] = []
        self.waiting: Callable[[int], None] = lambda step: None
        self.between: Callable[[Look], None] = lambda request: None
        self.releases = True
        run.coordinator.order = replace(run.coordinator.order, pace=self.pace)

    def _computed(self, step: int, epsilon: float | None, counted: object) -> None:
        assert counted is None, "the run is private"
        self.computed.append((step, epsilon))
        self.waiting(step)
        if self.releases:
            self.pace.allow(step + 2, step + 1)

    def _held(self, step: int, epsilon: float | None) -> None:
        self.held.append((step, epsilon))
        self.leaving(step)

    def _over(self, ending: str) -> None:
        self.over.append(ending)
        self.at_end()

    def ask(self, request: Look) -> None:
        def act(training: Training) -> None:
            self.told.append((training.finished_steps, request))
            self.between(request)

        self.pace.ask(request.after, act)

    def train(self) -> WholeRun:
        """Run to the planned steps, and let the run end."""
        self.pace.allow(1, 0)
        self.ask(Look(STEPS, "the end"))
        former = self.between
        self.between = lambda request: (former(request), self.pace.close() if request.name == "the end" else None)
        self.run.train()
        return self.run


def owned(home: Path, **fields) -> Owner:
    return Owner(whole_run(home, **fields))


def entries(home: Path, kind: type) -> list[int]:
    """Return the steps of each entry of a kind in the ledger on disk."""
    ledger = PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", create=False)
    steps = [entry.event.step for entry in ledger.history() if isinstance(entry.event, kind)]
    ledger.close()
    return steps


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_a_gated_loop_gives_the_bytes_of_one_that_waits_for_nobody(tmp_path, undisturbed, workers):
    """A worker dies while the second step waits to be released, and its vector is lost with it."""
    disturb = on("reduce", "aggregator-0-0", "lacks", 1) if workers > 1 else None
    fields = {"num_workers": workers, "secure_aggregation": workers > 1}
    owner = owned(tmp_path, disturb=disturb, **fields)
    stage = owner.run.stage

    def kill(step: int) -> None:
        if step == 1 and workers > 1:
            stage.stop(owner.run.coordinator._training.admitted.membership.members.workers["worker-1"])

    owner.waiting = kill
    run = owner.train()
    assert run.digests == undisturbed
    assert run.finished.ending is Ending.COMPLETE
    assert [step for step, _ in owner.computed] == [0, 1, 2], "another attempt of a step is not told again"
    attempts = [outcome.commit.attempts for outcome in run.finished.outcomes]
    assert attempts == ([1, 1, 1] if workers == 1 else [1, 3, 1])
    assert run.left == ([] if workers == 1 else [("worker-1", "died")])
    epsilons = [epsilon for _, epsilon in owner.computed]
    assert epsilons == [report.epsilon for report in run.reports]


def test_guarantee_before_its_release_a_step_is_charged_and_bound_and_no_aggregator_is_asked(tmp_path, undisturbed):
    owner = owned(tmp_path)
    seen = []

    def look(step: int) -> None:
        assert entries(tmp_path, StepCharged) == entries(tmp_path, VectorsBound) == list(range(step + 1))
        assert len(owner.run.stage.calls("step")) == 3 * (step + 1)
        assert len(owner.run.stage.calls("reduce")) == step
        assert len(owner.run.digests) == step
        seen.append(step)

    owner.waiting = look
    assert owner.train().digests == undisturbed
    assert seen == [0, 1, 2]


def test_guarantee_before_it_is_admitted_nothing_of_a_step_is_charged(tmp_path, undisturbed):
    """Although its release is allowed long before."""
    owner = owned(tmp_path)
    owner.pace.allow(0, 3)
    for after in (0, 1, 2):
        owner.ask(Look(after))

    def look(request: Look) -> None:
        assert entries(tmp_path, StepCharged) == list(range(request.after))
        assert len(owner.run.stage.calls("charge")) == request.after
        owner.pace.allow(request.after + 1, 0)

    owner.between = look
    assert owner.train().digests == undisturbed
    assert [(after, request.after) for after, request in owner.told] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_an_open_gate_overlaps_binding_and_reduction_as_a_run_without_gates(tmp_path, undisturbed):
    """An aggregator is asked before the coordinator has looked at the ledger's answer."""

    def calls(run: WholeRun) -> list[tuple[str, str]]:
        return [(call.member_id, call.method) for call, _ in run.stage.log]

    plain = whole_run(tmp_path / "plain")
    plain.train()
    owner = owned(tmp_path / "gated")
    owner.pace.allow(STEPS, STEPS)
    assert owner.train().digests == undisturbed
    assert calls(owner.run) == calls(plain)


def test_watermarks_only_rise(tmp_path):
    pace = GatedPace(StopRequest(), *[lambda *_: None] * 3)
    pace.allow(5, 3)
    pace.allow(2, 1)
    assert [pace.is_released(step) for step in (2, 3)] == [True, False]


# --- held steps


def held(home: Path, *, everywhere: bool, **fields) -> Owner:
    """Return an owner who holds the second step when a worker computes its third micro-batch.

    That worker is cancelled then, and the others too if ``everywhere``.
    """
    asked = Counter()

    def tamper(worker: TrainWorker, member_id: str) -> None:
        def is_cancelled() -> bool:
            step = len(owner.run.digests)
            if step != 1 or owner.held or not (everywhere or member_id == "worker-1"):
                return False
            asked[member_id] += 1
            if asked[member_id] == 3:
                owner.pace.allow(2, 2, held=True)
            return asked[member_id] >= 3

        worker.is_cancelled = is_cancelled

    owner = owned(home, tamper=tamper, **fields)
    return owner


@pytest.fixture(scope="module")
def undisturbed_of_two(tmp_path_factory) -> list[str]:
    """Return the digests of a run whose vectors are of two micro-batches."""
    return trained(tmp_path_factory.mktemp("two"), micro_batch_size=4).digests


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_held_step_is_left_between_two_micro_batches_and_its_repetition_has_the_same_bytes(
    tmp_path, undisturbed_of_two, everywhere
):
    owner = held(tmp_path, everywhere=everywhere, micro_batch_size=4)

    def leave(step: int) -> None:
        assert entries(tmp_path, StepCharged) == [0, 1]
        assert entries(tmp_path, VectorsBound) == [0]
        assert not owner.pace.is_released(step), "its release was allowed before it was held"
        owner.pace.allow(2, 1)

    owner.leaving = leave
    run = owner.train()
    assert run.digests == undisturbed_of_two
    assert run.left == [], "a cancelled worker has not failed"
    assert [outcome.commit.attempts for outcome in run.finished.outcomes] == [1, 2, 1]
    assert owner.held == [(1, run.reports[1].epsilon)]
    assert entries(tmp_path, StepCharged) == entries(tmp_path, VectorsBound) == [0, 1, 2]


def test_a_worker_that_says_cancelled_and_was_not_is_taken_off_the_run(tmp_path, undisturbed):
    def tamper(worker: TrainWorker, member_id: str) -> None:
        if member_id == "worker-1":
            worker.is_cancelled = lambda: len(run.digests) == 1

    run = whole_run(tmp_path, tamper=tamper)
    run.train()
    assert run.digests == undisturbed
    assert run.left == [("worker-1", "cancelled")]


def test_guarantee_a_held_step_is_not_charged_before_it_is_allowed_again(tmp_path, undisturbed):
    owner = owned(tmp_path)

    def leave(step: int) -> None:
        assert entries(tmp_path, StepCharged) == []
        owner.pace.allow(1, 0, held=False)

    owner.leaving = leave
    owner.pace.allow(1, 1, held=True)
    owner.ask(Look(STEPS, "the end"))
    owner.between = lambda request: owner.pace.close()
    owner.run.train()
    assert owner.run.digests == undisturbed
    assert owner.held == [(0, None)]


def test_a_step_that_is_held_while_the_measurement_before_it_is_made_is_not_charged(tmp_path):
    fields = {
        "measurements": {"evaluation": {"every": 2, "noise_multiplier": 2.0, "loss_bound": 4.0}},
        "dp_config": {"noise_multiplier": 2.0, "epsilon_cap": 40.0},
    }
    plain = whole_run(tmp_path / "plain", **fields)
    plain.train()
    seen = []

    def disturb(call: Call) -> Fate:
        if call.method == "measure" and call.index == 0:
            owner.pace.allow(3, 2, held=True)
        return None

    def leave(step: int) -> None:
        seen.append((step, len(owner.run.stage.calls("charge"))))
        owner.pace.allow(3, 2)

    owner = owned(tmp_path / "owned", disturb=disturb, **fields)
    owner.leaving = leave
    assert owner.train().digests == plain.digests
    assert seen == [(2, 3)], "two steps and the measurement were charged"
    assert owner.held == [(2, None)]


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_stop_leaves_a_held_step_and_a_resume_repeats_it(tmp_path, undisturbed, how):
    owner = held(tmp_path, everywhere=True, assignment=NewRun(archive(tmp_path)))
    owner.leaving = lambda step: (owner.stop.make if how == "stop" else owner.pace.close)()
    owner.pace.allow(1, 0)
    owner.run.train()
    assert owner.run.finished.ending is Ending.STOPPED
    assert owner.run.digests == undisturbed[:1]
    recorded = Manifest.model_validate_json((owner.run.folder / "manifest.json").read_bytes())
    again = owned(tmp_path, assignment=ResumedRun(recorded, archive(tmp_path)))
    again.pace.allow(STEPS, 0)
    assert again.train().digests == undisturbed[1:]
    assert entries(tmp_path, StepCharged) == [0, 1, 2]


# --- stops


def archive(home: Path) -> Archive:
    return Archive(CheckpointConfig(storage="packages"), RUN_ID, home, lambda line: None)


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_stop_leaves_a_step_that_waits_and_a_resume_repeats_it_with_the_same_receipt(tmp_path, undisturbed, how):
    owner = owned(tmp_path, assignment=NewRun(archive(tmp_path)))

    def leave(step: int) -> None:
        if step == 2:
            (owner.stop.make if how == "stop" else owner.pace.close)()

    owner.waiting, owner.releases = leave, False
    owner.pace.allow(STEPS, 2)
    run = owner.run
    run.train()
    assert run.finished.ending is Ending.STOPPED
    assert run.digests == undisturbed[:2]
    assert len(run.stage.calls("reduce")) == 2
    assert entries(tmp_path, StepCharged) == entries(tmp_path, VectorsBound) == [0, 1, 2]
    recorded = Manifest.model_validate_json((run.folder / "manifest.json").read_bytes())
    again = owned(tmp_path, assignment=ResumedRun(recorded, archive(tmp_path)))
    again.pace.allow(STEPS, 0)
    again.train()
    assert again.run.digests == undisturbed[2:], "from the package that the stop has sealed"
    assert again.run.finished.ending is Ending.COMPLETE
    assert entries(tmp_path, StepCharged) == entries(tmp_path, VectorsBound) == [0, 1, 2]


def test_a_stop_before_the_first_release_ends_the_run_and_a_resume_has_the_same_bytes(tmp_path, undisturbed):
    owner = owned(tmp_path, assignment=NewRun(archive(tmp_path)))
    owner.waiting, owner.releases = lambda step: owner.stop.make(), False
    owner.pace.allow(1, 0)
    with pytest.raises(RunFailedError, match="stopped"):
        owner.run.train()
    assert owner.run.coordinator.begun
    recorded = Manifest.model_validate_json((owner.run.folder / "manifest.json").read_bytes())
    again = owned(tmp_path, assignment=ResumedRun(recorded, archive(tmp_path)))
    assert again.train().digests == undisturbed
    assert entries(tmp_path, StepCharged) == [0, 1, 2]


def test_a_run_whose_steps_are_finished_waits_for_its_owner_and_a_stop_keeps_it_resumable(tmp_path, undisturbed):
    owner = owned(tmp_path, assignment=NewRun(archive(tmp_path)))
    owner.pace.allow(STEPS, STEPS)
    owner.ask(Look(STEPS, "a save after the last step"))
    owner.between = lambda request: owner.stop.make()
    owner.run.train()
    assert owner.run.finished.ending is Ending.STOPPED
    assert owner.run.digests == undisturbed
    recorded = Manifest.model_validate_json((owner.run.folder / "manifest.json").read_bytes())
    again = owned(tmp_path, assignment=ResumedRun(recorded, archive(tmp_path)))
    assert again.train().finished.model_digest.hex() == undisturbed[-1]
    assert again.run.finished.ending is Ending.COMPLETE
    assert again.run.digests == []


CAPPED = {"steps": 6, "overrides": ["dp_config.epsilon_cap=3.0"]}
FIT = 5
"""The steps that this cap has room for."""


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_run_at_its_cap_is_saved_before_it_ends_and_a_stop_keeps_it_resumable(tmp_path, how):
    owner = owned(tmp_path, assignment=NewRun(archive(tmp_path)), **CAPPED)
    saved = []

    def save(request: Look) -> None:
        saved.append(state_requests.save(owner.run.coordinator._training, "s", request.after))
        owner.stop.make() if how == "stop" else owner.pace.close()

    owner.between = save
    owner.pace.allow(FIT + 1, FIT + 1)
    # It is due after the step that has no room; as a caller asks, who is told so.
    owner.at_end = lambda: owner.ask(Look(FIT))
    owner.run.train()
    assert owner.over == ["cap_exceeded"]
    (state,) = saved
    assert (state.step, state.model_digest.hex()) == (FIT, owner.run.digests[-1])
    finished = owner.run.finished
    assert (finished.steps, finished.ending) == (FIT, Ending.STOPPED if how == "stop" else Ending.CAP)
    assert entries(tmp_path, StepCharged) == list(range(FIT))
    if how == "stop":
        recorded = Manifest.model_validate_json((owner.run.folder / "manifest.json").read_bytes())
        again = owned(tmp_path, assignment=ResumedRun(recorded, archive(tmp_path)), **CAPPED)
        again.pace.allow(FIT, FIT)
        again.ask(Look(FIT))
        again.between = lambda request: again.pace.close()
        again.run.train()
        assert (again.over, again.run.digests, again.run.finished.steps) == ([], [], FIT)
        assert entries(tmp_path, StepCharged) == list(range(FIT)), "no step comes that is not asked for"


def test_a_signal_ends_a_wait(tmp_path):
    """The handler runs in the thread that waits."""
    stop = StopRequest()
    pace = GatedPace(stop, *[lambda *_: None] * 3)
    with stop_on_signals(stop, lambda line: None):
        threading.Thread(target=signal.pthread_kill, args=(threading.get_ident(), signal.SIGTERM)).start()
        with pytest.raises(StepLeft):
            pace.release(0)


# --- long waits


def test_evidence_that_ages_while_a_step_waits_is_renewed_before_the_step_is_reduced(tmp_path):
    digests = {}
    for name, life in (("short", 0), ("long", 700)):
        clock = Clock()
        owner = owned(tmp_path / name, clock=clock)
        owner.run.change(policy=owner.run.session.policy.model_copy(update={"evidence_lifetime_s": 600}))
        owner.waiting = lambda step, life=life, clock=clock: clock.sleep(life if step == 1 else 0)
        digests[name] = owner.train().digests
        attempts = [outcome.commit.attempts for outcome in owner.run.finished.outcomes]
        assert attempts == ([1, 2, 1] if life else [1, 1, 1])
        admitted = [kind for kind, _ in owner.run.evidence if kind == "admitted"]
        assert len(admitted) == (8 if life else 4)
    assert digests["long"] == digests["short"]
    assert owner.run.left == []


def test_evidence_that_is_renewed_after_a_wait_is_judged_by_the_collateral_of_that_time(tmp_path, undisturbed):
    clock = Clock()
    owner = owned(tmp_path, clock=clock)
    vendor = SimulatedVendor.load_or_create(tmp_path / "simulator")
    owner.run.change(collateral_now=lambda: vendor.collateral(int(clock())))
    owner.waiting = lambda step: clock.sleep(COLLATERAL_LIFETIME_S + 60 if step == 1 else 0)
    assert owner.train().digests == undisturbed
    assert owner.run.left == []
    assert len(owner.run.stage.calls("take_collateral")) == 1


def test_guarantee_an_aggregator_that_is_revoked_while_a_step_waits_is_sent_nothing_of_it(tmp_path, undisturbed):
    owner = owned(tmp_path)
    stage = owner.run.stage

    def revoked(step: int) -> None:
        if step == 1:
            state = state_file(tmp_path / "orchestrator", owner.run.session.run_id)
            revoke(state, "member", "aggregator-0-0", reason="stolen", now=NOW)

    owner.waiting = revoked
    assert owner.train().digests == undisturbed
    asked = [call.member_id for call in stage.calls("reduce")]
    assert asked == ["aggregator-0-0", "aggregator-0-1", "aggregator-0-1"]
    assert owner.run.left == [("aggregator-0-0", "revoked")]


def test_files_of_a_step_are_known_when_it_is_admitted(tmp_path):
    owner = owned(tmp_path)
    for step in range(STEPS):
        owner.pace.send(step, (tmp_path / f"{step}.batch",))
    seen = {}
    owner.waiting = lambda step: seen.update({step: owner.pace.batches(step)})
    owner.train()
    assert seen == {step: (tmp_path / f"{step}.batch",) for step in range(STEPS)}
    assert owner.pace.batches(STEPS) == ()


# --- requests to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number):
    request, notices = StopRequest(), []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signals(request, notices.append):
        assert not request.made
        os.kill(os.getpid(), number)
        assert request.made
        assert len(notices) == 1
        assert number.name in notices[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_request_may_be_made_twice():
    request = StopRequest()
    request.make()
    request.make()
    assert request.made
