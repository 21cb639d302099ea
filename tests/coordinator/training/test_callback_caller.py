"""Callbacks run off the step path: in order, bounded, each in a thread of its own; none of them costs a run."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.callback_caller import CallbackCaller, Patience
from raycloak.coordinator.training.callbacks import (
    Callback,
    CheckpointReport,
    EvaluationReport,
    MeasurementReport,
    RunEnded,
    RunStarted,
)
from raycloak.coordinator.training.reporting import MembershipReport, Outset, StepReport
from raycloak.workers.terms.measurement import Released
from tests.coordinator.config.test_run import GOOD
from tests.own_code import Fails, Told

FOLDER = Path("runs")
DEADLINE_S = 60.0
"""Far beyond what any of these waits takes."""

PATIENT = Patience(verdict_s=DEADLINE_S, end_s=DEADLINE_S)


def step(number: int) -> StepReport:
    return StepReport(number, 3, 0.1, 2.0, None, 3, "ab", 0.5)


def outset() -> Outset:
    mechanism = SimpleNamespace(
        steps=3, virtual_workers=8, dimension=83, private=True, noise_multiplier=1.5, sample_rate=0.25
    )
    computation = SimpleNamespace(mechanism=mechanism, exact=True)
    manifest: Any = SimpleNamespace(run_id="ab12", account="by-hand", computation=computation)
    plan: Any = SimpleNamespace(epsilon=1.75, epsilon_cap=2.0, delta=1e-5)
    return Outset(manifest, plan, "simulated", finished_steps=0, charged_steps=0, charged_epsilon=0.0)


def begin(caller: CallbackCaller) -> None:
    caller.started(FOLDER, parse_config(dict(GOOD)), outset())


class Blocked(Told):
    """Waits in its first step until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in, self.go = threading.Event(), threading.Event()

    def on_step_end(self, report) -> None:
        self.is_in.set()
        assert self.go.wait(DEADLINE_S)
        super().on_step_end(report)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    callback = Blocked()
    yield callback
    callback.go.set()


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_callbacks_are_told_of_all_events_in_order() -> None:
    callback = Told()
    caller = CallbackCaller((callback,), print, PATIENT)
    early, joined = MembershipReport("refused", "worker-3", "stale", 3), MembershipReport("joined", "worker-4", None, 4)
    caller.changed(early)
    begin(caller)
    caller.measured(Released(query="evaluation", number=0, after=1, values={"loss": 0.5}, deviation={"loss": 0.1}))
    caller.evaluated(1, Evaluation("accuracy", 0.5, 8, 0.25, {"auc": 0.75}))
    caller.tell(step(1))
    caller.changed(joined)
    caller.published(1, b"\xab")
    caller.ended(FOLDER, "complete", {"steps": 1})
    caller.finish()
    started, *rest = callback.told
    assert isinstance(started, RunStarted)
    assert (started.run_id, started.epsilon_planned, started.config["name"]) == ("ab12", 1.75, "run")
    assert started.marks == ("SIMULATED",)
    assert rest == [
        early,
        MeasurementReport("evaluation", 0, 1, {"loss": 0.5}, {"loss": 0.1}),
        EvaluationReport(1, 0.5, None, 0.25, {"auc": 0.75}),
        step(1),
        joined,
        CheckpointReport(1, "ab"),
        RunEnded(FOLDER, "complete", {"steps": 1}),
    ]


def test_guarantee_a_callback_that_raises_is_named_once_and_not_called_again_and_ends_no_run() -> None:
    said: list[str] = []
    failing, other = Fails(), Told()
    caller = CallbackCaller((failing, other), said.append, PATIENT)
    for _ in range(2):
        caller.tell(step(1))
        caller.settle()
    assert said == ["The callback Fails is not called again: on_step_end failed with KeyError: 'row 17'."]
    assert (failing.told, other.told) == ([step(1)], [step(1), step(1)])


def test_a_callback_that_leaves_python_ends_no_run() -> None:
    class Leaves(Callback):
        def on_step_end(self, report: StepReport) -> None:
            raise SystemExit(3)

    said: list[str] = []
    caller = CallbackCaller((Leaves(),), said.append, PATIENT)
    caller.tell(step(1))
    caller.settle()
    assert said == ["The callback Leaves is not called again: on_step_end failed with SystemExit: 3."]


def test_guarantee_a_callback_that_hangs_is_named_once_and_holds_up_neither_run_nor_others(blocked: Blocked) -> None:
    said: list[str] = []
    clock, other = Clock(), Told()
    caller = CallbackCaller((blocked, other), said.append, PATIENT, clock)
    begin(caller)
    caller.tell(step(1))
    assert blocked.is_in.wait(DEADLINE_S)
    # Else it is named too, where its thread is as late.
    assert caller._threads[1].settle(DEADLINE_S)
    clock.now = 61.0
    for number in (2, 3):
        caller.tell(step(number))
    named = "The callback Blocked has been in on_step_end for more than 60 s; the run does not wait for it."
    assert said == [named]
    until(lambda: other.told[1:] == [step(1), step(2), step(3)])


def test_at_the_end_a_callback_that_hangs_is_given_up_by_name(blocked: Blocked) -> None:
    said: list[str] = []
    caller = CallbackCaller((blocked,), said.append, Patience(verdict_s=0.0, end_s=0.0))
    begin(caller)
    caller.tell(step(1))
    assert blocked.is_in.wait(DEADLINE_S)
    caller.settle()
    caller.ended(FOLDER, "complete", None)
    caller.finish()
    assert said == ["The callback Blocked did not come to its end within 0 s: 1 reports are lost."]
    begin(caller)  # as a run does that is resumed within one process
    caller.tell(step(2))
    blocked.go.set()
    caller.finish()
    assert len(said) == 1


def test_guarantee_of_what_waits_the_oldest_steps_alone_are_left_out_and_it_is_said(blocked: Blocked) -> None:
    said: list[str] = []
    caller = CallbackCaller((blocked,), said.append, Patience(room=3, verdict_s=DEADLINE_S, end_s=DEADLINE_S))
    begin(caller)
    caller.tell(step(1))
    assert blocked.is_in.wait(DEADLINE_S)
    caller.published(1, b"\xab")
    for number in (2, 3, 4, 5):
        caller.tell(step(number))
    assert said == ["The callback Blocked is behind by 3 reports: from now on the oldest steps are left out for it."]
    blocked.go.set()
    caller.settle()
    assert said[1:] == ["The callback Blocked was not told of 2 steps, since it was behind."]
    caller.ended(FOLDER, "complete", None)
    caller.finish()
    assert blocked.told[1:] == [
        step(1),
        CheckpointReport(1, "ab"),
        step(4),
        step(5),
        RunEnded(FOLDER, "complete", None),
    ]
    assert len(said) == 2


def test_a_callback_with_no_step_to_leave_out_is_given_up_by_name(blocked: Blocked) -> None:
    said: list[str] = []
    caller = CallbackCaller((blocked,), said.append, Patience(room=2))
    caller.tell(step(1))
    assert blocked.is_in.wait(DEADLINE_S)
    for number in range(4):
        caller.published(number, b"\xab")
    assert said == ["The callback Blocked is not called again: 2 reports wait for it, and none is of a step."]


def test_what_a_callback_does_to_a_report_stays_its_own() -> None:
    class Greedy(Callback):
        def on_run_end(self, ended: RunEnded) -> None:
            ended.metrics.clear()  # type: ignore[union-attr]

    verdict, other = {"steps": 1}, Told()
    caller = CallbackCaller((Greedy(), other), print, PATIENT)
    begin(caller)
    caller.ended(FOLDER, "complete", verdict)
    caller.finish()
    assert verdict == {"steps": 1}
    assert other.told[-1].metrics == {"steps": 1}


def test_an_end_without_a_start_is_not_told() -> None:
    callback = Told()
    caller = CallbackCaller((callback,), print, PATIENT)
    caller.ended(Path("runs"), "no_cuda", None)
    caller.finish()
    assert callback.told == []


def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
