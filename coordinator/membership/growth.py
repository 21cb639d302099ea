"""Growth: replaces missing workers, starts more where there is room, and removes workers that are to leave.

A newcomer is a new member with a new id, new keys and new evidence, which joins between two steps. Steps continue
meanwhile with at least ``min_workers``; with fewer, the run waits for newcomers up to ``join_timeout_s``.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from raycloak.coordinator.membership.admission import MemberAdmission
from raycloak.coordinator.membership.crew import worker_id
from raycloak.coordinator.membership.departures import ASKED
from raycloak.coordinator.membership.members import Members
from raycloak.coordinator.membership.newcomers import Joining
from raycloak.metrics.errors import RefusedError
from raycloak.workers.messages import WorkerSetup

# Seconds between two looks for drained nodes and for room for more workers: each look asks the cluster.
LOOK_EVERY_S = 2.0

# A wait for a newcomer ends this early, to check again for drained nodes and for the end of a pause after a failure.
POLL_S = 0.2


@dataclass(slots=True)
class Growth:
    """The workers that come and go between two steps.

    Attributes:
        on_join: told the member id of each worker that joins the run after its start.
    """

    members: Members
    admission: MemberAdmission
    on_join: Callable[[str], None]
    _joining: Joining
    _serial: Iterator[int]
    _looked: float = -math.inf

    @classmethod
    def of(
        cls, members: Members, admission: MemberAdmission, setup: WorkerSetup, on_join: Callable[[str], None]
    ) -> Self:
        """Begin after the serial numbers of the first workers; newcomers are prepared as ``setup`` says."""
        joining = Joining(members=members, admission=admission, setup=setup)
        return cls(members, admission, on_join, joining, itertools.count(members.config.num_workers))

    def settle(self) -> None:
        """Admit ready newcomers, let leaving workers go and start missing ones; called between two steps.

        Guarantee: it waits for no newcomer, and never takes the run below ``min_workers`` before a worker that was
        asked to leave has stayed for ``join_timeout_s``.
        """
        if self.members.untried & set(self.members.workers):
            self.members.backoff.succeeded()
        self.members.untried.clear()
        looked = self._look()
        self._admit_newcomers()
        self._let_go()
        self.refill()
        if looked:
            self._grow()

    def wait_for_enough(self) -> None:
        """Wait for newcomers while there are fewer than ``min_workers``.

        Raises:
            RefusedError: ``too_few_workers`` after ``join_timeout_s``, or once no newcomer can be expected.
            RunFailedError: ``too_many_failures``.
        """
        members = self.members
        deadline = members.timer.now() + members.config.failure.join_timeout_s
        while not members.enough:
            members.departures.check()
            left_s = deadline - members.timer.now()
            if left_s <= 0 or not (self._joining or members.departures.allow_newcomers):
                raise members.too_few()
            self._look()
            self.refill()
            self._pause(min(POLL_S, left_s))
            self._admit_newcomers()
        members.departures.check()

    def refill(self) -> None:
        """Start as many newcomers as there are workers missing to ``num_workers``."""
        self._start_newcomers(self.members.config.num_workers - self._expected)

    def _grow(self) -> None:
        """Start as many more as there is room for, up to ``max_workers``."""
        config = self.members.config
        more = config.most_workers - self._expected
        if more > 0 and self._expected >= config.num_workers:
            self._start_newcomers(min(more, self.members.backend.room()))

    @property
    def _expected(self) -> int:
        """The number of workers once every newcomer has joined and every leaving worker has left."""
        return len(self.members.workers) - len(self.members.leaving) + len(self._joining)

    def _start_newcomers(self, count: int) -> None:
        for _ in range(count):
            if self.members.departures.allow_newcomers and not self.members.backoff.pauses:
                self._joining.start(worker_id(next(self._serial)))

    def _look(self) -> bool:
        """Ask every few seconds which nodes are being drained; returns whether it was time to ask."""
        now = self.members.timer.now()
        if now - self._looked < LOOK_EVERY_S:
            return False
        self._looked = now
        for member_id in self.members.backend.departing():
            self._joining.drop(member_id, "preempted", f"{member_id} did not join: {ASKED['preempted']}")
            self.members.ask_to_leave(member_id, "preempted")
        return True

    def _admit_newcomers(self) -> None:
        members = self.members
        for actor, envelope in self._joining.poll():
            try:
                self.admission.admit(actor.member_id, envelope)
            except RefusedError as refusal:
                members.backend.stop(actor)
                self._joining.reject(actor.member_id, refusal.code, refusal.message)
                continue
            members.workers[actor.member_id] = actor
            members.untried.add(actor.member_id)
            self.on_join(actor.member_id)

    def _let_go(self) -> None:
        members = self.members
        for member_id, leave in list(members.leaving.items()):
            overdue = members.timer.now() - leave.since >= members.config.failure.join_timeout_s
            if len(members.workers) > members.config.fewest_workers or overdue:
                members.take_leave(member_id, leave.code)

    def _pause(self, seconds: float) -> None:
        """Wait until the newcomers' next stages are ready, but no longer than ``seconds``."""
        if self._joining:
            self.members.backend.wait(self._joining.awaited, seconds)
        else:
            self.members.timer.sleep(seconds)
