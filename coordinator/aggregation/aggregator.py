"""MaskedAggregator owns one parameter range: it sums masked vectors and applies the update rule.

It never holds a mask or noise key, and decodes nothing but the sum of all virtual workers. ``reduce`` is a pure
function of its arguments: the coordinator owns parameters and optimizer state as immutable objects. So the death of an
aggregator loses nothing, and ranges cannot drift apart.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.attester.attester import Attester, EvidenceSource
from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.attestation.core.evidence import Challenge
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.lineage import ModelPoint, RangeRelease, StepRelease, TensorDigests
from raycloak.attestation.core.messages import Envelope, Message, seal
from raycloak.attestation.core.roster import Roster, open_roster
from raycloak.coordinator.aggregation.ranges import ParameterRange
from raycloak.coordinator.aggregation.update_rules import Optimizer, require_source
from raycloak.metrics.errors import ProtocolError, SenderError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.gradients.numerics import current_numerics, pin_numerics
from raycloak.workers.terms.binding import Binding, check_binding, sum_digests, vectors_digest
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import values_digest
from raycloak.workers.terms.model_digest import with_state
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.vectors.payload import (
    Header,
    VectorRange,
    VerifiedAttempt,
    check_payload,
    open_header,
    payload_key,
)
from raycloak.workers.vectors.ring import CACHE_BLOCK_BYTES, RingVector, decode, ring_dtype
from raycloak.workers.vectors.threads import ONE_THREAD, PIECE_WORDS, WordThreads, blocks_of

State = Mapping[str, np.ndarray]
F = TypeVar("F", np.float32, np.float64)

# Numbers of a gradient that are squared at once: 8 MiB in float64.
_PIECE = 2**20


class ReduceRequest(Message):
    """The input of one aggregator, besides parameters, state and vectors.

    Attributes:
        headers: one signed header per worker, in the roster's order, which is also that of the vectors.
        input_digest: digest of the whole parameters that the step started from, and of the batches that a client
            sent for it; see `raycloak.workers.terms.step_input`.
        ranges: the cut of the parameters.
        before: digests of all tensors and of their state, where parameters are updated.
        batches: digests of the batches.
        input_before: input digest of the step before, where noise is correlated; empty elsewhere, and for step 0.
    """

    DOMAIN: ClassVar[str] = "raycloak/reduce-request/v1"

    roster: Envelope
    headers: tuple[Envelope, ...]
    input_digest: bytes
    ranges: tuple[VectorRange, ...]
    before: tuple[TensorDigests, ...] = ()
    batches: tuple[bytes, ...] = ()
    input_before: bytes = b""


class ReduceReport(Message):
    """The outcome of an aggregator's work on its range, beside arrays.

    Attributes:
        release: signed, with the range's updated tensors; None of an average that its caller updates by.
        seconds: time inside the aggregator.
        squares: sum of the squares of the range's average gradient, float64; None in a private run, and of an average
            that was released.
    """

    DOMAIN: ClassVar[str] = "raycloak/reduce-report/v1"

    release: RangeRelease | None = None
    seconds: float
    squares: float | None = None


ReleasedAverage = tuple[ReduceReport, NDArray[np.float64]]
"""A report, and the released average: the decoded sum over the public divisor."""


@dataclass(frozen=True, slots=True)
class _Verified:
    """A request that is verified except for its vectors.

    Attributes:
        own: the part of the vector that this aggregator sums.
        expected: for each worker of the roster, its header and the one-time key of its array.
    """

    roster: Roster
    own: VectorRange
    expected: tuple[tuple[Header, Secret], ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a run that an aggregator takes: one range under one manifest.

    Attributes:
        rule: updates the range's parameters.
    """

    manifest: Manifest
    manifest_digest: bytes
    range: ParameterRange
    rule: Optimizer


class MaskedAggregator:
    """The owner of one parameter range, which sums its vectors and updates it.

    Args:
        member_id: name of this incarnation.
        source: the platform that issues its evidence.
        word_threads: that share sums, decoding and digests.
    """

    def __init__(self, member_id: str, source: EvidenceSource, word_threads: WordThreads = ONE_THREAD) -> None:
        # The update rule's kernels must match the run's numerics class.
        pin_numerics()
        self._attester = Attester(member_id, source)
        # Unset until `present`: an actor can only be told of its range once it is there.
        self._part: _Part
        self._fencing = 0
        self._threads = word_threads

    def present(self, challenge: Challenge, manifest: Manifest, owned: ParameterRange, base: str = ".") -> Envelope:
        """Take the manifest and the range to own, and answer the challenge with evidence.

        Args:
            base: folder that names of the user's own update rule and schedule start from.

        Raises:
            ConfigError: as `raycloak.coordinator.aggregation.update_rules.Optimizer`.
            ProtocolError: ``manifest_mismatch`` if this process would round an update differently than the manifest's
                numerics class, or if an update rule of the user's own has other source here.
            EvidenceError: ``code_unlisted`` if that rule is not from the bundle that the manifest states.
        """
        if not current_numerics("cpu").computes_like(manifest.computation.numerics):
            raise ProtocolError(
                "manifest_mismatch", f"the manifest's numerics is not what {self._attester.member_id} has"
            )
        computation = manifest.computation
        require_source(computation.optimizer, base, manifest.code)
        rule = Optimizer(computation.optimizer, owned.tensors, computation.mechanism.steps, base)
        self._part = _Part(manifest, manifest.digest(), owned, rule)
        return self._attester.present(challenge, self._part.manifest_digest, b"", manifest.code)

    def initial_state(self) -> State:
        """Return the optimizer state before the first step."""
        return self._part.rule.initial_state()

    def reduce(
        self,
        request: ReduceRequest,
        binding: Envelope,
        parameters: NDArray[np.float32],
        state: State,
        *given: NDArray[Any],
    ) -> tuple[ReduceReport, NDArray[np.float32], State, *tuple[NDArray[np.float32], ...]]:
        """Verify, sum and decode; divide by the public batch size; solve correlated noise; update.

        Guarantee: decodes only the sum of vectors that signed headers of this very attempt describe. There is one
        vector per worker of the roster, and together they cover every virtual worker exactly once. The ledger has
        bound the step to the tags in these headers. Anything else is refused and named before a single word is added.

        Guarantee: updates only the parameters that the step was charged for, and signs what they and the rule's state
        were, and have become. So it does of the releases that this one is solved by.

        Args:
            binding: the ledger's, for the step; see `raycloak.workers.terms.binding`.
            parameters: the range's parameters, float32, in memory that nobody else can write to.
            given: where noise is correlated, what this returned for each step whose sums this one mixes, the newest
                first. Then the masked ring words of the range, one per header.

        Returns:
            (report, parameters, state); and where noise is correlated the released gradient ``x_t``, float32, as if its
            step alone were in it. It is ``y_t - Σ c_j x_(t-j)`` of the averages ``y``.

        Raises:
            SenderError: a vector or header does not match; it names the sender.
            ProtocolError: the request itself does not match; ``parameters_mismatch`` for other parameters.
            RunFailedError: ``non_finite_parameters`` or ``update_rule``.
        """
        started = time.perf_counter()
        verified = self._verify(request, updates=True)
        step = verified.roster.step
        computation, tensors = self._part.manifest.computation, self._part.range.tensors
        reach = computation.reach(step)
        solved, vectors = given[:reach], given[reach:]
        own = with_state(parameters, state, tensors, self._threads, solved)
        before = self._before(request, own)
        # In float32, as the rule takes it: the decoded sum is then never in memory as a whole.
        average, bound = self._average(verified, binding, vectors, np.float32, solved)
        # First: a rule may work in the average's memory.
        squares = None if computation.mechanism.private else _squares(average)
        kept = [average.copy()] if computation.mechanism.bands > 1 else []
        updated, new_state = self._part.rule.update(parameters, average, state, step)
        following = (*kept, *solved)[: computation.reach(step + 1)]
        after = with_state(updated, new_state, tensors, self._threads, following)
        signed = self._signed(verified, request, bound, before, ModelPoint.of(after))
        release = RangeRelease(release=signed, tensors=after)
        report = ReduceReport(release=release, seconds=time.perf_counter() - started, squares=squares)
        return report, updated, new_state, *kept

    def measure(self, request: ReduceRequest, binding: Envelope, *vectors: RingVector) -> ReleasedAverage:
        """Verify, sum, decode and divide by the public divisor, for a measurement. Parameters and state stay.

        Guarantee: as :meth:`reduce`. The digest of the values is signed.

        Args:
            binding: the ledger's, for the release.
            vectors: masked ring words of the whole measurement, one per header.

        Raises:
            SenderError: a vector or header does not match; it names the sender.
            ProtocolError: the request itself does not match; ``query_unknown`` also for a training step.
        """
        started = time.perf_counter()
        verified = self._verify(request, updates=False)
        average, bound = self._average(verified, binding, vectors, np.float64)
        values = values_digest(verified.roster.query, verified.roster.step, average)
        of_model = ModelPoint.of_values(request.input_digest)
        signed = self._signed(verified, request, bound, of_model, ModelPoint.of_values(values))
        release = RangeRelease(release=signed)
        return ReduceReport(release=release, seconds=time.perf_counter() - started), average

    def release(self, request: ReduceRequest, binding: Envelope, *vectors: RingVector) -> ReleasedAverage:
        """Verify, sum, decode and divide by the public batch size, for a training step that its caller updates by.

        Guarantee: as :meth:`reduce`. The average is what an update is made from, so it is released either way.

        Args:
            binding: the ledger's, for the step.
            vectors: masked ring words of the range, one per header.

        Raises:
            SenderError: a vector or header does not match; it names the sender.
            ProtocolError: the request itself does not match; ``query_mismatch`` for a measurement.
        """
        started = time.perf_counter()
        if self._part.manifest.computation.mechanism.bands > 1:
            raise ProtocolError("query_mismatch", "a release with correlated noise is solved before it is shown")
        average, _ = self._average(self._verify(request, updates=True), binding, vectors, np.float64)
        return ReduceReport(seconds=time.perf_counter() - started), average

    def _before(self, request: ReduceRequest, own: tuple[TensorDigests, ...]) -> ModelPoint:
        """Return the whole model that a step starts from; its own range is computed of what was given.

        The other ranges' parameters are in the input digest; for their states, their own aggregators sign the same.
        """
        first = self._part.manifest.computation.tensors.index(self._part.range.tensors[0])
        before = ModelPoint.of((*request.before[:first], *own, *request.before[first + len(own) :]))
        if step_input(before.parameters, request.batches, request.input_before) != request.input_digest:
            raise ProtocolError("parameters_mismatch", "the parameters are not those that the step was charged for")
        return before

    def _signed(
        self, verified: _Verified, request: ReduceRequest, bound: Binding, before: ModelPoint, after: ModelPoint
    ) -> Envelope:
        release = StepRelease(
            roster_digest=verified.roster.digest(),
            binding=bound.head,
            input_digest=request.input_digest,
            before=before,
            after=after,
        )
        return seal(release, self._attester.identity)

    def _average(
        self,
        verified: _Verified,
        binding: Envelope,
        vectors: Sequence[RingVector],
        dtype: type[F],
        solved: Sequence[NDArray[np.float32]] = (),
    ) -> tuple[NDArray[F], Binding]:
        """Verify binding and vectors, decode the vectors' sum and divide it by the public divisor, in float64.

        Args:
            solved: earlier releases, of which their part in the sum is taken out.
        """
        manifest, roster = self._part.manifest, verified.roster
        mechanism = manifest.computation.mechanism_of(roster.query)
        # Of exactly these vectors, so that no second sum of the step is ever decoded.
        bound = check_binding(
            binding,
            ledger_key=manifest.ledger_key,
            run_id=manifest.run_id,
            query=roster.query,
            step=roster.step,
            manifest_digest=self._part.manifest_digest,
            vectors_digest=vectors_digest([header for header, _ in verified.expected]),
            sums=sum_digests([header for header, _ in verified.expected]),
            lowest_fencing=self._fencing,
        )
        # Kept, so that an older instance of the ledger is refused from now on.
        self._fencing = bound.fencing
        # All vectors are checked before a single word is added.
        self._require_cover(roster, len(vectors), "vectors")
        for (header, key), vector in zip(verified.expected, vectors, strict=True):
            with _naming(header.sender):
                check_payload(key, vector, header, range_index=verified.own.index)
        terms = mechanism.ring_bits, mechanism.gamma_log2, mechanism.expected_batch_size
        parts = [
            (each / COEFFICIENT_UNIT, part) for each, part in zip(mechanism.coefficients[1:], solved, strict=False)
        ]
        return decoded_average(vectors, *terms, dtype, self._threads, parts), bound

    def _verify(self, request: ReduceRequest, updates: bool) -> _Verified:
        """Verify a request except for its vectors.

        Args:
            updates: whether it must be of a training step, or else of a measurement.
        """
        manifest = self._part.manifest
        roster = open_roster(
            request.roster,
            orchestrator_key=manifest.orchestrator_key,
            run_id=manifest.run_id,
            manifest_digest=self._part.manifest_digest,
            virtual_workers=manifest.computation.mechanism.virtual_workers,
            minimum_workers=1,
        )
        # A slice, because a roster may have fewer aggregators.
        owner = roster.aggregators[self._part.range.index : self._part.range.index + 1]
        if [member.identity_key for member in owner] != [self._attester.identity.public]:
            raise ProtocolError("roster_own_entry", "the roster gives this range to another aggregator")
        if updates and roster.query != "gradient":
            raise ProtocolError("query_mismatch", f"a step of '{roster.query}' does not update parameters")
        if not updates:
            manifest.computation.measurement(roster.query)
        mechanism = manifest.computation.mechanism_of(roster.query)
        if roster.query == "gradient":
            own = VectorRange(index=self._part.range.index, offset=self._part.range.start, length=self._part.range.size)
        else:
            own = VectorRange(index=0, offset=0, length=mechanism.dimension)
        if request.ranges[own.index : own.index + 1] != (own,):
            raise ProtocolError("range_mismatch", "the request cuts the parameters in another way than this range")
        self._require_cover(roster, len(request.headers), "headers")
        mixed = manifest.computation.mixed_sums(roster.query, roster.step)
        attempt = VerifiedAttempt.of(roster, request.input_digest, request.ranges, mechanism.ring_bits, mixed)
        expected = []
        for worker, envelope in zip(roster.workers, request.headers, strict=True):
            with _naming(worker.member_id):
                header = open_header(envelope, attempt, worker.member_id)
                agreement, sender = self._attester.agreement, worker.member_id
                key = payload_key(agreement, worker, attempt, range_index=own.index, sender=sender)
            expected.append((header, key))
        return _Verified(roster, own, tuple(expected))

    def _require_cover(self, roster: Roster, count: int, what: str) -> None:
        workers = len(roster.workers)
        if count != workers:
            raise ProtocolError("incomplete_cover", f"{count} {what} cannot cover a roster of {workers}")


@contextmanager
def _naming(member_id: str) -> Iterator[None]:
    """Name the sender whose header or vector does not match."""
    try:
        yield
    except ProtocolError as error:
        raise SenderError(error.code, error.message, error.remedy, member_id) from None


def _squares(average: NDArray[np.float32]) -> float:
    """Return the sum of squares in float64, piece by piece: a copy of a large model's gradient would not fit."""
    total = 0.0
    for start in range(0, len(average), _PIECE):
        total += float(np.square(average[start : start + _PIECE], dtype=np.float64).sum())
    return total


def decoded_average(
    vectors: Sequence[RingVector],
    bits: int,
    gamma_log2: int,
    divisor: float,
    dtype: type[F],
    threads: WordThreads = ONE_THREAD,
    earlier: Sequence[tuple[float, NDArray[np.float32]]] = (),
) -> NDArray[F]:
    """Return the decoded sum of equally long vectors over ``divisor``, block by block: the sum never exists as a whole.

    Guarantee: the bits of ``decode(sum, gamma_log2) / divisor - c_1 x_1 - c_2 x_2 …`` in float64, in this order,
    rounded to ``dtype``; a value beyond it becomes infinite.

    Args:
        earlier: (c, x) of each release whose part in the sum is taken out; as long as the vectors.
    """
    require_bound(all(part.shape == vectors[0].shape for _, part in earlier), "releases of a range have its length")
    found, block = np.empty(len(vectors[0]), dtype), 2 * CACHE_BLOCK_BYTES // 8

    def decode_pieces(pieces: Iterator[range]) -> None:
        total, real = np.empty(block, ring_dtype(bits)), np.empty(block)
        term = np.empty(block if earlier else 0)
        # Here, because a new thread does not inherit it.
        with np.errstate(over="ignore"):
            for part in blocks_of(pieces, block):
                length = part.stop - part.start
                sums, decoded = total[:length], real[:length]
                ring_sum([vector[part] for vector in vectors], sums)
                decode(sums, gamma_log2, decoded)
                np.divide(decoded, divisor, out=decoded)
                for coefficient, values in earlier:
                    np.multiply(values[part], coefficient, out=term[:length], dtype=np.float64)
                    np.subtract(decoded, term[:length], out=decoded)
                found[part] = decoded

    threads.share(threads.cut(len(found), PIECE_WORDS), decode_pieces)
    return found


def ring_sum(vectors: Sequence[RingVector], out: RingVector) -> None:
    """Write the sum of equally long vectors to ``out``, in its ring. The inputs are only read."""
    # To memory of its own, because Ray's arguments are read-only.
    np.copyto(out, vectors[0])
    for vector in vectors[1:]:
        np.add(out, vector, out=out)
