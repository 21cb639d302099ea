"""The members of a run: the one record of its workers and aggregators, and how any of them is lost.

Admission, growth and hosting all read and change it; none of them keeps a list of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.cluster.backend import ActorLost, Backend
from raycloak.coordinator.cluster.calls import Reference
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.cluster.remote import AggregatorActor, WorkerActor
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.membership.departures import ACCIDENTS, ASKED, Departure, Departures
from raycloak.coordinator.membership.timing import Backoff, Timer
from raycloak.metrics.errors import ConfigError, RaycloakError, RefusedError

A = TypeVar("A")


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
        return self.departures.too_few(len(self.workers), self.config.fewest_workers)
