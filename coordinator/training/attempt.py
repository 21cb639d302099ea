"""A step under way, attempt by attempt: ask every worker, bind the vectors, have them reduced.

A training step and a measurement take the same path. They differ in what an aggregator does with the decoded sum.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from raycloak.attestation.core.lineage import SignedStep
from raycloak.attestation.core.mask_graph import MaskGraph
from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.core.roster import Query, Roster
from raycloak.coordinator.aggregation.aggregator import ReduceReport, ReduceRequest, State
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.control import Pending
from raycloak.coordinator.cluster.remote import Average, Parameters, Reduction, StepAnswer
from raycloak.coordinator.training.pace import OPEN, Pace
from raycloak.coordinator.training.sent import NO_BATCHES, StepBatches
from raycloak.coordinator.training.step_context import MemberFailures, Model, StepContext
from raycloak.coordinator.vaults.calls import Reference
from raycloak.metrics.errors import BudgetError, ProtocolError, RunFailedError, SenderError
from raycloak.workers.messages import StepReply, StepRequest
from raycloak.workers.terms.binding import Binding, sum_digests, vectors_digest
from raycloak.workers.terms.public_sums import PublicSums
from raycloak.workers.terms.receipt import Receipt
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.vectors.payload import Header, VectorRange


@dataclass(slots=True)
class Step:
    """A step of one of the run's mechanisms, with all that its attempts have given so far.

    Nobody can read one of its masked vectors.

    Attributes:
        number: of the step, or of the release of a measurement.
        model: the one that it is computed for.
        ranges: the pieces its vector is cut into; the first aggregators take one each.
        seen: by member id, the presentations that a worker has seen, in whatever step of the session.
        updates: whether aggregators update the model of a training step; otherwise they release its average.
        batches: what a client sent for it.
        pace: says when it is computed, and when its sum may be decoded.
        paid: its receipt. ``epsilon``: of the account, as the receipt states it; None if the run is not private.
        roster, shown, asked: of the newest attempt, with the presentations and the answers that each worker is owed
            or owes, by member id.
        headers, tags_digest, sums, replies: of the workers that gave whole answers, in the roster's order; see
            `raycloak.workers.terms.binding.vectors_digest` and ``sum_digests``.
        counted: exact sums over the examples of all virtual workers; None in a private run, and of a measurement.
        binding: the ledger's, for the step.
        reports: one per range.
        updated: new parameters and state of each range; empty where nothing is updated.
        solved: the released gradient of each range, where noise is correlated; else empty.
        mixed_by: by member, the virtual workers that it has hosted since the step before; it has their earlier sums.
        averages: the released average of each range, float64; empty where parameters are updated.
        attempts: their number so far. patience: of the newest one, in deadlines.
        seconds: wall time without ``waited_s``, in which its owner held it or did not release it yet. Of these,
            ``charge_seconds``, ``compute_seconds`` and ``reduce_seconds`` are as in `StepOutcome`.
    """

    context: StepContext
    query: Query
    number: int
    model: Model
    ranges: tuple[VectorRange, ...]
    seen: dict[str, frozenset[Envelope]]
    updates: bool = True
    batches: StepBatches = NO_BATCHES
    pace: Pace = OPEN
    paid: Receipt = field(init=False)
    epsilon: float | None = None
    roster: Envelope = field(init=False)
    shown: Mapping[str, Sequence[Envelope]] = field(init=False)
    asked: dict[str, StepAnswer] = field(init=False)
    headers: tuple[Envelope, ...] = ()
    tags_digest: bytes = b""
    sums: tuple[bytes, ...] = ()
    replies: tuple[StepReply, ...] = ()
    counted: PublicSums | None = None
    binding: Binding = field(init=False)
    reports: list[ReduceReport] = field(default_factory=list)
    updated: tuple[tuple[Reference[Parameters], Reference[State]], ...] = ()
    averages: list[Average] = field(default_factory=list)
    solved: tuple[Reference[Parameters], ...] = ()
    mixed_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    attempts: int = 1
    patience: int = 1
    seconds: float = 0.0
    charge_seconds: float = 0.0
    compute_seconds: float = 0.0
    reduce_seconds: float = 0.0
    waited_s: float = 0.0
    _tags: dict[int, bytes] = field(default_factory=dict)
    _failures: MemberFailures = field(init=False)

    def __post_init__(self) -> None:
        self._failures = MemberFailures(self.context, self.model, self.name, self.number)

    @property
    def name(self) -> str:
        """The step's name in messages."""
        return f"step {self.number}" if self.query == "gradient" else f"{self.query} {self.number}"

    @property
    def epoch(self) -> int:
        """The epoch whose keys it needs."""
        return self.context.manifest.computation.epoch_of(self.query, self.number)

    @property
    def input_digest(self) -> bytes:
        """The digest of the step's input: its model, the batches, and where noise is correlated the step before."""
        return step_input(self.model.digest, self.batches.digests, self.model.input_before)

    @property
    def _is_mixed(self) -> bool:
        return self.context.manifest.computation.mechanism_of(self.query).bands > 1

    @property
    def released(self) -> SignedStep | None:
        """The aggregators' signatures of the attempt that was reduced; None in a loop by hand."""
        ranges = tuple(report.release for report in self.reports if report.release is not None)
        return SignedStep(roster=self.roster, ranges=ranges) if ranges else None

    def ask(self, receipt: Envelope | Reference[Envelope], roster: Envelope) -> None:
        """Ask every worker.

        Args:
            receipt: the receipt, or a reference to it. With a reference, workers get their question as soon as the
                ledger has answered, and none if it refuses.
        """
        members, hosting = self.context.membership.members, self.context.membership.hosts.hosting
        self.roster, self.shown, self.asked = roster, self._presentations(roster), {}
        self.patience = 1
        # A worker drops the sums of virtual workers that it does not host in an attempt.
        self.mixed_by = {
            member_id: tuple(v for v in hosting[member_id] if v in self.mixed_by.get(member_id, ()))
            for member_id in members.workers
        }
        for member_id in sorted(members.workers):
            seen = self.seen.get(member_id, frozenset())
            # A new host computes sums of earlier steps again; all others have them.
            is_new = len(self.mixed_by[member_id]) < len(hosting[member_id])
            past = self.model.earlier if is_new else ()
            self.patience = max(self.patience, 1 + len(past))
            request = StepRequest(
                roster=roster,
                presentations=tuple(envelope for envelope in self.shown[member_id] if envelope not in seen),
                commitments=self.context.membership.hosts.commitments,
                ranges=self.ranges,
                batches=self.batches.digests,
                past=len(past),
                input_before=past[-1].input_before if past else self.model.input_before,
            )
            models = [part for each in reversed(past) for part in each.parameters]
            self.asked[member_id] = members.workers[member_id].step(
                receipt, request, (*models, *self.model.parameters), self.batches.references
            )

    def _presentations(self, roster: Envelope) -> Mapping[str, Sequence[Envelope]]:
        """Return, by worker, the presentations of the members whose evidence it appraises."""
        members = self.context.membership.members
        # An aggregator outside the roster is not shown: a worker would forget its evidence, and need it again later.
        absent = {actor.member_id for actor in members.aggregators[len(self.ranges) :]}
        shown = {member_id: each for member_id, each in members.presentations.items() if member_id not in absent}
        if self.context.manifest.mask_colluders is None:
            return dict.fromkeys(members.workers, tuple(shown.values()))
        graph = MaskGraph(parse(Roster, roster.body))
        always = tuple(each for member_id, each in shown.items() if member_id not in members.workers)
        near = {own: (own, *(each.member_id for each in graph.neighbours(own))) for own in members.workers}
        return {own: (*always, *(shown[each] for each in ids)) for own, ids in near.items()}

    def collect(self, began_ns: int) -> bool:
        """Wait for every worker's answer; if any fails, take the failed workers off the run and return False.

        If the step is held meanwhile, workers end between two micro-batches, stay in the run, and False returns.

        Args:
            began_ns: when the workers were asked, for their spans; see `raycloak.metrics.traces.Span`.
        """
        backend, is_cancelled = self.context.backend, False
        # A new host computes as many steps as it is given models of.
        deadline_s = self.context.deadline_s * self.patience

        def cancel() -> None:
            nonlocal is_cancelled
            # Before the call: an answer that comes back as cancelled must find it set.
            is_cancelled = True
            # They were given a receipt, which is ready since the charge was awaited, and the model of a finished step.
            backend.cancel([answer.reply for answer in self.asked.values()])

        with self.pace.computing(self.number, cancel):
            ready = set(backend.wait([part for answer in self.asked.values() for part in answer.parts], deadline_s))
        replies: dict[str, StepReply] = {}
        failures: dict[str, str] = {}
        for member_id, answer in self.asked.items():
            try:
                if not ready.issuperset(answer.parts):
                    raise ActorLost("deadline")
                replies[member_id] = backend.fetch(answer.reply, deadline_s)
                if replies[member_id].code != "ok":
                    failures[member_id] = replies[member_id].code
            except ActorLost as lost:
                failures[member_id] = lost.cause
            except ProtocolError as refusal:
                # What it sent is no answer.
                failures[member_id] = refusal.code
        # Tags are kept of a failed attempt too: a late answer may still complete it, and a later attempt must then
        # decode to the same value.
        headers = {each: self._header(each, reply) for each, reply in replies.items() if each not in failures}
        found = [header for header in headers.values() if header is not None]
        failures |= {member_id: "header_mismatch" for member_id, header in headers.items() if header is None}
        self._tell(replies, failures, began_ns)
        # Kept only after whole answers: a worker that failed, and one beside it, may not have what it was shown.
        self.seen.clear()
        if failures:
            if is_cancelled:
                failures = {each: code for each, code in failures.items() if code != "cancelled"}
            self._failures.take(failures, everybody=len(failures) == len(self.asked))
            return False
        self.seen.update({member_id: frozenset(self.shown[member_id]) for member_id in self.asked})
        for reply in replies.values():
            if reply.leaving:
                self.context.membership.members.ask_to_leave(reply.member_id, "left")
        self.replies = tuple(replies.values())
        self.headers = tuple(reply.header for reply in self.replies if reply.header is not None)
        self.tags_digest, self.sums = vectors_digest(found), sum_digests(found)
        self.counted = self._counted(replies)
        return True

    def _header(self, member_id: str, reply: StepReply) -> Header | None:
        """Return the header of a reply, which names what its sender hosts; None if it does not.

        Aggregators verify the rest of it.

        Raises:
            RunFailedError: ``not_reproducible`` if the vector of a virtual worker was computed again and has another
                tag. Two attempts would then decode to two values, whose difference carries no noise.
        """
        hosted = self.context.membership.hosts.hosting[member_id]
        try:
            header = parse(Header, reply.header.body) if reply.header else None
        except ProtocolError:
            return None
        if header is None or header.virtual_workers != hosted or len(header.vector_tags) != len(hosted):
            return None
        mixed = self.context.manifest.computation.mixed_sums(self.query, self.number)
        if [len(tags) for tags in header.sum_tags] != ([mixed] * len(hosted) if mixed else []):
            return None
        for v, tag in zip(hosted, header.vector_tags, strict=True):
            if self._tags.setdefault(v, tag) != tag:
                raise RunFailedError(
                    "not_reproducible",
                    f"{member_id} computed another vector of virtual worker {v} in {self.name} than its former host",
                    "Use one kind of machine and library versions; start a new run.",
                    self.number,
                )
        return header

    def _counted(self, replies: Mapping[str, StepReply]) -> PublicSums | None:
        """Return the sums over all virtual workers, added in their order: who hosts which does not change a bit."""
        found: dict[int, PublicSums] = {}
        for member_id, reply in replies.items():
            hosted = self.context.membership.hosts.hosting[member_id]
            if reply.counted is None or len(reply.counted) != len(hosted):
                return None
            found |= zip(hosted, reply.counted, strict=True)
        return PublicSums.of(found[v] for v in sorted(found))

    def _tell(self, replies: Mapping[str, StepReply], failures: Mapping[str, str], began_ns: int) -> None:
        """Record what each worker did, by the times that it states itself; a lost one until it was given up."""
        waited, metrics = (time.time_ns() - began_ns) / 1e9, self.context.metrics

        def believed(stated: float) -> float:
            # A worker may state anything, so no time is beyond what was waited; NaN is not within it either.
            return stated if 0 <= stated <= waited else waited

        for member_id in self.asked:
            whole, phases, failed = waited, dict[str, float](), failures.get(member_id, "")
            if (reply := replies.get(member_id)) is not None:
                whole = believed(reply.seconds)
                phases = {phase: believed(stated) for phase, stated in reply.usage.seconds().items()}
                if not failed:
                    metrics.worker_stepped(phases)
            spent = {f"{phase}_seconds": each for phase, each in phases.items()}
            self.context.traces.record("worker", began_ns, whole, failed, member=member_id, **spent)
        peaks = (reply.usage.gpu_memory_peak_bytes for reply in replies.values())
        if taken := [peak for peak in peaks if peak is not None]:
            metrics.gpu_memory_taken(max(taken))

    def reduce(self) -> bool:
        """Have the vectors bound for good, and then every range reduced.

        Guarantee: no aggregator is given a vector before the ledger has bound all vectors of the step on disk, nor
        before its pace has released the step.

        Returns:
            False if an aggregator was lost and replaced, or if a worker's vector failed its checks, or if the evidence
            of members was renewed or revoked while the step waited for its release.

        Raises:
            StepLeft: a stop came before the release.
        """
        backend, membership, deadline_s = self.context.backend, self.context.membership, self.context.deadline_s
        if not self.pace.is_released(self.number):
            self._bound(self._bind())
            self.pace.computed(self.number, self.epsilon, self.counted)
            # A member that was revoked while the step waited is sent nothing of it.
            if self._await_owner("release", lambda: self.pace.release(self.number)):
                return False
        # Bound again after a wait, which costs the ledger a look: the path to the aggregators is the same.
        binding = self._bind()
        awaited = binding.reference
        # The backend delivers the questions when the vectors are bound. They cannot keep an aggregator waiting for
        # ever: a ledger that does not answer in time is stopped, its answer fails, and so do they.
        reductions = self._ask_to_reduce(awaited)
        bound = self._bound(binding)
        if binding.reference is not awaited:
            reductions = self._ask_to_reduce(binding.reference)
        self.pace.computed(self.number, self.epsilon, self.counted)
        ready = set(backend.wait([part for each in reductions for part in each.parts], deadline_s))
        self.reports, self.averages = [], []
        lost: dict[int, str] = {}
        accused: dict[str, str] = {}
        for index, reduction in enumerate(reductions):
            try:
                if not ready.issuperset(reduction.parts):
                    raise ActorLost("deadline")
                self.reports.append(backend.fetch(reduction.report, deadline_s))
                if reduction.average is not None:
                    self.averages.append(backend.fetch(reduction.average, deadline_s))
            except ActorLost as error:
                lost[index] = error.cause
            except SenderError as error:
                if error.member_id not in membership.members.workers:
                    raise
                accused[error.member_id] = error.code
            except RunFailedError as error:
                raise RunFailedError(error.code, f"{self.name}: {error.message}", error.remedy, self.number) from None
        self._failures.require_model(lost.values())
        for index, cause in lost.items():
            # A lost object is a vector that was lost with its sender's node. The aggregator is well.
            # The next attempt finds that the sender is not.
            if cause != "object_lost":
                membership.admission.replace_aggregator(index, cause)
        self._failures.take(accused, everybody=False)
        if lost or accused:
            return False
        self.context.metrics.aggregate_released()
        self.updated = tuple(each.updated for each in reductions if each.updated is not None)
        self.solved = tuple(each.solved for each in reductions if each.solved is not None)
        self.binding = parse(Binding, bound.body)
        return True

    def _bind(self) -> Pending[Envelope]:
        """Have the vectors of the step bound before they are summed, so that no execution can sum other ones."""
        run_id, manifest = self.context.manifest.run_id, self.context.manifest_digest
        vectors = self.tags_digest, self.sums
        return self.context.control.ledger.bind_vectors(run_id, self.query, self.number, manifest, *vectors)

    def _bound(self, binding: Pending[Envelope]) -> Envelope:
        try:
            return binding.result()
        except BudgetError as refusal:
            if refusal.code != "not_reproducible":
                raise
            raise RunFailedError(refusal.code, refusal.message, refusal.remedy, self.number) from None

    def _ask_to_reduce(self, binding: Reference[Envelope]) -> list[Reduction]:
        request = ReduceRequest(
            roster=self.roster,
            headers=self.headers,
            input_digest=self.input_digest,
            ranges=self.ranges,
            before=self.model.tensors,
            batches=self.batches.digests,
            input_before=self.model.input_before,
        )
        reductions = []
        for aggregator, part in zip(self.context.membership.members.aggregators, self.ranges, strict=False):
            masked = tuple(answer.vectors[part.index] for answer in self.asked.values())
            if not self.updates:
                reductions.append(aggregator.release(request, binding, masked))
            elif self.query == "gradient":
                own = self.model.parameters[part.index], self.model.states[part.index]
                earlier = [each.solved[part.index] for each in self.model.earlier] if self._is_mixed else None
                reductions.append(aggregator.reduce(request, binding, *own, masked, earlier))
            else:
                reductions.append(aggregator.measure(request, binding, masked))
        return reductions

    def await_wanted(self) -> None:
        """Wait while the step is held, which another attempt then computes, of members as they are by then.

        Raises:
            StepLeft: a stop came first.
        """
        if self.pace.is_held(self.number):
            self._await_owner("held", lambda: self.pace.resume(self.number, self.epsilon))

    def _await_owner(self, name: str, wait: Callable[[], None]) -> bool:
        """Wait for the step's owner; returns whether members have changed by then, so that its roster is an old one."""
        began = time.perf_counter()
        with self.context.traces.span(name):
            wait()
        self.waited_s += time.perf_counter() - began
        members = self.context.membership.members
        before = dict(members.presentations)
        # The wait may have been as long as a night.
        if self.context.membership.admission.review():
            self.context.renew()
        return members.presentations != before
