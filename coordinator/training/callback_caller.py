"""The caller of callbacks: a thread for each of them, off the step path.

Hides threads, queues and deadlines. The run's own thread hands a report over and goes on; it alone warns of callbacks
that fail, so that a reader of the warnings needs no lock.

    run's thread     tell ──> queue of at most ROOM reports ──┐          settle, end: wait, with a deadline
    its own thread                                            └─> on_step_end(report), one after another

A thread for each, because one that hangs must not keep the others from what they are told.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.callbacks import (
    EVENTS,
    Callback,
    CheckpointReport,
    EvaluationReport,
    MeasurementReport,
    Report,
    RunEnded,
    RunStarted,
)
from raycloak.coordinator.training.reporting import MembershipReport, Outset, StepReport
from raycloak.metrics.reports import classes_of
from raycloak.workers.inputs.user_code import own_words
from raycloak.workers.terms.measurement import Released

EVENT_OF = {kind: event for event, kind in EVENTS.items()}


@dataclass(frozen=True, slots=True)
class Patience:
    """The bounds within which the run bears with a callback, in seconds.

    Attributes:
        room: reports that may wait for a callback.
        call_s: how long one call may last until it is named.
        verdict_s: how long the verdict waits for what callbacks may add to its warnings.
        end_s: how long the end of the run waits for all that is left. A tracking server takes its time for a model.
    """

    room: int = 1_000
    call_s: float = 60.0
    verdict_s: float = 10.0
    end_s: float = 120.0


class CallbackThread:
    """Calls one callback, in order, in a thread that begins with the first report and ends with `RunEnded`.

    Guarantee: :meth:`tell` never waits for the callback. If ``room`` reports wait already, the oldest step among them
    is left out, which :meth:`troubles` says once. So everything but steps arrives, in order, unless the callback was
    given up by name: because it raised, or because nothing that waited was a step.
    """

    def __init__(self, callback: Callback, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._callback = callback
        self._name = type(callback).__name__
        self._patience = patience
        self._clock = clock
        # One lock for all below: both threads change each of them.
        self._changed = threading.Condition()
        self._waiting: deque[Report] = deque()
        self._call: tuple[str, float] | None = None
        self._troubles: list[str] = []
        self._thread: threading.Thread | None = None
        self._given_up = self._was_slow = False
        self._left_out = 0

    def tell(self, report: Report) -> None:
        """Hand a report over; the callback gets a copy of its own."""
        with self._changed:
            self._notice_slowness()
            if not self._given_up and (behind := len(self._waiting)) >= self._patience.room:
                steps = (place for place, each in enumerate(self._waiting) if isinstance(each, StepReport))
                oldest = next(steps, None)
                if oldest is None:
                    self._drop(f"is not called again: {behind} reports wait for it, and none is of a step")
                else:
                    if not self._left_out:
                        self._say(f"is behind by {behind} reports: from now on the oldest steps are left out for it")
                    del self._waiting[oldest]
                    self._left_out += 1
            if self._given_up:
                return
            self._waiting.append(deepcopy(report))
            if self._thread is None:
                # A daemon: a call that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._work, name=f"callback {self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, deadline: float) -> bool:
        """Wait until everything was told, at most until ``deadline`` on the clock; return whether it was."""
        with self._changed:
            while self._waiting or self._call is not None:
                left_s = deadline - self._clock()
                if left_s <= 0 or not self._changed.wait(left_s):
                    self._notice_slowness()
                    return not self._waiting and self._call is None
            return True

    def give_up(self, waited_s: float) -> None:
        """Stop calling a callback that has not come to its end."""
        with self._changed:
            if not self._given_up:
                self._drop(f"did not come to its end within {waited_s:g} s: {len(self._waiting)} reports are lost")

    def troubles(self) -> list[str]:
        """Return the sentences about this callback that were not returned before."""
        with self._changed:
            said, self._troubles = self._troubles, []
            return said

    def count_left_out(self) -> None:
        """Say how many steps were left out since this was asked last."""
        with self._changed:
            if self._left_out:
                self._say(f"was not told of {self._left_out} steps, since it was behind")
            self._left_out = 0

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._given_up)
                if self._given_up:
                    self._thread = None
                    return
                report = self._waiting.popleft()
                event = EVENT_OF[type(report)]
                self._call = event, self._clock()
            failure: BaseException | None = None
            try:
                getattr(self._callback, event)(report)
            except BaseException as error:  # noqa: BLE001 - also SystemExit: a watcher ends no run that it watches
                failure = error
            with self._changed:
                self._call = None
                if failure is not None and not self._given_up:
                    self._drop(f"is not called again: {event} failed with {own_words(failure)}")
                is_over = isinstance(report, RunEnded) or self._given_up
                if is_over:
                    self._thread = None
                self._changed.notify_all()
                if is_over:
                    return

    def _notice_slowness(self) -> None:
        if self._call is None or self._was_slow:
            return
        event, since = self._call
        if self._clock() - since > self._patience.call_s:
            self._was_slow = True
            self._say(f"has been in {event} for more than {self._patience.call_s:g} s; the run does not wait for it")

    def _drop(self, why: str) -> None:
        self._given_up = True
        self._waiting.clear()
        self._say(why)

    def _say(self, what: str) -> None:
        sentence = f"The callback {self._name} {what}"
        self._troubles.append(sentence if sentence.endswith(".") else f"{sentence}.")


@dataclass(eq=False)
class CallbackCaller:
    """Tells the callbacks of one run, each in its own thread. Its methods are for the run's own thread.

    Guarantee: a callback that raises, hangs or lags behind ends no run and costs no step any time, since the steps it
    watches are charged. It is named in a warning, once for each of these.

    Attributes:
        warned: called with the sentence, in the run's own thread.
    """

    callbacks: InitVar[Sequence[Callback]]
    warned: Callable[[str], None]
    patience: Patience = Patience()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, callbacks: Sequence[Callback]) -> None:
        self._threads = [CallbackThread(callback, self.patience, self.clock) for callback in callbacks]
        self._started = self._ending = False
        # Members may change before there is a start to tell of.
        self._early: list[MembershipReport] = []

    def started(self, run_dir: Path, config: RunConfig, outset: Outset) -> None:
        """Tell that training begins."""
        manifest, plan = outset.manifest, outset.plan
        mechanism = manifest.computation.mechanism
        private = mechanism.private
        self._started = True
        self.tell(
            RunStarted(
                run_dir=run_dir,
                run_id=manifest.run_id,
                name=config.name,
                account=manifest.account,
                steps=mechanism.steps,
                virtual_workers=mechanism.virtual_workers,
                parameters=mechanism.dimension,
                finished_steps=outset.finished_steps,
                private=private,
                exact=manifest.computation.exact,
                evidence_class=outset.evidence_class,
                epsilon_planned=plan.epsilon if private else None,
                epsilon_cap=plan.epsilon_cap if private else None,
                delta=plan.delta if private else None,
                noise_multiplier=mechanism.noise_multiplier if private else None,
                sample_rate=mechanism.sample_rate,
                config=config.model_dump(mode="json"),
            )
        )
        early, self._early = self._early, []
        for report in early:
            self.tell(report)

    def evaluated(self, steps: int, found: Evaluation) -> None:
        """Tell of a result of the model that ``steps`` steps gave."""
        self.tell(EvaluationReport(steps, found.accuracy, found.loss, found.f1, found.own))

    def measured(self, found: Released) -> None:
        """Tell of a release of a measurement."""
        self.tell(MeasurementReport(found.query, found.number, found.after, found.values, found.deviation))

    def published(self, steps: int, digest: bytes) -> None:
        """Tell of a published package."""
        self.tell(CheckpointReport(steps, digest.hex()))

    def changed(self, report: MembershipReport) -> None:
        """Tell of a change of the members; one before the start is told after it."""
        if self._started:
            self.tell(report)
        else:
            self._early.append(report)

    def settle(self) -> None:
        """Wait a moment until everything is told, so that the verdict has the warnings."""
        self._wait(self.patience.verdict_s)
        for thread in self._threads:
            thread.count_left_out()
        self._pass_on()

    def ended(self, run_dir: Path, ending: str, metrics: dict[str, Any] | None) -> None:
        """Tell of the end of an execution, if its start was told."""
        if self._started:
            self.tell(RunEnded(run_dir, ending, metrics))
            self._ending = True
        self._started = False

    def finish(self) -> None:
        """Wait until the callbacks were told of an end, where there was one. Nothing of the run is held up by it."""
        self._early = []
        if not self._ending:
            return
        self._ending = False
        for thread in self._wait(self.patience.end_s):
            thread.give_up(self.patience.end_s)
        self._pass_on()

    def tell(self, report: Report) -> None:
        """Tell of anything that may happen once the start was told."""
        # Nothing is told that is not declared, field by field, to be public.
        classes_of(type(report))
        for thread in self._threads:
            thread.tell(report)
        self._pass_on()

    def _wait(self, seconds: float) -> list[CallbackThread]:
        """Return the threads that are not through after so many seconds, which all of them share."""
        deadline = self.clock() + seconds
        return [thread for thread in self._threads if not thread.settle(deadline)]

    def _pass_on(self) -> None:
        for thread in self._threads:
            for sentence in thread.troubles():
                self.warned(sentence)
