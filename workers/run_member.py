"""A worker's part in one run, from its first presentation on: its keys, the vectors it keeps, and one masked answer.

Guarantee: nothing is computed before a receipt and a roster for exactly the given parameters and batches were
verified. One masked vector leaves per (run, query, step, attempt); a repeat gets the same bytes or a refusal.
Assumes: its caller, `raycloak.workers.train_worker.TrainWorker`, lets no text of an exception out.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.core.mask_graph import check_circle
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.attestation.core.roster import Query, Roster, open_roster
from raycloak.attestation.keys.release import ExpectedRelease, KeyRelease, VirtualWorkerKeys, open_keys, open_slice_keys
from raycloak.attestation.log.watch import LogWatch
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.attestation.policy.key_policy import KeyKind
from raycloak.metrics.errors import EvidenceError, ProtocolError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.device.words import Words
from raycloak.workers.messages import Admission, StepReply, StepRequest
from raycloak.workers.peers import Peers
from raycloak.workers.second_halves import SecondHalves
from raycloak.workers.sent_step import SentStep, own_batches
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.model_digest import model_digest, own_copy, tensor_digests
from raycloak.workers.terms.public_sums import PublicSums, require_public
from raycloak.workers.terms.receipt import Receipt, check_receipt, data_root
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.vectors.payload import VectorRange, VerifiedAttempt, payload_key, seal_header, tag_payload
from raycloak.workers.vectors.ring import RingVector
from raycloak.workers.virtual_worker import EncodedVector, OwnSum
from raycloak.workers.workload import PlannedWorkload

Place = tuple[Query, int, bytes, bytes]
"""Query, step, input digest and data root: a vector is a function of these and of its virtual worker."""


class HostedSum:
    """The sum of the vectors that a worker hosts in one step, and the tag of each: all that it keeps of them.

    Hides how many virtual workers it hosts: memory holds one vector's words for each parameter, and those of another
    vector while it is added. A sum is enough, since only the sum ever leaves, under masks.

    Args:
        words: that its vectors are of.

    Attributes:
        tags: by virtual worker, of the vectors in the sum.
        counted: by virtual worker, the exact sums that came with its vector; of public data alone.
    """

    def __init__(self, words: Words[Any]) -> None:
        self._device = words
        self.tags: dict[int, bytes] = {}
        self.counted: dict[int, PublicSums] = {}
        self._place: Place | None = None
        self._words: Any = None

    def masked(self, part: VectorRange, masks: Sequence[tuple[Secret, int]]) -> RingVector:
        """Return one range of the sum, masked; see `raycloak.workers.device.words.Words.masked`."""
        assert self._words is not None, "a vector was added"
        return self._device.masked(self._words, part, masks)

    def drop_all_but(self, hosted: tuple[int, ...]) -> None:
        """Drop everything if a vector of another virtual worker than these is in it: a sum cannot lose one."""
        if not self.tags.keys() <= set(hosted):
            self._begin(None)

    def missing(self, hosted: tuple[int, ...], place: Place) -> tuple[int, ...]:
        """Return the virtual workers whose vectors at ``place`` are not in it; vectors of another place are dropped."""
        if place != self._place:
            self._begin(place)
        return tuple(v for v in hosted if v not in self.tags)

    def add(self, v: int, vector: EncodedVector) -> None:
        """Add a vector of the present place. Its memory may become the sum's own."""
        require_bound(v not in self.tags, "a virtual worker is in a sum once")
        if self._words is None:
            self._words = vector.values
        else:
            self._device.add(self._words, vector.values)
        self.tags[v] = vector.tag
        if vector.counted is not None:
            self.counted[v] = vector.counted

    def _begin(self, place: Place | None) -> None:
        self._place, self._words, self.tags, self.counted = place, None, {}, {}


class PastSums:
    """The sums of a worker's newest steps, which its next vectors mix; empty where noise is not correlated.

    Hides which sums are still of use: those of the steps whose inputs lead to the present one.
    """

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, OwnSum]] = {}
        self._inputs: dict[int, bytes] = {}

    def follow(self, inputs: Mapping[int, bytes], oldest: int) -> None:
        """Keep the sums of steps from ``oldest`` on that lead to these consecutive ``inputs``, and no others.

        Args:
            inputs: input digests by step, each chained to the one before; verified.
        """
        first = min(inputs)
        # The digest of a step fixes all before it.
        related = self._inputs.get(first) == inputs[first]
        for step in [*self._inputs]:
            followed = inputs[step] == self._inputs[step] if step in inputs else related and step < first
            if not followed or step < oldest:
                del self._inputs[step]
                self._sums.pop(step, None)
        self._inputs |= inputs

    def drop_all_but(self, hosted: tuple[int, ...]) -> None:
        """Drop the sums of other virtual workers."""
        for sums in self._sums.values():
            for v in sums.keys() - set(hosted):
                del sums[v]

    def keep(self, step: int, v: int, own: OwnSum) -> None:
        """Keep the sum of one of the steps that are followed."""
        require_bound(step in self._inputs, "a sum that is kept is of a step that leads to the present one")
        self._sums.setdefault(step, {})[v] = own

    def lacking(self, step: int, hosted: Sequence[int]) -> list[int]:
        """Return the virtual workers whose sum of a step is not there."""
        return [v for v in hosted if v not in self._sums.get(step, {})]

    def input_of(self, step: int) -> bytes:
        """Return the input digest of a step that is followed."""
        return self._inputs[step]

    def of(self, v: int, steps: Iterable[int]) -> list[OwnSum]:
        """Return a virtual worker's sums of some steps, all of which are there."""
        return [self._sums[step][v] for step in steps]


@dataclass(frozen=True, slots=True)
class _PaidInput:
    """The input of an attempt, as its receipt is for it.

    Attributes:
        digest: of the input.
        paid: the receipt.
        flat: the parameters, float32[d]. past: those of earlier steps that were given, by step, and what their digest
            must be.
    """

    digest: bytes
    paid: Receipt
    flat: np.ndarray
    past: Mapping[int, tuple[Sequence[np.ndarray], bytes]]


class RunMember:
    """A worker that is bound to one manifest.

    Args:
        attester: the worker's own keys.
        planned: its mechanisms and data; the manifest of ``admission`` was checked to state them.
        peers: has appraised the orchestrator of ``admission``.
        halves: its side of the key service that the manifest may name.
        admission: the first one; :meth:`renew` takes the next.
        is_cancelled: returns whether the call under way is cancelled; it is asked before every micro-batch.

    Attributes:
        manifest, manifest_digest: the one that it is bound to.
    """

    def __init__(
        self,
        attester: Attester,
        planned: PlannedWorkload,
        peers: Peers,
        halves: SecondHalves,
        admission: Admission,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self.planned, self.manifest = planned, admission.manifest
        self.manifest_digest = self.manifest.digest()
        self._attester, self._peers, self._halves = attester, peers, halves
        self._admission = admission
        self._is_cancelled = is_cancelled
        self._watch = LogWatch()
        self._keys: dict[tuple[int, int], VirtualWorkerKeys] = {}
        self._threads = planned.workload.word_threads
        # Kept until another step or model is asked for: a new attempt masks it again without computing it.
        self._hosted = HostedSum(planned.workload.words)
        self._past = PastSums()
        self._clock = planned.workload.words.clock
        # The last answer, by the digest of its roster: a reply that was lost on its way is given again. Its vectors are
        # masked anew, with the same masks, since kept they would be as large as the model.
        self._last: tuple[bytes, StepReply, VerifiedAttempt] | None = None
        self._positions: dict[Query, tuple[int, int]] = {}
        self._ratchet = 0
        self._fencing = 0

    def renew(self, admission: Admission) -> None:
        """Take a later admission by the same manifest, for evidence of another epoch."""
        require_bound(admission.manifest.digest() == self.manifest_digest, "a member has one manifest for life")
        self._admission = admission

    def accept_keys(self, release: KeyRelease) -> Envelope:
        """Take keys of virtual workers; returns signed keyed commitments to their slices.

        See `raycloak.workers.train_worker.TrainWorker.accept_keys`.
        """
        manifest, policy = self.manifest, self._admission.policy
        member_id, hpke_key = self._attester.member_id, self._attester.hpke
        of_run, most = (manifest.log_owner, manifest.run_id), manifest.keys_per_machine
        terms = ExpectedRelease(*of_run, member_id, self.manifest_digest, policy, self._watch, keys_per_machine=most)
        # All packages are opened before a key is kept: a release that is refused leaves the keys as they were.
        slice_keys = open_slice_keys(release.slices, KeyKind.DATASET, terms, hpke_key)
        evaluation_keys = open_slice_keys(release.evaluation, KeyKind.EVALUATION, terms, hpke_key)
        epoch, keys = open_keys(release, terms, hpke_key=hpke_key, key_commitments=manifest.key_commitments)
        keys = self._halves.complete(self._admission, epoch, keys)
        # A key that is no longer held cannot leak.
        self._keys = {place: key for place, key in self._keys.items() if place[0] == epoch}
        self._keys |= {(epoch, v): key for v, key in keys.items()}
        hosted = {v for _, v in self._keys}
        workload = self.planned.workload
        workload.slices.take(slice_keys, hosted)
        workload.evaluation_slices.take(evaluation_keys, hosted)
        body = DataCommitments(
            run_id=manifest.run_id,
            member_id=member_id,
            virtual_workers=tuple(sorted(keys)),
            commitments=tuple(self._commitment(v, key) for v, key in sorted(keys.items())),
        )
        return seal(body, self._attester.identity)

    def step(
        self,
        receipt: Envelope,
        request: StepRequest,
        parameters: Sequence[np.ndarray],
        batches: Sequence[np.ndarray] = (),
    ) -> tuple[StepReply, tuple[RingVector, ...]]:
        """Compute, mask and sign one attempt; see `raycloak.workers.train_worker.TrainWorker.step`.

        Raises:
            RaycloakError: why there is no vector; anything else is a defect, or comes from user code.
        """
        began, clock = time.perf_counter(), self._clock
        clock.start()
        # First, because a request counts for nothing without the orchestrator's signature over its roster.
        roster = self._open_roster(request.roster)
        # Before the position is checked: a repeat of the last request is not a step back.
        if self._last and self._last[0] == digest(request.roster.body):
            return self._last[1], self._mask(self._last[2])[0]
        self._check_position(roster)
        contents = own_batches(batches, request.batches)
        given = self._check_input(receipt, roster, request, parameters)
        self._check_data(given.paid, roster, request.commitments)
        sent = self._sent_step(roster, contents)
        self._peers.appraise(roster, request.presentations, self._admission)
        # All checks are done. The position moves before anything is computed, so a failure cannot reopen the attempt.
        self._advance(roster)
        mechanism = self.manifest.computation.mechanism_of(roster.query)

        self._compute(roster, given, sent)
        mixed = self.manifest.computation.mixed_sums(roster.query, roster.step)
        attempt = VerifiedAttempt.of(roster, given.digest, request.ranges, mechanism.ring_bits, mixed)
        # The model has them now.
        del given
        vectors, header = self._mask(attempt)
        usage = clock.stop()

        reply = StepReply(
            member_id=self._attester.member_id,
            code="ok",
            header=header,
            seconds=time.perf_counter() - began,
            usage=usage,
            counted=self._counted(mechanism, roster),
        )
        self._last = digest(request.roster.body), reply, attempt
        return reply, vectors

    def _open_roster(self, envelope: Envelope) -> Roster:
        manifest = self.manifest
        roster = open_roster(
            envelope,
            orchestrator_key=manifest.orchestrator_key,
            run_id=manifest.run_id,
            manifest_digest=self.manifest_digest,
            virtual_workers=manifest.computation.mechanism.virtual_workers,
            # A lone worker has nobody to share a mask with.
            minimum_workers=2 if self._admission.secure_aggregation else 1,
        )
        check_circle(roster, manifest.computation.releases, manifest.mask_colluders)
        self._attester.require_own(roster.member(self._attester.member_id))
        return roster

    def _check_position(self, roster: Roster) -> None:
        last = self._positions.get(roster.query, (-1, -1))
        if (roster.step, roster.attempt) <= last or roster.ratchet < self._ratchet:
            raise ProtocolError("step_fenced", f"step {roster.step} attempt {roster.attempt} is over for this worker")

    def _check_input(
        self, envelope: Envelope, roster: Roster, request: StepRequest, parameters: Sequence[np.ndarray]
    ) -> _PaidInput:
        """Return the step's input that really arrived, with the receipt, which was verified for it.

        Guarantee: sums of earlier steps that are kept, and models that they may be computed of, are of the steps that
        were charged before this one.
        """
        manifest = self.manifest
        chained = manifest.computation.mechanism_of(roster.query).bands > 1
        reach = manifest.computation.reach(roster.step) if chained else 0
        # A measurement's model may be cut in another way than what it releases.
        ranges, rest = divmod(len(parameters), request.past + 1)
        if request.past > reach or rest:
            raise ProtocolError("past_mismatch", f"step {roster.step} mixes sums of {reach} steps before")
        # Verified and computed on one copy: shared memory could change in between.
        flat = own_copy(parameters[ranges * request.past :], self._threads)
        # So an engine may load it once for all virtual workers.
        flat.setflags(write=False)
        past, first = dict[int, tuple[Sequence[np.ndarray], bytes]](), roster.step - request.past
        chain = {first - 1: request.input_before}
        for index, step in enumerate(range(first, roster.step)):
            parts = parameters[ranges * index : ranges * (index + 1)]
            past[step] = parts, self._model_digest(own_copy(parts, self._threads))
            chain[step] = step_input(past[step][1], (), chain[step - 1])
        model = self._model_digest(flat)
        before = chain[roster.step - 1] if chained else b""
        inputs = step_input(model, request.batches, before)
        receipt = check_receipt(
            envelope,
            ledger_key=manifest.ledger_key,
            run_id=manifest.run_id,
            query=roster.query,
            step=roster.step,
            input_digest=inputs,
            manifest_digest=self.manifest_digest,
            account=manifest.account,
            mechanism_digest=manifest.computation.mechanism_of(roster.query).digest(),
            lowest_fencing=self._fencing,
            dataset_fingerprint=manifest.dataset_fingerprint,
            lineage=manifest.lineage,
        )
        # Kept, so that an older instance's receipt is refused from now on.
        self._fencing = receipt.fencing
        if (roster.query, roster.step) == ("gradient", 0) and model != manifest.computation.initial_parameters:
            raise ProtocolError("parameters_mismatch", "step 0 does not start from the manifest's parameters")
        if chained:
            self._past.follow(chain | {roster.step: inputs}, roster.step - reach)
        return _PaidInput(inputs, receipt, flat, past)

    def _model_digest(self, flat: np.ndarray) -> bytes:
        tensors = self.planned.workload.facts.tensors
        return model_digest(tensors, tensor_digests(flat, tensors, self._threads))

    def _sent_step(self, roster: Roster, contents: Sequence[bytes]) -> SentStep | None:
        """Return the step's batches, still sealed; None where the run's data is registered.

        Raises:
            ProtocolError: ``batch_unexpected`` if there are batches where none belong, or as `SentStep.read`.
        """
        form, manifest = self.planned.workload.sent_form, self.manifest
        if form is None or roster.query != "gradient":
            if contents:
                raise ProtocolError("batch_unexpected", f"{roster.query} step {roster.step} takes no batches")
            return None
        return SentStep.read(contents, manifest, roster.step, form)

    def _check_data(self, paid: Receipt, roster: Roster, commitments: Sequence[bytes]) -> None:
        """Require that the receipt is for the data that this worker opened.

        Guarantee: passes only if ``commitments`` have the receipt's root, one for each virtual worker, and this worker
        itself computes those of the slices that it hosts.

        Raises:
            ProtocolError: ``data_mismatch``.
            EvidenceError: ``release_denied`` without a virtual worker's key.
        """
        virtual_workers = self.manifest.computation.mechanism.virtual_workers
        if len(commitments) != virtual_workers or data_root(commitments) != paid.data_root:
            raise ProtocolError("data_mismatch", f"the receipt for step {paid.step} is for data with other commitments")
        for v in roster.member(self._attester.member_id).virtual_workers:
            if commitments[v] != self._commitment(v, self._key(roster, v)):
                raise ProtocolError("data_mismatch", f"the examples of virtual worker {v} are not those of the receipt")

    def _commitment(self, v: int, keys: VirtualWorkerKeys) -> bytes:
        """Compute the keyed commitment to a slice."""
        slice_digest = self.planned.computers["gradient"].slice(v).digest
        return derive(keys.data, Purpose.DATA_COMMITMENT, slice_digest).reveal()

    def _key(self, roster: Roster, v: int) -> VirtualWorkerKeys:
        """Return a virtual worker's keys of the epoch of a roster; EvidenceError ``release_denied`` without them."""
        epoch = self.manifest.computation.epoch_of(roster.query, roster.step)
        keys = self._keys.get((epoch, v))
        if keys is None:
            raise EvidenceError("release_denied", f"no key of virtual worker {v} in epoch {epoch}")
        return keys

    def _advance(self, roster: Roster) -> None:
        """Take the position, forget departed peers and what other workers host now, agree with new peers.

        Guarantee: keys of a virtual worker, and a sum with its vector, are dropped at the first roster that gives it to
        another.
        """
        self._positions[roster.query] = (roster.step, roster.attempt)
        self._ratchet = roster.ratchet
        self._last = None
        own = roster.member(self._attester.member_id)
        self._keys = {place: keys for place, keys in self._keys.items() if place[1] in own.virtual_workers}
        self._hosted.drop_all_but(own.virtual_workers)
        self._past.drop_all_but(own.virtual_workers)
        self._peers.meet(roster)

    def _compute(self, roster: Roster, given: _PaidInput, sent: SentStep | None) -> None:
        """Add the vectors of all hosted virtual workers; those kept for this step are not computed again."""
        hosted, root = roster.member(self._attester.member_id).virtual_workers, given.paid.data_root
        computer = self.planned.computers[roster.query]
        missing = self._hosted.missing(hosted, (roster.query, roster.step, given.digest, root))
        earlier = self._mixed_before(roster)
        self._recompute(roster, given, missing, earlier)
        if missing and roster.query == "gradient":
            self.planned.check_released(roster.step, given.flat)
        for v in missing:
            keys = self._key(roster, v)
            rows = None if sent is None else sent.rows(v, keys)
            of_step = roster.step, given.digest, root, given.flat
            vector = computer.vector(v, keys, *of_step, rows, self._is_cancelled, self._past.of(v, earlier))
            if vector.own is not None:
                self._past.keep(roster.step, v, vector.own)
            self._hosted.add(v, vector)
            # A name would keep a vector in memory while the next one is computed.
            del vector

    def _mixed_before(self, roster: Roster) -> range:
        """Return the earlier steps whose sums a step mixes, the newest first."""
        mixed = self.manifest.computation.mixed_sums(roster.query, roster.step)
        return range(roster.step - 1, roster.step - mixed, -1)

    def _recompute(self, roster: Roster, given: _PaidInput, hosted: Sequence[int], earlier: range) -> None:
        """Compute the sums of earlier steps that are to be mixed and are not here, as after a move.

        Raises:
            ProtocolError: ``past_missing`` without the model of such a step.
        """
        computer = self.planned.computers[roster.query]
        for step in reversed(earlier):
            lacking = self._past.lacking(step, hosted)
            if not lacking:
                continue
            if step not in given.past:
                raise ProtocolError("past_missing", f"step {roster.step} mixes sums of step {step}, of no model here")
            parts, digest_of_model = given.past[step]
            flat = own_copy(parts, self._threads)
            flat.setflags(write=False)
            if self._model_digest(flat) != digest_of_model:
                raise ProtocolError("parameters_mismatch", f"the model of step {step} changed while it was read")
            of_step = step, self._past.input_of(step), given.paid.data_root, flat
            for v in lacking:
                own = computer.own_sum(v, self._key(roster, v), *of_step, self._is_cancelled)
                self._past.keep(step, v, own)

    def _counted(self, mechanism: Mechanism, roster: Roster) -> tuple[PublicSums, ...] | None:
        """Return the exact sums of each hosted virtual worker, in order; None where there are none.

        Guarantee: no exact sum over examples leaves under a mechanism that is private.

        Raises:
            RefusedError: ``not_public`` if there are sums, and the mechanism is private.
        """
        if not self._hosted.counted:
            return None
        require_public(mechanism)
        return tuple(self._hosted.counted[v] for v in roster.member(self._attester.member_id).virtual_workers)

    def _mask(self, attempt: VerifiedAttempt) -> tuple[tuple[RingVector, ...], Envelope]:
        """Mask the hosted sum in each range, tag each for its aggregator, sign the header."""
        own_id, roster = self._attester.member_id, attempt.roster
        own = roster.member(own_id).virtual_workers
        mechanism = self.manifest.computation.mechanism_of(roster.query)
        check_partition(attempt.ranges, mechanism.dimension)
        self._clock.begin("masks")
        masks = self._masks(attempt, mechanism.private)
        vectors, tags = [], []
        for part, aggregator in zip(attempt.ranges, roster.aggregators, strict=True):
            self._clock.begin("masks")
            vector = self._hosted.masked(part, masks[part.index])
            self._clock.begin("out")
            key = payload_key(self._attester.agreement, aggregator, attempt, range_index=part.index, sender=own_id)
            vectors.append(vector)
            tags.append(tag_payload(key, vector))
        vector_tags = [self._hosted.tags[v] for v in own]
        steps = (roster.step, *self._mixed_before(roster)) if attempt.mixed else ()
        header = seal_header(
            attempt,
            own_id,
            self._attester.identity,
            vector_tags=vector_tags,
            payload_tags=tags,
            sum_tags=[tuple(each.tag for each in self._past.of(v, steps)) for v in own] if steps else [],
        )
        return tuple(vectors), header

    def _masks(self, attempt: VerifiedAttempt, private: bool) -> Sequence[Sequence[tuple[Secret, int]]]:
        """Return (key, sign) towards every neighbour in the mask graph, per range.

        Without secure aggregation there are none for public data, nor for a lone worker, whose vector carries all
        the noise.
        """
        needless = len(attempt.roster.workers) == 1 or not private
        if needless and not self._admission.secure_aggregation:
            return [()] * len(attempt.ranges)
        return self._peers.masks(attempt)


def check_partition(ranges: Sequence[VectorRange], dimension: int) -> None:
    """Require ``ranges`` to cut [0, dimension) into consecutive pieces; ProtocolError ``range_mismatch``."""
    position = 0
    for index, part in enumerate(ranges):
        if (part.index, part.offset) != (index, position) or part.length <= 0:
            raise ProtocolError("range_mismatch", "the ranges do not partition the parameters")
        position += part.length
    if position != dimension:
        raise ProtocolError("range_mismatch", "the ranges do not partition the parameters")
