"""TrainWorker: the only place where data, keys and clear updates exist.

Everything it holds stays in its memory; what leaves is a signed header and masked vectors. It checks all it is
told before it computes: the manifest against its own code and data, the receipt, the roster, every peer's evidence.
A plain class behind a narrow message interface, so that it can be moved into a process of its own.

What it answers to a wrong or failing step is one code; no text of an exception leaves (see `workers/guard.py`).
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from attestation.attester import Attester, EvidenceSource, GpuSource
from attestation.canonical import digest
from attestation.evidence import Challenge
from attestation.key_policy import KeyKind
from attestation.key_release import KeyRelease, ReleaseTerms, VirtualWorkerKeys, open_keys, open_slice_keys
from attestation.keys import Purpose, Secret, derive
from attestation.log_watch import LogWatch
from attestation.messages import Envelope, seal
from attestation.roster import Query, Roster, open_roster
from attestation.slices import DataCommitments
from metrics.errors import EvidenceError, ProtocolError
from workers.evaluating import Evaluating, EvaluationReply
from workers.guard import answer_code, guarded
from workers.halves import SecondHalves
from workers.masks import masked_sum
from workers.measurement import Measurement
from workers.mechanism import Mechanism
from workers.parameters import own_copy, parameter_digest, tensor_digests
from workers.payload import Attempt, VectorRange, payload_key, seal_header, tag_payload
from workers.peers import Peers
from workers.receipt import check_receipt
from workers.ring import RingVector, ring_dtype
from workers.sealed_dataset import SealedDataset
from workers.virtual_worker import EncodedVector
from workers.worker_messages import Admission, StepReply, StepRequest, WorkerFacts, WorkerSetup
from workers.workload import Workload


class TrainWorker:
    """Hosts virtual workers.

    Args:
        member_id: name of this incarnation; a replacement has another.
        source: the platform that issues its evidence.
        clock: seconds since the epoch.
        gpus: its confidential GPUs; None if the policy asks for none.
    """

    def __init__(
        self, member_id: str, source: EvidenceSource, clock: Callable[[], float], gpus: GpuSource | None = None
    ) -> None:
        self._attester = Attester(member_id, source, gpus)
        self._halves = SecondHalves(self._attester.beside())
        self._watch = LogWatch()
        self._evaluating = Evaluating(self._attester)
        self._peers = Peers(self._attester, clock)
        self._keys: dict[tuple[int, int], VirtualWorkerKeys] = {}
        self._vectors: dict[int, EncodedVector] = {}
        self._vectors_of: tuple[Query, int, bytes] | None = None
        self._last: tuple[bytes, StepReply, tuple[np.ndarray, ...]] | None = None
        self._positions: dict[Query, tuple[int, int]] = {}
        self._ratchet = 0
        self._fencing = 0
        self._manifest_digest = b""

    @guarded
    def prepare(self, setup: WorkerSetup) -> WorkerFacts:
        """Open the dataset, build the model, pin the numerics.

        Raises:
            DatasetError, ModelError, ConfigError: what cannot be trained on, with the layer or array named.
            ProtocolError: ``already_presented``.
        """
        self._check_unpresented()
        self._work = Workload(setup)
        self._evaluating.open(setup, self._work.form, self._work.loss)
        return self._work.facts

    @guarded
    def compute_known_answer(self, mechanism: Mechanism, *measurements: Measurement) -> bytes:
        """Digest of the public synthetic batch's vectors; it is part of the evidence this worker presents later.

        Raises:
            ProtocolError: ``already_presented``.
            ConfigError: ``measurement_labels`` or ``measurement_too_large``.
            RefusedError: ``not_public`` if there is to be no noise on data that is not declared public.
            ModelError: ``nondeterministic_op``, with the operation's name: no example is in reach of it yet.
        """
        self._check_unpresented()
        return self._work.take(mechanism, measurements)

    @guarded
    def present(self, challenge: Challenge, admission: Admission) -> Envelope:
        """Check the manifest against what this process really runs, then answer the challenge with evidence.

        Raises:
            ProtocolError: ``manifest_mismatch`` with the field named, ``policy_mismatch``, ``challenge_mismatch``, or
                ``already_presented`` if this worker is bound to another manifest.
            EvidenceError: why the orchestrator's own evidence is refused; nothing has been sent then.
        """
        self._work.check(admission.manifest)
        if admission.policy.digest() != admission.manifest.policy_digest:
            raise ProtocolError("policy_mismatch", "the policy is not the manifest's")
        if self._manifest_digest != admission.manifest.digest():
            self._check_unpresented()
        self._peers.appraise_orchestrator(admission)
        self._halves.check(admission.manifest, admission.key_service)
        self._evaluating.bind(admission.manifest)
        self._admission = admission
        self._manifest_digest = admission.manifest.digest()
        return self._attester.present(challenge, self._manifest_digest, self._work.known_answer)

    @guarded
    def accept_keys(self, release: KeyRelease) -> Envelope:
        """Take virtual-worker keys whose release the evidence log has, if it is still the log that was seen before.

        Where the manifest names a key service, what the orchestrator released is one half of each key, and the other
        is fetched from that service first.

        Returns: signed keyed commitments to the slices they belong to.
        """
        manifest = self._admission.manifest
        member_id, hpke_key = self._attester.member_id, self._attester.hpke
        of_run = manifest.log_owner, manifest.run_id
        terms = ReleaseTerms(*of_run, member_id, self._manifest_digest, self._admission.policy, self._watch)
        slice_keys = open_slice_keys(release.slices, KeyKind.DATASET, terms, hpke_key)
        evaluation_keys = open_slice_keys(release.evaluation, KeyKind.EVALUATION, terms, hpke_key)
        epoch, keys = open_keys(release, terms, hpke_key=hpke_key, key_commitments=manifest.key_commitments)
        keys = self._halves.complete(manifest, self._admission.policy, epoch, keys)
        self._keys = {place: key for place, key in self._keys.items() if place[0] == epoch}
        self._keys |= {(epoch, v): key for v, key in keys.items()}
        hosted = {v for _, v in self._keys}
        if isinstance(self._work.dataset, SealedDataset):
            self._work.dataset.take(slice_keys, hosted)
        self._evaluating.take(evaluation_keys, hosted)
        commitments = tuple(
            derive(key.data, Purpose.DATA_COMMITMENT, self._work.computers["gradient"].slice(v).digest).reveal()
            for v, key in sorted(keys.items())
        )
        body = DataCommitments(
            run_id=manifest.run_id,
            member_id=self._attester.member_id,
            virtual_workers=tuple(sorted(keys)),
            commitments=commitments,
        )
        return seal(body, self._attester.identity)

    def step(
        self, receipt: Envelope, request: StepRequest, *parameters: np.ndarray
    ) -> tuple[StepReply, *tuple[RingVector, ...]]:
        """Compute, mask and sign this worker's contribution to one attempt.

        The roster's query says which of the run's mechanisms it is a step of.

        Guarantee: nothing is computed before a receipt and a roster for exactly these parameters were verified; one
        masked vector leaves per (run, query, step, attempt), and a repeat gets the same bytes or a refusal. Every
        failure is answered by a code.

        Args:
            receipt: the ledger's, for the step; see `workers.receipt`.
            parameters: the float32 parameters of each range, in range order.

        Returns:
            (StepReply, masked vector of each range); the vectors are empty unless the code is ``ok``.
        """
        vectors: tuple[RingVector, ...]
        try:
            reply, vectors = self._step(receipt, request, parameters)
        except Exception as error:  # noqa: BLE001 - only a code may leave
            reply = StepReply(self._attester.member_id, answer_code(error))
            vectors = tuple(np.empty(0, np.uint32) for _ in request.ranges)
        return (reply, *vectors)

    def evaluate(self, order: Envelope, *parameters: np.ndarray) -> EvaluationReply:
        """Measure parameters on the hosted slices of a sealed split; see `workers.evaluating.Evaluating.answer`."""
        return self._evaluating.answer(order, parameters)

    @guarded
    def _step(
        self, receipt: Envelope, request: StepRequest, parameters: Sequence[np.ndarray]
    ) -> tuple[StepReply, tuple[RingVector, ...]]:
        began = time.perf_counter()
        roster = self._open_roster(request.roster)
        if self._last and self._last[0] == digest(request.roster.body):
            return self._last[1], self._last[2]
        self._check_position(roster)
        flat = own_copy(parameters)
        model = self._check_parameters(receipt, roster, flat)
        self._peers.appraise(roster, request.presentations, self._admission)
        self._advance(roster)
        mechanism = self._admission.manifest.computation.mechanism_of(roster.query)

        started = time.perf_counter()
        self._compute(roster, model, flat)
        computed = time.perf_counter()
        vectors, header = self._mask(Attempt.of(roster, model, request.ranges, mechanism.ring_bits))
        masked = time.perf_counter()

        reply = StepReply(self._attester.member_id, "ok", header, masked - began, computed - started, masked - computed)
        self._last = digest(request.roster.body), reply, vectors
        return reply, vectors

    def _check_unpresented(self) -> None:
        """What was attested must stay what runs: data, model and mechanism are fixed by the first presentation."""
        if self._manifest_digest:
            raise ProtocolError("already_presented", f"{self._attester.member_id} is bound to its manifest")

    def _open_roster(self, envelope: Envelope) -> Roster:
        manifest = self._admission.manifest
        roster = open_roster(
            envelope,
            orchestrator_key=manifest.orchestrator_key,
            run_id=manifest.run_id,
            manifest_digest=self._manifest_digest,
            virtual_workers=manifest.computation.mechanism.virtual_workers,
            minimum_workers=2 if self._admission.secure_aggregation else 1,
        )
        self._attester.require_own(roster.member(self._attester.member_id))
        return roster

    def _check_position(self, roster: Roster) -> None:
        last = self._positions.get(roster.query, (-1, -1))
        if (roster.step, roster.attempt) <= last or roster.ratchet < self._ratchet:
            raise ProtocolError("step_fenced", f"step {roster.step} attempt {roster.attempt} is over for this worker")

    def _check_parameters(self, envelope: Envelope, roster: Roster, flat: np.ndarray) -> bytes:
        """The digest of the parameters that really arrived, after the receipt was verified for it."""
        manifest, tensors = self._admission.manifest, self._work.facts.tensors
        model = parameter_digest(tensors, tensor_digests(flat, tensors))
        receipt = check_receipt(
            envelope,
            ledger_key=manifest.ledger_key,
            run_id=manifest.run_id,
            query=roster.query,
            step=roster.step,
            parameter_digest=model,
            manifest_digest=self._manifest_digest,
            account=manifest.account,
            mechanism_digest=manifest.computation.mechanism_of(roster.query).digest(),
            lowest_fencing=self._fencing,
            dataset_fingerprint=manifest.dataset_fingerprint,
        )
        self._fencing = receipt.fencing
        if (roster.query, roster.step) == ("gradient", 0) and model != manifest.computation.initial_parameters:
            raise ProtocolError("parameters_mismatch", "step 0 does not start from the manifest's parameters")
        return model

    def _advance(self, roster: Roster) -> None:
        """Take the position, forget departed peers and what other workers host now, agree with new peers.

        Guarantee: keys and vectors of a virtual worker are dropped at the first roster that gives it to another.
        """
        self._positions[roster.query] = (roster.step, roster.attempt)
        self._ratchet = roster.ratchet
        self._last = None
        own = roster.member(self._attester.member_id)
        self._keys = {place: keys for place, keys in self._keys.items() if place[1] in own.virtual_workers}
        self._vectors = {v: vector for v, vector in self._vectors.items() if v in own.virtual_workers}
        self._peers.meet(roster)

    def _compute(self, roster: Roster, model: bytes, flat: np.ndarray) -> None:
        """Fill ``_vectors`` for what is hosted; kept vectors of the same step and parameters are not computed again."""
        if self._vectors_of != (roster.query, roster.step, model):
            self._vectors, self._vectors_of = {}, (roster.query, roster.step, model)
        epoch = self._admission.manifest.computation.epoch_of(roster.query, roster.step)
        for v in roster.member(self._attester.member_id).virtual_workers:
            if v not in self._vectors:
                keys = self._keys.get((epoch, v))
                if keys is None:
                    raise EvidenceError("release_denied", f"no key of virtual worker {v} in epoch {epoch}")
                self._vectors[v] = self._work.computers[roster.query].vector(v, keys, roster.step, model, flat)

    def _mask(self, attempt: Attempt) -> tuple[tuple[RingVector, ...], Envelope]:
        """Sum the hosted vectors under the masks of each range, tag each for its aggregator, sign the header."""
        own_id, roster = self._attester.member_id, attempt.roster
        own = roster.member(own_id).virtual_workers
        mechanism = self._admission.manifest.computation.mechanism_of(roster.query)
        check_partition(attempt.ranges, mechanism.dimension)
        masks = self._masks(attempt, mechanism.private)
        vectors, tags = [], []
        for part, aggregator in zip(attempt.ranges, roster.aggregators, strict=True):
            hosted = [self._vectors[v].values[part.offset : part.offset + part.length] for v in own]
            vector = np.empty(part.length, ring_dtype(attempt.ring_bits))
            masked_sum(hosted, masks[part.index], vector)
            key = payload_key(self._attester.agreement, aggregator, attempt, range_index=part.index, sender=own_id)
            vectors.append(vector)
            tags.append(tag_payload(key, vector))
        vector_tags = [self._vectors[v].tag for v in own]
        header = seal_header(attempt, own_id, self._attester.identity, vector_tags=vector_tags, payload_tags=tags)
        return tuple(vectors), header

    def _masks(self, attempt: Attempt, private: bool) -> Sequence[Sequence[tuple[Secret, int]]]:
        """Per range, (key, sign) towards every peer.

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
