"""One attempt of one step: ask every worker, bind their vectors, have them reduced.

A step of training and a measurement go the same way; they differ in what an aggregator does with the decoded sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attestation.canonical import digest, length_prefixed
from attestation.messages import Envelope, parse
from attestation.roster import Query
from coordinator.aggregator import MeasureReport, ReduceReport, ReduceRequest
from coordinator.backend import Actor, ActorLost, Backend
from coordinator.control import Control
from coordinator.losses import Losses
from coordinator.membership import Membership
from coordinator.outcome import Model
from metrics.collectors import RunMetrics
from metrics.errors import ProtocolError, RunFailedError, SenderError
from workers.payload import Header, VectorRange
from workers.worker_messages import StepReply, StepRequest


@dataclass(frozen=True, slots=True)
class Task:
    """What the workers are asked for: a step of one of the run's mechanisms.

    Attributes:
        ranges: how its vector is cut; the first aggregators take one each.
    """

    query: Query
    step: int
    ranges: tuple[VectorRange, ...]

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"step {self.step}" if self.query == "gradient" else f"{self.query} {self.step}"


@dataclass(frozen=True, slots=True)
class Answers:
    """Complete answers of one attempt, in the order of the roster's workers."""

    roster: Envelope
    headers: tuple[Envelope, ...]
    vectors: tuple[tuple[Any, ...], ...]
    replies: tuple[StepReply, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    """What the aggregators made of complete answers.

    Attributes:
        reports: one per range.
        updated: references to parameters and state of each range; empty for a measurement.
    """

    reports: tuple[Any, ...]
    updated: tuple[tuple[Any, Any], ...]

    @property
    def updates(self) -> tuple[ReduceReport, ...]:
        """The reports of a training step."""
        return self.reports

    @property
    def measured(self) -> MeasureReport:
        """The report of a measurement."""
        (report,) = self.reports
        assert isinstance(report, MeasureReport)
        return report


@dataclass(slots=True)
class Attempts:
    """The attempts of a session, one after the other."""

    backend: Backend
    control: Control
    membership: Membership
    metrics: RunMetrics
    deadline_s: float
    _tags: dict[int, bytes] = field(default_factory=dict)
    _seen: dict[str, tuple[Envelope, ...]] = field(default_factory=dict)
    _losses: Losses = field(init=False)

    def __post_init__(self) -> None:
        self._losses = Losses(self.backend, self.membership, self.deadline_s)

    def begin(self) -> None:
        """The attempts that follow are of another step."""
        self._tags = {}
        self._losses.begin()

    def compute(self, task: Task, model: Model, receipt: Envelope, roster: Envelope) -> Answers | None:
        """Ask every worker; those that fail are lost, and None is returned."""
        workers = {i: self.membership.workers[i] for i in sorted(self.membership.workers)}
        returns = 1 + len(task.ranges)
        # Of those who are not in the roster, a worker would forget the evidence again.
        absent = {actor.member_id for actor in self.membership.aggregators[len(task.ranges) :]}
        shown = tuple(proof for member_id, proof in self.membership.presentations.items() if member_id not in absent)
        calls = {}
        for member_id, worker in workers.items():
            unseen = tuple(envelope for envelope in shown if envelope not in self._seen.get(member_id, ()))
            request = StepRequest(receipt, roster, unseen, task.ranges)
            calls[member_id] = self.backend.call(worker, "step", request, *model.parameters, returns=returns)
        ready = self.backend.wait([reference for call in calls.values() for reference in call], self.deadline_s)
        replies: dict[str, StepReply] = {}
        failures: dict[str, str] = {}
        for member_id, call in calls.items():
            try:
                if not set(call) <= set(ready):
                    raise ActorLost("deadline")
                replies[member_id] = self.backend.fetch(call[0], self.deadline_s)
                if replies[member_id].code != "ok":
                    failures[member_id] = replies[member_id].code
            except ActorLost as lost:
                failures[member_id] = lost.cause
        # Also of an attempt that fails: a late answer may complete it, and both must then decode to one value.
        for member_id, reply in replies.items():
            if member_id not in failures and not self._tags_agree(task, member_id, reply):
                failures[member_id] = "header_mismatch"
        headers = tuple(reply.header for reply in replies.values() if reply.header is not None)
        if failures:
            self._losses.require_model(model, failures.values(), task.name, task.step)
            self._losses.take(failures, task.name, task.step, everybody=len(failures) == len(workers))
            return None
        for reply in replies.values():
            if reply.leaving:
                self.membership.ask_to_leave(reply.member_id, "left")
        self._seen = dict.fromkeys(workers, shown)
        vectors = tuple(tuple(call[1 + part.index] for call in calls.values()) for part in task.ranges)
        return Answers(roster, headers, vectors, tuple(replies.values()))

    def bind_vectors(self, task: Task) -> None:
        """Have the vectors of the step known for good before they are summed, so that no other execution differs."""
        tags = [self._tags[v] for v in sorted(self._tags)]
        vectors = digest(length_prefixed("raycloak/vector-tags/v1", *tags))
        try:
            self.control.orchestrator("bind_vectors", task.step, vectors, task.query)
        except ProtocolError as refusal:
            raise RunFailedError(refusal.code, refusal.message, refusal.remedy, task.step) from None

    def reduce(self, task: Task, model: Model, answers: Answers, beside: Callable[[], None]) -> Reduced | None:
        """Reduce every range, and do ``beside`` meanwhile: most processors have nothing to do then.

        None is returned if an aggregator was lost and replaced, or a worker's vector failed its checks.
        """
        request = ReduceRequest(answers.roster, answers.headers, model.digest, task.ranges)
        aggregators = self.membership.aggregators[: len(task.ranges)]
        parts = enumerate(aggregators)
        calls = [self._reduction(task, index, actor, model, request, answers) for index, actor in parts]
        beside()
        ready = self.backend.wait([reference for call in calls for reference in call], self.deadline_s)
        reports: list[Any] = []
        lost: dict[int, str] = {}
        accused: dict[str, str] = {}
        for index, call in enumerate(calls):
            try:
                if not set(call) <= set(ready):
                    raise ActorLost("deadline")
                reports.append(self.backend.fetch(call[0], self.deadline_s))
            except ActorLost as error:
                lost[index] = error.cause
            except SenderError as error:
                if error.member_id not in self.membership.workers:
                    raise
                accused[error.member_id] = error.code
            except RunFailedError as error:
                raise RunFailedError(error.code, f"{task.name}: {error.message}", error.remedy, task.step) from None
        self._losses.require_model(model, lost.values(), task.name, task.step)
        for index, cause in lost.items():
            # What was lost then is a vector, with its sender's node; the next attempt finds out.
            if cause != "object_lost":
                self.membership.replace_aggregator(index, cause)
        self._losses.take(accused, task.name, task.step, everybody=False)
        if lost or accused:
            return None
        self.metrics.aggregate_released()
        return Reduced(tuple(reports), tuple((call[1], call[2]) for call in calls if len(call) > 1))

    def _reduction(
        self, task: Task, index: int, actor: Actor, model: Model, request: ReduceRequest, answers: Answers
    ) -> Any:
        vectors = answers.vectors[index]
        if task.query != "gradient":
            return self.backend.call(actor, "measure", request, *vectors)
        own = model.parameters[index], model.states[index]
        return self.backend.call(actor, "reduce", request, *own, *vectors, returns=3)

    def _tags_agree(self, task: Task, member_id: str, reply: StepReply) -> bool:
        """Whether a header names what its sender hosts; aggregators verify the rest of it.

        Raises:
            RunFailedError: ``not_reproducible`` if a virtual worker that was computed again has another tag than
                before: two attempts would decode to two values, and the masks would protect nothing.
        """
        try:
            header = parse(Header, reply.header.body) if reply.header else None
        except ProtocolError:
            header = None
        hosted = self.membership.hosting[member_id]
        if header is None or header.virtual_workers != hosted or len(header.vector_tags) != len(hosted):
            return False
        for v, tag in zip(hosted, header.vector_tags, strict=True):
            if self._tags.setdefault(v, tag) != tag:
                raise RunFailedError(
                    "not_reproducible",
                    f"{member_id} computed another vector of virtual worker {v} in {task.name} than its former host",
                    "Use one kind of machine and library versions; start a new run.",
                    task.step,
                )
        return True
