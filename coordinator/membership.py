"""Membership: starts actors, gets them attested and admitted, hands out virtual workers and their keys.

A worker that fails or is refused is named, with its code, and another is started in its place: a new member with a
new id, new keys and new evidence, which joins between two steps. Steps go on meanwhile with at least ``min_workers``;
with fewer, the run waits for newcomers up to ``join_timeout_s``. Where there is room it grows to ``max_workers``.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from attestation.evidence import CollateralBundle
from attestation.messages import Envelope
from coordinator.backend import ActorLost, Backend
from coordinator.config import RunConfig
from coordinator.control import Control, OrchestratorFace
from coordinator.crew import Crew, aggregator_id, start_crew, worker_id
from coordinator.departures import ACCIDENTS, ASKED, START_AGAIN, Departure, Departures
from coordinator.handout import Handout
from coordinator.hosting import Hosting, rehost
from coordinator.joining import Joining, Timer
from coordinator.plan import hosted_at_most
from coordinator.ranges import ParameterRange
from coordinator.remote import AggregatorActor, Reference, WorkerActor
from coordinator.review import Review
from metrics.errors import ConfigError, EvidenceError, RaycloakError, RefusedError, RunFailedError
from workers.measurement import Measurement
from workers.mechanism import Mechanism
from workers.worker_messages import Admission, WorkerFacts, WorkerSetup

T = TypeVar("T", bound=Hashable)
A = TypeVar("A")

LOOK_EVERY_S = 2.0
POLL_S = 0.2


@dataclass(slots=True)
class Membership:
    """Who takes part right now.

    Attributes:
        workers, aggregators: by member id, and in range order.
        hosting: virtual workers of each worker; covers all V once they were placed.
        presentations: the newest signed presentation of every member.
        departures: everybody who was refused, was lost or left so far.
        on_join: told the member id of each worker that joins the run after its start.
        timer: measures deadlines and pauses.
        revocations: how many there are so far; see `coordinator.review.Review`.
        crew: the first members, if they were started already.
    """

    config: RunConfig
    backend: Backend
    control: Control
    departures: Departures
    on_join: Callable[[str], None]
    timer: Timer
    revocations: Callable[[], int]
    crew: Crew | None = None
    workers: dict[str, WorkerActor] = field(default_factory=dict)
    aggregators: list[AggregatorActor] = field(default_factory=list)
    hosting: Hosting = field(default_factory=dict)
    presentations: dict[str, Envelope] = field(default_factory=dict)
    _serial: "itertools.count[int]" = field(init=False)
    _worker_serial: "itertools.count[int]" = field(init=False)
    _leaving: dict[str, tuple[str, float]] = field(default_factory=dict)
    _untried: set[str] = field(default_factory=set)
    _looked: float = -math.inf
    _joining: Joining = field(init=False)
    _review: Review = field(init=False)
    _handout: Handout = field(init=False)
    _setup: WorkerSetup = field(init=False)
    _admission: Admission = field(init=False)
    _ranges: Sequence[ParameterRange] = field(init=False)

    def __post_init__(self) -> None:
        self._serial = itertools.count(self.config.aggregators)
        self._worker_serial = itertools.count(self.config.num_workers)
        self._review = Review(self.control, self.timer, self.revocations)
        counted = self.config.dp_config.enabled and self.config.dp_config.colluding_workers > 0
        self._handout = Handout(
            self.control, hosted_at_most(self.config, self.config.fewest_workers) if counted else None
        )

    def start_workers(self, setup: WorkerSetup, meanwhile: Callable[[], None]) -> WorkerFacts:
        """Start and prepare ``num_workers`` workers; returns the facts that most of them agree on.

        Args:
            meanwhile: what to do while they open their data.

        Raises:
            ConfigError: what a worker found wrong with the data or the model.
        """
        self._setup = setup
        crew = self.crew or start_crew(self.backend, self.config)
        self.workers, self.aggregators = dict(crew.workers), list(crew.aggregators)
        facts = self._ask_workers(lambda worker: worker.prepare(setup), meanwhile)
        if not facts:
            raise RunFailedError(
                "too_few_workers", f"no worker could be prepared: {self.departures.reasons()}.", START_AGAIN
            )
        wanted = _most_common((fact.numerics, fact.model_code) for fact in facts.values())
        return next(fact for fact in facts.values() if (fact.numerics, fact.model_code) == wanted)

    def known_answer(self, mechanism: Mechanism, measurements: tuple[Measurement, ...]) -> bytes:
        """The known answer that most workers compute; the others are refused when they present it."""
        answers = self._ask_workers(lambda worker: worker.compute_known_answer(mechanism, *measurements))
        if not answers:
            raise RunFailedError(
                "too_few_workers", f"no worker computed the known answer: {self.departures.reasons()}.", START_AGAIN
            )
        return _most_common(answers.values())

    def admit_all(self, admission: Admission, ranges: Sequence[ParameterRange]) -> None:
        """Challenge, appraise and admit every worker and one aggregator per range.

        Nobody is waited for yet: what keeps workers out before the first step would keep others out too.

        Raises:
            RefusedError: ``too_few_workers``, with the code of each refusal.
        """
        self._admission, self._ranges = admission, ranges
        self._admit_workers()
        if len(self.workers) < self.config.fewest_workers:
            raise self._too_few()
        self.departures.check()
        for owned, actor in zip(ranges, self.aggregators, strict=True):
            self._admit_started(actor, owned)
        self._joining = Joining(
            backend=self.backend,
            control=self.control,
            setup=self._setup,
            admission=admission,
            deadline_s=self.config.failure.admission_deadline_s,
            timer=self.timer,
            dropped=self._join_failed,
        )

    def take_collateral(self, collateral: CollateralBundle) -> None:
        """Have the orchestrator, and every worker that presents evidence from now on, judge by newer collateral."""
        if collateral != self._admission.collateral:
            self._orchestrator.take_collateral(collateral)
            self._admission = self._joining.admission = replace(self._admission, collateral=collateral)

    def renew(self) -> None:
        """Fresh evidence from every member, as each epoch needs it.

        A worker that fails leaves, and an aggregator that does is replaced.
        """
        self._admit_workers()
        for index, owned in enumerate(self._ranges):
            try:
                self._admit_aggregator(self.aggregators[index], owned)
            except ActorLost as lost:
                self.replace_aggregator(index, lost.cause)
            except EvidenceError as refusal:
                self.replace_aggregator(index, refusal.code)

    def review(self, *, now: bool = False) -> bool:
        """Let go who was revoked; whether the evidence of those who stay has to be renewed.

        Guarantee: between two steps every revocation so far is found; from then on nothing is sent to who was revoked.

        Args:
            now: ask the orchestrator, whether or not there may be something new.
        """
        review = self._review.look(now=now)
        indices = {actor.member_id: index for index, actor in enumerate(self.aggregators)}
        for member_id, message in review.revoked:
            if member_id in self.workers:
                self.lose(member_id, "revoked", message)
            elif member_id in indices:
                self.replace_aggregator(indices[member_id], "revoked")
        return review.ages

    def _admit_workers(self) -> None:
        asked = {}
        for member_id, worker in self.workers.items():
            challenge = self._orchestrator.challenge(member_id, "worker")
            asked[member_id] = worker.present(challenge, self._admission)
        self._collect(asked, self._admit)

    def settle(self) -> None:
        """Between two steps: admit newcomers that are ready, let go who was asked to leave, start who is missing.

        Guarantee: it waits for no newcomer, and never takes the run below ``min_workers`` before a worker that was
        asked to leave has stayed for ``join_timeout_s``.
        """
        if self._untried & set(self.workers):
            self._joining.succeeded()
        self._untried.clear()
        looked = self._look()
        self._admit_newcomers()
        self._let_go()
        self._refill()
        if looked:
            self._grow()

    def _look(self) -> bool:
        """Learn every few seconds whose node is being drained; whether this was the time."""
        if self.timer.now() - self._looked < LOOK_EVERY_S:
            return False
        self._looked = self.timer.now()
        for member_id in self.backend.departing():
            self._joining.drop(member_id, "preempted", f"{member_id} did not join: {ASKED['preempted']}")
            self.ask_to_leave(member_id, "preempted")
        return True

    def ask_to_leave(self, member_id: str, code: str) -> None:
        """Let a worker go at the next step boundary that can spare it; ``code`` is ``left`` or ``preempted``."""
        if member_id in self.workers:
            self._leaving.setdefault(member_id, (code, self.timer.now()))

    def place(self, epoch: int) -> None:
        """Host every virtual worker on the current workers and release the keys they miss for ``epoch``.

        A host that fails to take its keys, or that opened other data than the run began with, leaves, and the rest
        is placed again.

        Guarantee: with ``colluding_workers``, no worker is ever given keys of more virtual workers of one epoch than
        the noise allows for; one that would be leaves instead.

        Raises:
            RefusedError: ``too_few_workers``.
            RunFailedError: ``too_many_failures``.
        """
        self._handout.begin(epoch)
        while True:
            self._require_enough()
            self._refill()
            self.hosting = rehost(self.hosting, list(self.workers), self.config.virtual_workers)
            if (exposed := self._handout.exposed(self.hosting)) is not None:
                self._take_leave(exposed, "key_share")
                continue
            needs = self._handout.missing(self.hosting)
            if not needs:
                return
            self._hand_out(needs)

    def _hand_out(self, needs: Hosting) -> None:
        asked, released = {}, {}
        for member_id, virtual_workers in needs.items():
            released[member_id] = self._handout.release(member_id, virtual_workers)
            asked[member_id] = self.workers[member_id].accept_keys(released[member_id])
        self._collect(asked, lambda i, commitments: self._handout.accepted(i, released[i], commitments))
        if not self.workers and self.departures.refused_alike(len(asked)):
            raise self._too_few()

    def lose(self, member_id: str, code: str, message: str) -> None:
        """Take a worker off the run: it is stopped, expelled and reported."""
        actor = self.workers.pop(member_id)
        asked, _ = self._leaving.pop(member_id, (code, 0.0))
        self.presentations.pop(member_id, None)
        self.backend.stop(actor)
        # One that ended while it was waiting to be let go was not lost by accident.
        departure = Departure(member_id, asked if code in ACCIDENTS else code, message)
        newcomer = member_id in self._untried
        if newcomer:
            self._untried.discard(member_id)
            self._joining.failed()
        self._depart(departure, newcomer)

    def _depart(self, departure: Departure, newcomer: bool) -> None:
        self._orchestrator.expel(departure.member_id, departure.code)
        self.departures.add(departure, newcomer=newcomer)

    def _admit_newcomers(self) -> None:
        for actor, envelope in self._joining.poll():
            try:
                self._admit(actor.member_id, envelope)
            except RefusedError as refusal:
                self.backend.stop(actor)
                self._joining.failed()
                self._join_failed(actor.member_id, refusal.code, refusal.message)
                continue
            self.workers[actor.member_id] = actor
            self._untried.add(actor.member_id)
            self.on_join(actor.member_id)

    def _join_failed(self, member_id: str, code: str, message: str) -> None:
        self._depart(Departure(member_id, code, message, joined=False), newcomer=True)

    def _let_go(self) -> None:
        for member_id, (code, since) in list(self._leaving.items()):
            overdue = self.timer.now() - since >= self.config.failure.join_timeout_s
            if len(self.workers) > self.config.fewest_workers or overdue:
                self._take_leave(member_id, code)

    def _take_leave(self, member_id: str, code: str) -> None:
        self.lose(member_id, code, f"{member_id} left: {ASKED[code]}")

    def _refill(self) -> None:
        """Start whoever is missing to ``num_workers``."""
        self._start_newcomers(self.config.num_workers - self._expected)

    def _grow(self) -> None:
        """Start as many more as there is room for, up to ``max_workers``."""
        more = self.config.most_workers - self._expected
        if more > 0 and self._expected >= self.config.num_workers:
            self._start_newcomers(min(more, self.backend.room()))

    @property
    def _expected(self) -> int:
        """Workers there will be once all that join have joined and all that leave have left."""
        return len(self.workers) - len(self._leaving) + len(self._joining)

    def _start_newcomers(self, count: int) -> None:
        for _ in range(count):
            if self.departures.allow_newcomers and not self._joining.pauses:
                self._joining.start(self._next_worker())

    def replace_aggregator(self, index: int, code: str) -> None:
        """Stop the aggregator of range ``index`` and admit a new one in its place."""
        lost = self.aggregators[index]
        self.backend.stop(lost)
        self.presentations.pop(lost.member_id, None)
        self._depart(Departure(lost.member_id, code, "another took its place"), newcomer=False)
        self.aggregators[index] = self._new_aggregator(self._ranges[index])

    def _require_enough(self) -> None:
        """Wait for newcomers while there are fewer than ``min_workers``."""
        deadline = self.timer.now() + self.config.failure.join_timeout_s
        while len(self.workers) < self.config.fewest_workers:
            self.departures.check()
            left_s = deadline - self.timer.now()
            if left_s <= 0 or not (self._joining or self.departures.allow_newcomers):
                raise self._too_few()
            self._look()
            self._refill()
            self._pause(min(POLL_S, left_s))
            self._admit_newcomers()
        self.departures.check()

    def _pause(self, seconds: float) -> None:
        """Until the newcomers' next stages are ready, but no longer than ``seconds``."""
        if self._joining:
            self.backend.wait(self._joining.awaited, seconds)
        else:
            self.timer.sleep(seconds)

    def _too_few(self) -> RefusedError:
        return self.departures.too_few(len(self.workers), self.config.fewest_workers)

    def _next_worker(self) -> str:
        return worker_id(next(self._worker_serial))

    def _new_aggregator(self, owned: ParameterRange) -> AggregatorActor:
        actor = self.backend.start_aggregator(aggregator_id(owned.index, next(self._serial)))
        self._admit_started(actor, owned)
        return actor

    def _admit_started(self, actor: AggregatorActor, owned: ParameterRange) -> None:
        try:
            self._admit_aggregator(actor, owned)
        except ActorLost as lost:
            raise RunFailedError(
                "unreachable", f"{actor.member_id} could not be started ({lost.cause}).", START_AGAIN
            ) from None

    def _admit_aggregator(self, actor: AggregatorActor, owned: ParameterRange) -> None:
        challenge = self._orchestrator.challenge(actor.member_id, "aggregator")
        reference = actor.present(challenge, self._admission.manifest, owned)
        self._admit(actor.member_id, self.backend.fetch(reference, self.config.failure.admission_deadline_s))

    def _admit(self, member_id: str, envelope: Envelope) -> None:
        self._orchestrator.admit(envelope)
        self.presentations[member_id] = envelope

    def _ask_workers(
        self, ask: Callable[[WorkerActor], Reference[A]], meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, A]:
        answers: dict[str, A] = {}
        asked = {member_id: ask(worker) for member_id, worker in self.workers.items()}
        meanwhile()
        self._collect(asked, answers.__setitem__)
        return answers

    def _collect(self, asked: Mapping[str, Reference[A]], use: Callable[[str, A], None]) -> None:
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

    @property
    def _orchestrator(self) -> OrchestratorFace:
        return self.control.orchestrator


def _most_common(values: Iterable[T]) -> T:
    """The most frequent value; the first seen of several."""
    return Counter(values).most_common(1)[0][0]
