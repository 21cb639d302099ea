"""Growth: replaces missing workers, starts more where there is room, and removes workers that are to leave.

A newcomer is a new member with a new id, new keys and new evidence, which joins between two steps. Steps continue
meanwhile with at least ``min_workers``; with fewer, the run waits for newcomers up to ``join_timeout_s``.

    start      the process; prepare and compute_known_answer are asked at once, one after the other
    present    a challenge, and the evidence that answers it
    admit      between two steps; only then is it placed and given keys

A newcomer that dies, is late or refuses is stopped and named. A stage that is not ready is looked at again at the next
step boundary.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.remote import WorkerActor
from raycloak.coordinator.membership.admission import MemberAdmission
from raycloak.coordinator.membership.crew import worker_id
from raycloak.coordinator.membership.members import ASKED, Departure, Members
from raycloak.coordinator.vaults.calls import Reference
from raycloak.metrics.errors import RaycloakError, RefusedError
from raycloak.workers.messages import WorkerSetup

# Seconds between two looks for drained nodes and for room for more workers: each look asks the cluster.
LOOK_EVERY_S = 2.0

# A wait for a newcomer ends this early, to check again for drained nodes and for the end of a pause after a failure.
POLL_S = 0.2


@dataclass(slots=True)
class _Newcomer:
    """A worker on its way; ``awaited`` are the answers that its stage waits for."""

    actor: WorkerActor
    since: float
    awaited: tuple[Reference[Any], ...]
    presents: bool = False


@dataclass(slots=True)
class Growth:
    """The workers that come and go between two steps.

    Attributes:
        setup: what each newcomer opens.
        on_join: told the member id of each worker that joins the run after its start.
    """

    members: Members
    admission: MemberAdmission
    setup: WorkerSetup
    on_join: Callable[[str], None]
    _newcomers: dict[str, _Newcomer] = field(default_factory=dict)
    _serial: Iterator[int] = field(init=False)
    _looked: float = -math.inf

    def __post_init__(self) -> None:
        # Behind those of the first workers.
        self._serial = itertools.count(self.members.config.num_workers)

    def settle(self) -> None:
        """Admit ready newcomers, let leaving workers go and start missing ones; called between two steps.

        Guarantee: it waits for no newcomer, and never takes the run below ``min_workers`` before a worker that was
        asked to leave has stayed for ``join_timeout_s``.
        """
        members, config = self.members, self.members.config
        if members.untried & set(members.workers):
            members.backoff.succeeded()
        members.untried.clear()
        looked = self._look()
        self._admit_newcomers()
        for member_id, leave in list(members.leaving.items()):
            overdue = members.timer.now() - leave.since >= config.failure.join_timeout_s
            if len(members.workers) > config.fewest_workers or overdue:
                members.take_leave(member_id, leave.code)
        self.refill()
        # Beyond the number that was asked for, as many as there is room for.
        more = config.most_workers - self._expected
        if looked and more > 0 and self._expected >= config.num_workers:
            self._start_newcomers(min(more, members.backend.room()))

    def wait_for_enough(self) -> None:
        """Wait for newcomers while there are fewer than ``min_workers``.

        Raises:
            RefusedError: ``too_few_workers`` after ``join_timeout_s``, or once no newcomer can be expected.
            RunFailedError: ``too_many_failures``.
        """
        if not self._wait_for(lambda: self.members.enough):
            raise self.members.too_few()
        self.members.departures.check()

    def await_newcomer(self) -> bool:
        """Wait for a newcomer to join, up to ``join_timeout_s`` and while one is expected; returns whether one did.

        Raises:
            RunFailedError: ``too_many_failures``.
        """
        before = set(self.members.workers)
        return self._wait_for(lambda: bool(self.members.workers.keys() - before))

    def _wait_for(self, arrived: Callable[[], bool]) -> bool:
        """Wait until newcomers ``arrived``; False after ``join_timeout_s``, or once none can be expected."""
        members = self.members
        deadline = members.timer.now() + members.config.failure.join_timeout_s
        while not arrived():
            members.departures.check()
            left_s = deadline - members.timer.now()
            if left_s <= 0 or not self.expects_newcomer:
                return False
            self._look()
            self.refill()
            # Until the newcomers' next stages are ready.
            if awaited := [reference for newcomer in self._newcomers.values() for reference in newcomer.awaited]:
                members.backend.wait(awaited, min(POLL_S, left_s))
            else:
                members.timer.sleep(min(POLL_S, left_s))
            self._admit_newcomers()
        return True

    def refill(self) -> None:
        """Start as many newcomers as there are workers missing to ``num_workers``."""
        self._start_newcomers(self.members.config.num_workers - self._expected)

    @property
    def expects_newcomer(self) -> bool:
        """Return whether a newcomer is on its way, or will be started."""
        is_missing = self._expected < self.members.config.num_workers
        return bool(self._newcomers) or (is_missing and self.members.departures.allow_newcomers)

    @property
    def _expected(self) -> int:
        """The number of workers once every newcomer has joined and every leaving worker has left."""
        return len(self.members.workers) - len(self.members.leaving) + len(self._newcomers)

    def _start_newcomers(self, count: int) -> None:
        for _ in range(count):
            if self.members.departures.allow_newcomers and not self.members.backoff.pauses:
                self._start(worker_id(next(self._serial)))

    def _start(self, member_id: str) -> None:
        try:
            actor = self.members.backend.start_worker(member_id)
        except RaycloakError as refusal:
            self._reject(member_id, refusal.code, refusal.message)
            return
        opening = actor.prepare(self.setup)
        computation = self.admission.terms.manifest.computation
        answer = actor.compute_known_answer(computation.mechanism, *computation.measurements)
        self._newcomers[member_id] = _Newcomer(actor, self.members.timer.now(), (opening, answer))

    def _look(self) -> bool:
        """Ask every few seconds which nodes are being drained; returns whether it was time to ask."""
        now = self.members.timer.now()
        if now - self._looked < LOOK_EVERY_S:
            return False
        self._looked = now
        for member_id in self.members.backend.departing():
            self._drop(member_id, "preempted", f"{member_id} did not join: {ASKED['preempted']}")
            self.members.ask_to_leave(member_id, "preempted")
        return True

    def _admit_newcomers(self) -> None:
        """Take every newcomer as far as it is without waiting, and admit those that presented themselves."""
        members = self.members
        for member_id, newcomer in list(self._newcomers.items()):
            answer = self._answer(member_id, newcomer)
            if answer is not None and not newcomer.presents:
                # Only now, because a challenge expires and preparing may take longer.
                newcomer.awaited = (self.admission.challenge(newcomer.actor),)
                newcomer.presents = True
                answer = self._answer(member_id, newcomer)
            if answer is None:
                continue
            try:
                self.admission.admit(member_id, answer)
            except RefusedError as refusal:
                self._drop(member_id, refusal.code, refusal.message)
                continue
            del self._newcomers[member_id]
            members.workers[member_id] = newcomer.actor
            members.untried.add(member_id)
            self.on_join(member_id)

    def _answer(self, member_id: str, newcomer: _Newcomer) -> Any:
        """Return the last answer of a newcomer's stage; None if it has not arrived, or the newcomer was dropped."""
        backend, deadline_s = self.members.backend, self.members.config.failure.admission_deadline_s
        if len(backend.wait(newcomer.awaited, 0)) < len(newcomer.awaited):
            if self.members.timer.now() - newcomer.since > deadline_s:
                self._drop(member_id, "deadline", f"{member_id} was not ready to join within {deadline_s:g} s")
            return None
        try:
            # In order: the first question that failed is the reason why those that followed failed.
            return [backend.fetch(reference, deadline_s) for reference in newcomer.awaited][-1]
        except ActorLost as lost:
            self._drop(member_id, lost.cause, f"{member_id} was lost while it joined")
        except RaycloakError as refusal:
            self._drop(member_id, refusal.code, refusal.message)
        return None

    def _drop(self, member_id: str, code: str, message: str) -> None:
        """Stop a newcomer and record why; nothing happens if there is none of that id."""
        newcomer = self._newcomers.pop(member_id, None)
        if newcomer is not None:
            self.members.backend.stop(newcomer.actor)
            self._reject(member_id, code, message)

    def _reject(self, member_id: str, code: str, message: str) -> None:
        """Record a newcomer that was stopped before it became a member, and hold back the next one."""
        self.members.backoff.failed()
        self.members.depart(Departure(member_id, code, message, joined=False), newcomer=True)
