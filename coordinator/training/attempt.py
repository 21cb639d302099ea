"""One attempt of one step: ask every worker, bind the vectors, have them reduced.

A training step and a measurement take the same path. They differ in what an aggregator does with the decoded sum.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raycloak.attestation.core.mask_graph import MaskGraph
from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.core.roster import Query, Roster
from raycloak.coordinator.aggregation.aggregator import ReduceReport, ReduceRequest, State
from raycloak.coordinator.cluster.backend import ActorLost, Backend
from raycloak.coordinator.cluster.calls import Reference
from raycloak.coordinator.cluster.control import Control, Pending
from raycloak.coordinator.cluster.remote import Average, Parameters, Reduction, StepAnswer
from raycloak.coordinator.membership.membership import Membership
from raycloak.coordinator.training.member_failures import MemberFailures
from raycloak.coordinator.training.model import Model
from raycloak.coordinator.training.pace import OPEN, Pace
from raycloak.coordinator.training.sent import NO_BATCHES, StepBatches
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import BudgetError, ProtocolError, RunFailedError, SenderError
from raycloak.metrics.traces import Traces
from raycloak.workers.messages import StepReply, StepRequest
from raycloak.workers.terms.binding import Binding, vectors_digest
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.public_sums import PublicSums
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.vectors.payload import Header, VectorRange
from raycloak.workers.vectors.ring import RingVector


@dataclass(frozen=True, slots=True)
class Task:
    """A step of one of the run's mechanisms.

    Attributes:
        ranges: the pieces its vector is cut into; the first aggregators take one each.
        updates: whether aggregators update the model of a training step; otherwise they release its average.
        batches: what a client sent for it.
    """

    query: Query
    step: int
    ranges: tuple[VectorRange, ...]
    updates: bool = True
    batches: StepBatches = NO_BATCHES

    @property
    def name(self) -> str:
        """The task's name in messages."""
        return f"step {self.step}" if self.query == "gradient" else f"{self.query} {self.step}"

    def input_from(self, model: Model) -> bytes:
        """Return the digest of the step's input: ``model``, and the batches."""
        return step_input(model.digest, self.batches.digests)


@dataclass(frozen=True, slots=True)
class OwedAnswers:
    """The answers that workers owe for one attempt.

    Attributes:
        shown: by member id, the presentations that a worker has seen once it has answered.
        answers: by member id.
    """

    roster: Envelope
    shown: Mapping[str, Sequence[Envelope]]
    answers: Mapping[str, StepAnswer]


@dataclass(frozen=True, slots=True)
class Answers:
    """The complete answers to one attempt, in the order of the roster's workers.

    Attributes:
        vectors_digest: of the tags in the headers; see `raycloak.workers.terms.binding.vectors_digest`.
        vectors: by range, one reference per worker.
        counted: exact sums over the examples of all virtual workers; None in a private run, and of a measurement.
    """

    roster: Envelope
    headers: tuple[Envelope, ...]
    vectors_digest: bytes
    vectors: tuple[tuple[Reference[RingVector], ...], ...]
    replies: tuple[StepReply, ...]
    counted: PublicSums | None


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of the aggregators' work on complete answers.

    Attributes:
        binding: the ledger's, for the step.
        reports: one per range.
        updated: new parameters and state of each range; empty where nothing is updated.
        averages: the released average of each range, float64; empty where parameters are updated.
    """

    binding: Binding
    reports: tuple[ReduceReport, ...]
    updated: tuple[tuple[Reference[Parameters], Reference[State]], ...]
    averages: tuple[Average, ...]

    @property
    def grad_norm(self) -> float | None:
        """The l2 norm of the average gradient of a training step; None in a private run."""
        squares = [report.squares for report in self.reports if report.squares is not None]
        return math.sqrt(sum(squares)) if squares else None


@dataclass(slots=True)
class AttemptRunner:
    """The attempts of a session, one after another.

    Attributes:
        renew: gets fresh evidence of every member.
        waited_s: seconds that the attempts of this step have waited for its release.
    """

    backend: Backend
    control: Control
    membership: Membership
    manifest: Manifest
    metrics: RunMetrics
    deadline_s: float
    traces: Traces
    renew: Callable[[], None]
    waited_s: float = 0.0
    _manifest_digest: bytes = field(init=False)
    _tags: dict[int, bytes] = field(default_factory=dict)
    _seen: dict[str, frozenset[Envelope]] = field(default_factory=dict)
    _failures: MemberFailures = field(init=False)

    def __post_init__(self) -> None:
        self._manifest_digest = self.manifest.digest()
        self._failures = MemberFailures(self.backend, self.membership.members, self.deadline_s)

    def begin(self) -> None:
        """Forget the vector tags of the step before: the attempts that follow belong to another step."""
        self._tags = {}
        self.waited_s = 0.0
        self._failures.begin()

    def ask(self, task: Task, model: Model, receipt: Envelope | Reference[Envelope], roster: Envelope) -> OwedAnswers:
        """Ask every worker.

        Args:
            receipt: the receipt, or a reference to it. With a reference, workers get their question as soon as the
                ledger has answered, and none if it refuses.
        """
        members = self.membership.members
        shown, answers = self._shown(task, roster), {}
        for member_id in sorted(members.workers):
            seen = self._seen.get(member_id, frozenset())
            unseen = tuple(envelope for envelope in shown[member_id] if envelope not in seen)
            of_data = self.membership.hosts.commitments
            request = StepRequest(
                roster=roster,
                presentations=unseen,
                commitments=of_data,
                ranges=task.ranges,
                batches=task.batches.digests,
            )
            asked = members.workers[member_id].step(receipt, request, model.parameters, task.batches.references)
            answers[member_id] = asked
        return OwedAnswers(roster, shown, answers)

    def _shown(self, task: Task, roster: Envelope) -> Mapping[str, Sequence[Envelope]]:
        """Return, by worker, the presentations of the members whose evidence it appraises."""
        members = self.membership.members
        # An aggregator outside the roster is not shown: a worker would forget its evidence, and need it again later.
        absent = {actor.member_id for actor in members.aggregators[len(task.ranges) :]}
        shown = {member_id: each for member_id, each in members.presentations.items() if member_id not in absent}
        if self.manifest.mask_colluders is None:
            return dict.fromkeys(members.workers, tuple(shown.values()))
        graph = MaskGraph(parse(Roster, roster.body))
        always = tuple(each for member_id, each in shown.items() if member_id not in members.workers)
        near = {own: (own, *(each.member_id for each in graph.neighbours(own))) for own in members.workers}
        return {own: (*always, *(shown[each] for each in ids)) for own, ids in near.items()}

    def collect(
        self, task: Task, model: Model, asked: OwedAnswers, pace: Pace = OPEN, began_ns: int = 0
    ) -> Answers | None:
        """Wait for every worker's answer; if any fails, take the failed workers off the run and return None.

        If ``pace`` holds the step meanwhile, workers end between two micro-batches, stay in the run, and None returns.

        Args:
            began_ns: when the workers were asked, for their spans; see `raycloak.metrics.traces.Span`.
        """
        answers, is_cancelled = asked.answers, False

        def cancel() -> None:
            nonlocal is_cancelled
            # Before the call: an answer that comes back as cancelled must find it set.
            is_cancelled = True
            # They were given a receipt, which is ready since the charge was awaited, and the model of a finished step.
            self.backend.cancel([answer.reply for answer in answers.values()])

        with pace.computing(task.step, cancel):
            parts = [part for answer in answers.values() for part in answer.parts]
            ready = set(self.backend.wait(parts, self.deadline_s))
        replies: dict[str, StepReply] = {}
        failures: dict[str, str] = {}
        for member_id, answer in answers.items():
            try:
                if not ready.issuperset(answer.parts):
                    raise ActorLost("deadline")
                replies[member_id] = self.backend.fetch(answer.reply, self.deadline_s)
                if replies[member_id].code != "ok":
                    failures[member_id] = replies[member_id].code
            except ActorLost as lost:
                failures[member_id] = lost.cause
            except ProtocolError as refusal:
                # What it sent is no answer.
                failures[member_id] = refusal.code
        # Tags are kept of a failed attempt too: a late answer may still complete it, and a later attempt must then
        # decode to the same value.
        headers: list[Header] = []
        for member_id, reply in replies.items():
            if member_id not in failures:
                header = _header_of(reply)
                if header is not None and self._tags_agree(task, member_id, header):
                    headers.append(header)
                else:
                    failures[member_id] = "header_mismatch"
        self._trace(answers, replies, failures, began_ns)
        if failures:
            # A worker appraised, and kept, the members of this attempt alone: what it still has is not known here.
            self._seen = {}
            if is_cancelled:
                failures = {each: code for each, code in failures.items() if code != "cancelled"}
            self._failures.require_model(model, failures.values(), task.name, task.step)
            self._failures.take(failures, task.name, task.step, everybody=len(failures) == len(answers))
            return None
        for reply in replies.values():
            if reply.leaving:
                self.membership.members.ask_to_leave(reply.member_id, "left")
        # Only after whole answers: a worker that failed may not have kept what it was shown.
        self._seen = {member_id: frozenset(asked.shown[member_id]) for member_id in answers}
        vectors = tuple(tuple(answer.vectors[part.index] for answer in answers.values()) for part in task.ranges)
        signed = tuple(reply.header for reply in replies.values() if reply.header is not None)
        counted = self._counted(replies)
        return Answers(asked.roster, signed, vectors_digest(headers), vectors, tuple(replies.values()), counted)

    def _counted(self, replies: Mapping[str, StepReply]) -> PublicSums | None:
        """Return the sums over all virtual workers, added in their order: who hosts which does not change a bit."""
        found: dict[int, PublicSums] = {}
        for member_id, reply in replies.items():
            hosted = self.membership.hosts.hosting[member_id]
            if reply.counted is None or len(reply.counted) != len(hosted):
                return None
            found |= zip(hosted, reply.counted, strict=True)
        return PublicSums.of(found[v] for v in sorted(found))

    def _trace(
        self, asked: Iterable[str], replies: Mapping[str, StepReply], failures: Mapping[str, str], began_ns: int
    ) -> None:
        """Record what each worker did, by the times that it states itself; a lost one until it was given up."""
        waited = (time.time_ns() - began_ns) / 1e9
        for member_id in asked:
            reply, failed = replies.get(member_id), failures.get(member_id, "")
            if reply is None:
                self.traces.record("worker", began_ns, waited, failed, member=member_id)
                continue
            stated = (reply.seconds, reply.compute_seconds, reply.mask_seconds)
            # A worker may state anything, so no time is beyond what was waited; NaN is not within it either.
            whole, computed, masked = (each if 0 <= each <= waited else waited for each in stated)
            self.traces.record(
                "worker", began_ns, whole, failed, member=member_id, compute_seconds=computed, mask_seconds=masked
            )

    def reduce(
        self, task: Task, model: Model, answers: Answers, pace: Pace = OPEN, epsilon: float | None = None
    ) -> Reduced | None:
        """Have the vectors bound for good, and then every range reduced.

        Guarantee: no aggregator is given a vector before the ledger has bound all vectors of the step on disk, nor
        before ``pace`` has released the step.

        Args:
            epsilon: what the step's receipt states, for ``pace``; None if the run is not private.

        Returns:
            None if an aggregator was lost and replaced, or if a worker's vector failed its checks, or if the evidence
            of members was renewed or revoked while the step waited for its release.

        Raises:
            StepLeft: a stop came before the release.
        """
        if not pace.is_released(task.step):
            self._bound(task, self._bind_vectors(task, answers))
            pace.computed(task.step, epsilon, answers.counted)
            if self._await_release(task, pace):
                return None
        # Bound again after a wait, which costs the ledger a look: the path to the aggregators is the same.
        bound, reductions = self._ask_to_reduce(task, model, answers)
        pace.computed(task.step, epsilon, answers.counted)
        ready = set(self.backend.wait([part for each in reductions for part in each.parts], self.deadline_s))
        reports: list[ReduceReport] = []
        averages: list[Average] = []
        lost: dict[int, str] = {}
        accused: dict[str, str] = {}
        for index, reduction in enumerate(reductions):
            try:
                if not ready.issuperset(reduction.parts):
                    raise ActorLost("deadline")
                reports.append(self.backend.fetch(reduction.report, self.deadline_s))
                if reduction.average is not None:
                    averages.append(self.backend.fetch(reduction.average, self.deadline_s))
            except ActorLost as error:
                lost[index] = error.cause
            except SenderError as error:
                if error.member_id not in self.membership.members.workers:
                    raise
                accused[error.member_id] = error.code
            except RunFailedError as error:
                raise RunFailedError(error.code, f"{task.name}: {error.message}", error.remedy, task.step) from None
        self._failures.require_model(model, lost.values(), task.name, task.step)
        for index, cause in lost.items():
            # A lost object is a vector that was lost with its sender's node. The aggregator is well.
            # The next attempt finds that the sender is not.
            if cause != "object_lost":
                self.membership.admission.replace_aggregator(index, cause)
        self._failures.take(accused, task.name, task.step, everybody=False)
        if lost or accused:
            return None
        self.metrics.aggregate_released()
        updated = tuple(each.updated for each in reductions if each.updated is not None)
        return Reduced(parse(Binding, bound.body), tuple(reports), updated, tuple(averages))

    def _ask_to_reduce(self, task: Task, model: Model, answers: Answers) -> tuple[Envelope, list[Reduction]]:
        """Return the binding, and ask every aggregator; the backend delivers the questions when the vectors are bound.

        A question cannot keep an aggregator waiting for ever. A ledger that does not answer in time is stopped, its
        answer fails, and so does the question that waits for it. The aggregators are then asked again.
        """
        binding = self._bind_vectors(task, answers)
        awaited = binding.reference
        request = ReduceRequest(
            roster=answers.roster, headers=answers.headers, input_digest=task.input_from(model), ranges=task.ranges
        )
        reductions = self._reductions(task, model, request, answers.vectors, awaited)
        bound = self._bound(task, binding)
        if binding.reference is awaited:
            return bound, reductions
        return bound, self._reductions(task, model, request, answers.vectors, binding.reference)

    def _bound(self, task: Task, binding: Pending[Envelope]) -> Envelope:
        try:
            return binding.result()
        except BudgetError as refusal:
            if refusal.code != "not_reproducible":
                raise
            raise RunFailedError(refusal.code, refusal.message, refusal.remedy, task.step) from None

    def await_wanted(self, task: Task, pace: Pace, epsilon: float | None) -> None:
        """Wait while ``pace`` holds the step, which another attempt then computes, of members as they are by then.

        Args:
            epsilon: as of :meth:`reduce`.

        Raises:
            StepLeft: a stop came first.
        """
        if pace.is_held(task.step):
            self._await_owner("held", lambda: pace.resume(task.step, epsilon))

    def _await_release(self, task: Task, pace: Pace) -> bool:
        """Wait for the step's release; returns whether members have changed by then, so that its roster is an old one.

        Guarantee: a member that was revoked while the step waited is sent nothing of it.
        """
        return self._await_owner("release", lambda: pace.release(task.step))

    def _await_owner(self, name: str, wait: Callable[[], None]) -> bool:
        began = time.perf_counter()
        with self.traces.span(name):
            wait()
        self.waited_s += time.perf_counter() - began
        before = dict(self.membership.members.presentations)
        # The wait may have been as long as a night.
        if self.membership.admission.review():
            self.renew()
        return self.membership.members.presentations != before

    def _bind_vectors(self, task: Task, answers: Answers) -> Pending[Envelope]:
        """Have the vectors of the step bound before they are summed, so that no execution can sum other ones."""
        run_id, manifest = self.manifest.run_id, self._manifest_digest
        return self.control.ledger.bind_vectors(run_id, task.query, task.step, manifest, answers.vectors_digest)

    def _reductions(
        self,
        task: Task,
        model: Model,
        request: ReduceRequest,
        vectors: Sequence[Sequence[Reference[RingVector]]],
        binding: Reference[Envelope],
    ) -> list[Reduction]:
        reductions = []
        for aggregator, masked, part in zip(self.membership.members.aggregators, vectors, task.ranges, strict=False):
            if not task.updates:
                reductions.append(aggregator.release(request, binding, masked))
            elif task.query == "gradient":
                own = model.parameters[part.index], model.states[part.index]
                reductions.append(aggregator.reduce(request, binding, *own, masked))
            else:
                reductions.append(aggregator.measure(request, binding, masked))
        return reductions

    def _tags_agree(self, task: Task, member_id: str, header: Header) -> bool:
        """Return whether a header names what its sender hosts; aggregators verify the rest of it.

        Raises:
            RunFailedError: ``not_reproducible`` if the vector of a virtual worker was computed again and has another
                tag. Two attempts would then decode to two values, whose difference carries no noise.
        """
        hosted = self.membership.hosts.hosting[member_id]
        if header.virtual_workers != hosted or len(header.vector_tags) != len(hosted):
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


def _header_of(reply: StepReply) -> Header | None:
    """Return the unverified header of a reply; None if there is none."""
    try:
        return parse(Header, reply.header.body) if reply.header else None
    except ProtocolError:
        return None
