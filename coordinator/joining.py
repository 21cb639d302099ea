"""Joining: how a newcomer gets from started to ready for admission while the steps go on.

    start      the process; prepare and compute_known_answer are asked at once, one after the other
    present    a challenge, and the evidence that answers it
    presented  handed over by :meth:`Joining.poll`; only then is it admitted, placed and given keys

It hides stages, deadlines and how long a failed attempt holds back the next one. A newcomer that dies, is late or
refuses is stopped and named. Nothing here waits: what is not ready is looked at again at the next poll.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attestation.messages import Envelope
from coordinator.backend import ActorLost, Backend
from coordinator.control import Control
from coordinator.remote import Reference, WorkerActor
from metrics.errors import RaycloakError
from workers.worker_messages import Admission, WorkerSetup

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Timer:
    """Time as membership measures and spends it, in seconds; tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class _Newcomer:
    actor: WorkerActor
    since: float
    awaited: tuple[Reference[Any], ...]
    presents: bool = False


@dataclass(slots=True)
class Joining:
    """The newcomers of a run.

    Attributes:
        setup, admission: what each opens, and what it presents itself for.
        deadline_s: from its start to its presentation.
        dropped: told the member id, code and message of each newcomer that is given up; it was stopped before.
    """

    backend: Backend
    control: Control
    setup: WorkerSetup
    admission: Admission
    deadline_s: float
    timer: Timer
    dropped: Callable[[str, str, str], None]
    _newcomers: dict[str, _Newcomer] = field(default_factory=dict)
    _failed: int = 0
    _not_before: float = 0.0

    def __len__(self) -> int:
        return len(self._newcomers)

    @property
    def awaited(self) -> Sequence[Reference[object]]:
        """The references that the newcomers' next stages wait for."""
        return [reference for newcomer in self._newcomers.values() for reference in newcomer.awaited]

    @property
    def pauses(self) -> bool:
        """Whether a failed attempt still holds back the next one."""
        return self._failed > 0 and self.timer.now() < self._not_before

    def failed(self) -> None:
        """An attempt came to nothing: the next one waits 1 s, then twice as long each time, up to a minute."""
        self._not_before = self.timer.now() + min(FIRST_PAUSE_S * 2**self._failed, LONGEST_PAUSE_S)
        self._failed = min(self._failed + 1, 10)

    def succeeded(self) -> None:
        """A newcomer has finished a step: the next attempt need not wait."""
        self._failed = 0

    def start(self, member_id: str) -> None:
        """Start a worker on its way."""
        try:
            actor = self.backend.start_worker(member_id)
        except RaycloakError as refusal:
            self._give_up(member_id, refusal.code, refusal.message)
            return
        opening = actor.prepare(self.setup)
        computation = self.admission.manifest.computation
        answer = actor.compute_known_answer(computation.mechanism, *computation.measurements)
        self._newcomers[member_id] = _Newcomer(actor, self.timer.now(), (opening, answer))

    def drop(self, member_id: str, code: str, message: str) -> None:
        """Give a newcomer up; nothing happens if there is none of that id."""
        newcomer = self._newcomers.pop(member_id, None)
        if newcomer is not None:
            self.backend.stop(newcomer.actor)
            self._give_up(member_id, code, message)

    def poll(self) -> list[tuple[WorkerActor, Envelope]]:
        """Take every newcomer as far as it is without waiting; returns those that presented themselves."""
        presented = []
        for member_id, newcomer in list(self._newcomers.items()):
            answer = self._answer(member_id, newcomer)
            if answer is not None and not newcomer.presents:
                challenge = self.control.orchestrator.challenge(member_id, "worker")
                newcomer.awaited = (newcomer.actor.present(challenge, self.admission),)
                newcomer.presents = True
                answer = self._answer(member_id, newcomer)
            if answer is not None:
                presented.append((self._newcomers.pop(member_id).actor, answer))
        return presented

    def _answer(self, member_id: str, newcomer: _Newcomer) -> Any:
        """The answer to the last question of its stage; None if it is not there yet, or the newcomer was dropped."""
        if len(self.backend.wait(newcomer.awaited, 0)) < len(newcomer.awaited):
            if self.timer.now() - newcomer.since > self.deadline_s:
                self.drop(member_id, "deadline", f"{member_id} was not ready to join within {self.deadline_s:g} s")
            return None
        try:
            return self.backend.fetch(newcomer.awaited[-1], self.deadline_s)
        except (ActorLost, RaycloakError):
            self._drop_for_first_failure(member_id, newcomer)
            return None

    def _drop_for_first_failure(self, member_id: str, newcomer: _Newcomer) -> None:
        """The first question that failed is the reason; what followed it failed because of it."""
        try:
            for reference in newcomer.awaited:
                self.backend.fetch(reference, self.deadline_s)
        except ActorLost as lost:
            self.drop(member_id, lost.cause, f"{member_id} was lost while it joined")
        except RaycloakError as refusal:
            self.drop(member_id, refusal.code, refusal.message)

    def _give_up(self, member_id: str, code: str, message: str) -> None:
        self.failed()
        self.dropped(member_id, code, message)
