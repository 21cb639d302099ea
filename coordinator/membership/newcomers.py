"""Joining: the way of a newcomer from its start to its admission, while the steps continue.

    start      the process; prepare and compute_known_answer are asked at once, one after the other
    present    a challenge, and the evidence that answers it
    presented  handed over by :meth:`Joining.poll`; only then is it admitted, placed and given keys

It hides stages and deadlines. A newcomer that dies, is late or refuses is stopped and named. Nothing here waits: a
stage that is not ready is looked at again at the next poll.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.calls import Reference
from raycloak.coordinator.cluster.remote import WorkerActor
from raycloak.coordinator.membership.admission import MemberAdmission
from raycloak.coordinator.membership.departures import Departure
from raycloak.coordinator.membership.members import Members
from raycloak.metrics.errors import RaycloakError
from raycloak.workers.messages import WorkerSetup


@dataclass(slots=True)
class _Newcomer:
    """A worker on its way; ``awaited`` are the answers that its stage waits for."""

    actor: WorkerActor
    since: float
    awaited: tuple[Reference[Any], ...]
    presents: bool = False


@dataclass(slots=True)
class Joining:
    """The newcomers of a run, none of which is a member yet.

    Attributes:
        setup: what each opens.
    """

    members: Members
    admission: MemberAdmission
    setup: WorkerSetup
    _newcomers: dict[str, _Newcomer] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._newcomers)

    @property
    def awaited(self) -> Sequence[Reference[object]]:
        """The references that the newcomers' next stages wait for."""
        return [reference for newcomer in self._newcomers.values() for reference in newcomer.awaited]

    def start(self, member_id: str) -> None:
        """Start a worker on its way."""
        try:
            actor = self.members.backend.start_worker(member_id)
        except RaycloakError as refusal:
            self.reject(member_id, refusal.code, refusal.message)
            return
        opening = actor.prepare(self.setup)
        computation = self.admission.terms.manifest.computation
        answer = actor.compute_known_answer(computation.mechanism, *computation.measurements)
        self._newcomers[member_id] = _Newcomer(actor, self.members.timer.now(), (opening, answer))

    def drop(self, member_id: str, code: str, message: str) -> None:
        """Stop a newcomer and record why; nothing happens if there is none of that id."""
        newcomer = self._newcomers.pop(member_id, None)
        if newcomer is not None:
            self.members.backend.stop(newcomer.actor)
            self.reject(member_id, code, message)

    def poll(self) -> list[tuple[WorkerActor, Envelope]]:
        """Take every newcomer as far as it is without waiting; returns those that presented themselves."""
        presented = []
        for member_id, newcomer in list(self._newcomers.items()):
            answer = self._answer(member_id, newcomer)
            if answer is not None and not newcomer.presents:
                # Only now, because a challenge expires and preparing may take longer.
                newcomer.awaited = (self.admission.challenge(newcomer.actor),)
                newcomer.presents = True
                answer = self._answer(member_id, newcomer)
            if answer is not None:
                presented.append((self._newcomers.pop(member_id).actor, answer))
        return presented

    def _answer(self, member_id: str, newcomer: _Newcomer) -> Any:
        """Return the last answer of a newcomer's stage; None if it has not arrived, or the newcomer was dropped."""
        if len(self.members.backend.wait(newcomer.awaited, 0)) < len(newcomer.awaited):
            if self.members.timer.now() - newcomer.since > self._deadline_s:
                self.drop(member_id, "deadline", f"{member_id} was not ready to join within {self._deadline_s:g} s")
            return None
        try:
            return self.members.backend.fetch(newcomer.awaited[-1], self._deadline_s)
        except (ActorLost, RaycloakError):
            self._drop_for_first_failure(member_id, newcomer)
            return None

    def _drop_for_first_failure(self, member_id: str, newcomer: _Newcomer) -> None:
        """Drop a newcomer for the first question that failed: those that followed failed because of it."""
        try:
            for reference in newcomer.awaited:
                self.members.backend.fetch(reference, self._deadline_s)
        except ActorLost as lost:
            self.drop(member_id, lost.cause, f"{member_id} was lost while it joined")
        except RaycloakError as refusal:
            self.drop(member_id, refusal.code, refusal.message)

    def reject(self, member_id: str, code: str, message: str) -> None:
        """Record a newcomer that was stopped before it became a member, and hold back the next one."""
        self.members.backoff.failed()
        self.members.depart(Departure(member_id, code, message, joined=False), newcomer=True)

    @property
    def _deadline_s(self) -> float:
        """Seconds that a newcomer has from its start to its presentation."""
        return self.members.config.failure.admission_deadline_s
