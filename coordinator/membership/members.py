"""The members of a run: the one record of its workers and aggregators, how any of them is lost, and how many may be.

Admission, growth and hosting all read and change it; none of them keeps a list of its own.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.cluster.backend import ActorLost, Backend
from raycloak.coordinator.cluster.control import START_AGAIN, Control
from raycloak.coordinator.cluster.remote import AggregatorActor, WorkerActor
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.vaults.calls import Reference
from raycloak.metrics.errors import ConfigError, RaycloakError, RefusedError, RunFailedError

A = TypeVar("A")

# Causes that befall a worker, unlike a refusal that it answers with: a replacement may well succeed.
ACCIDENTS = frozenset({"died", "unreachable", "deadline"})

# Reasons to leave between two steps that are no failure, so they never use up max_failures.
ASKED = {
    "left": "it was asked to end",
    "preempted": "its node is being drained",
    "revoked": "it was revoked",
    "key_share": "its machine has got as many virtual workers' keys of this epoch as the noise allows for",
}


@dataclass(frozen=True, slots=True)
class Departure:
    """A member that was refused, was lost or left, and why.

    Attributes:
        joined: False for a newcomer that was refused or lost before it was admitted.
    """

    member_id: str
    code: str
    message: str
    joined: bool = True

    @property
    def asked_for(self) -> bool:
        """Return whether it left between two steps as it was asked to, and so does not count as a failure."""
        return self.code in ASKED


@dataclass(slots=True)
class Departures:
    """All departures of a run, in order.

    Attributes:
        max_failures: losses the run survives; a newcomer that fails ends no run, but counts in :attr:`allow_newcomers`.
        told: told of each departure as it happens.
    """

    max_failures: int
    told: Callable[[Departure], None]
    all: list[Departure] = field(default_factory=list)
    _losses: int = 0
    _failed_joins: int = 0

    def add(self, departure: Departure, *, newcomer: bool = False) -> None:
        """Record a departure; ``newcomer`` is one that has not finished a step."""
        self.all.append(departure)
        if newcomer:
            self._failed_joins += not departure.asked_for
        else:
            self._losses += not departure.asked_for
        self.told(departure)

    @property
    def allow_newcomers(self) -> bool:
        """Return whether another worker may be started, after losses and failed newcomers."""
        return self._losses + self._failed_joins <= self.max_failures

    def check(self) -> None:
        """Raise RunFailedError ``too_many_failures`` once more than ``max_failures`` members were lost."""
        if self._losses > self.max_failures:
            raise RunFailedError(
                "too_many_failures", f"more than {self.max_failures} failures: {self.reasons()}.", START_AGAIN
            )

    def share_a_cause(self, last: int) -> bool:
        """Return whether the newest ``last`` departures share one cause that would meet any replacement as well."""
        codes = {departure.code for departure in self.all[-last:]}
        return len(codes) == 1 and not codes & ACCIDENTS

    def reasons(self) -> str:
        """Return every departure with its reason, in one line."""
        return "; ".join(f"{d.member_id}: {d.code} ({d.message})" for d in self.all) or "none was started"


# A machine that breaks every newcomer must not cost a process start at each step; a node that comes back is used within
# a minute.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Timer:
    """A clock and its pauses, in seconds; tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class Backoff:
    """The pause before another newcomer is started: 1 s after a failure, then twice as long each time, up to 60 s."""

    timer: Timer
    _pause_s: float = 0.0
    _not_before: float = 0.0

    @property
    def pauses(self) -> bool:
        """Return whether a newcomer that failed still holds back the next one."""
        return self._pause_s > 0 and self.timer.now() < self._not_before

    def failed(self) -> None:
        """Begin a pause: a newcomer was lost or refused before it finished a step."""
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._not_before = self.timer.now() + self._pause_s

    def succeeded(self) -> None:
        """End the pauses: a newcomer has finished a step."""
        self._pause_s = 0.0


@dataclass(frozen=True, slots=True)
class Leave:
    """A request that a worker leaves.

    Attributes:
        code: ``left`` or ``preempted``.
        since: when it was made, on the timer.
    """

    code: str
    since: float


@dataclass(slots=True)
class Members:
    """The workers and aggregators of a run; a run that has not started any yet has none.

    Attributes:
        departures: all members that were refused, were lost or left so far.
        backoff: holds back newcomers after one that failed.
        workers: by member id.
        aggregators: in range order.
        presentations: the newest signed presentation of every member.
        leaving: workers that will go at a step boundary.
        untried: workers that joined after the start and have not finished a step.
    """

    config: RunConfig
    backend: Backend
    control: Control
    departures: Departures
    timer: Timer
    backoff: Backoff
    workers: dict[str, WorkerActor]
    aggregators: list[AggregatorActor] = field(default_factory=list)
    presentations: dict[str, Envelope] = field(default_factory=dict)
    leaving: dict[str, Leave] = field(default_factory=dict)
    untried: set[str] = field(default_factory=set)

    def ask_workers(
        self, ask: Callable[[WorkerActor], Reference[A]], meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, A]:
        """Ask every worker one question; returns the answers by member id. A worker that fails at it leaves.

        Args:
            ask: the question, for one worker.
            meanwhile: called once all are asked, before the first answer is waited for.
        """
        answers: dict[str, A] = {}
        asked = {member_id: ask(worker) for member_id, worker in self.workers.items()}
        meanwhile()
        self.collect(asked, answers.__setitem__)
        return answers

    def collect(self, asked: Mapping[str, Reference[A]], use: Callable[[str, A], None]) -> None:
        """Hand each worker's answer to ``use``; a worker whose answer or whose use fails leaves.

        A ConfigError is the user's, not the worker's, and ends the run.
        """
        deadline_s = self.config.failure.admission_deadline_s
        ready = self.backend.wait(list(asked.values()), deadline_s)
        for member_id, reference in asked.items():
            try:
                if reference not in ready:
                    raise ActorLost("deadline")
                use(member_id, self.backend.fetch(reference, deadline_s))
            except ActorLost as lost:
                self.lose(member_id, lost.cause, f"{member_id} did not answer within {deadline_s:g} s or died")
            except ConfigError:
                raise
            except RaycloakError as refusal:
                self.lose(member_id, refusal.code, refusal.message)

    def lose(self, member_id: str, code: str, message: str) -> None:
        """Take a worker off the run: it is stopped, expelled and reported."""
        actor = self.workers.pop(member_id)
        leave = self.leaving.pop(member_id, None)
        self.presentations.pop(member_id, None)
        self.backend.stop(actor)
        # A worker that ended while it was waiting to be let go was not lost by accident.
        departure = Departure(member_id, leave.code if leave and code in ACCIDENTS else code, message)
        newcomer = member_id in self.untried
        if newcomer:
            self.untried.discard(member_id)
            self.backoff.failed()
        self.depart(departure, newcomer=newcomer)

    def depart(self, departure: Departure, *, newcomer: bool) -> None:
        """Expel a member that was stopped, and record its departure."""
        # Expelled before it is reported: a reader of the report may rely on it that the member gets nothing any more.
        self.control.orchestrator.expel(departure.member_id, departure.code)
        self.departures.add(departure, newcomer=newcomer)

    def ask_to_leave(self, member_id: str, code: str) -> None:
        """Have a worker leave at the next step boundary that can spare it; ``code`` is ``left`` or ``preempted``."""
        if member_id in self.workers:
            self.leaving.setdefault(member_id, Leave(code, self.timer.now()))

    def take_leave(self, member_id: str, code: str) -> None:
        """Take a worker off the run for a reason that is nobody's failure."""
        self.lose(member_id, code, f"{member_id} left: {ASKED[code]}")

    @property
    def enough(self) -> bool:
        """Return whether there are as many workers as the run needs."""
        return len(self.workers) >= self.config.fewest_workers

    def too_few(self) -> RefusedError:
        """Return the error that ends a run for want of workers."""
        left, needed, reasons = len(self.workers), self.config.fewest_workers, self.departures.reasons()
        return RefusedError(
            "too_few_workers", f"{left} workers are left, the run needs {needed}: {reasons}.", START_AGAIN
        )
