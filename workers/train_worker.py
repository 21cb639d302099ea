"""TrainWorker: the only place where data, keys and clear updates exist.

Everything it holds stays in its memory; only a signed header and masked vectors leave. It checks everything that it is
told before it computes: the manifest against its own code and data, the receipt, the roster, every peer's evidence. It
is a plain class behind a narrow message interface, so that it can move into its own process.

    prepare               Workload           data, model and loss are open
    compute_known_answer  PlannedWorkload    the mechanisms are chosen, and tried on public data
    present               RunMember          bound to one manifest for life

It answers a wrong or failing step with one code; no text of an exception leaves (see `workers/answer_codes.py`).
"""

from collections.abc import Callable, Sequence

import numpy as np

from raycloak.attestation.attester.attester import Attester, EvidenceSource, GpuSource
from raycloak.attestation.core.evidence import Challenge
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.release import KeyRelease
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.answer_codes import answer_code, guarded
from raycloak.workers.evaluation import EvaluationReply
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.listed_code import check_code
from raycloak.workers.messages import Admission, StepReply, StepRequest, WorkerFacts, WorkerSetup
from raycloak.workers.models.models import read_flat
from raycloak.workers.peers import Peers
from raycloak.workers.run_member import RunMember
from raycloak.workers.second_halves import SecondHalves, check_key_address
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.ring import RingVector
from raycloak.workers.vectors.threads import ONE_THREAD, WordThreads
from raycloak.workers.workload import PlannedWorkload, Workload


class TrainWorker:
    """Hosts virtual workers.

    Args:
        member_id: name of this incarnation; a replacement has another.
        source: the platform that issues its evidence.
        clock: seconds since the epoch.
        gpus: its confidential GPUs; None if the policy asks for none.
        word_threads: that share the work on words.
    """

    def __init__(
        self,
        member_id: str,
        source: EvidenceSource,
        clock: Callable[[], float],
        gpus: GpuSource | None = None,
        word_threads: WordThreads = ONE_THREAD,
    ) -> None:
        self._attester = Attester(member_id, source, gpus)
        self._halves = SecondHalves(self._attester.beside())
        self._peers = Peers(self._attester, clock)
        self._word_threads = word_threads
        # The actor runs before there is a manifest, which states facts that workers find. Until then it has no stage.
        self._stage: Workload | PlannedWorkload | RunMember | None = None

    @guarded
    def prepare(self, setup: WorkerSetup) -> WorkerFacts:
        """Open the dataset, build the model, pin the numerics.

        Raises:
            DatasetError, ModelError, ConfigError: what cannot be trained on, with the layer or array named.
            ProtocolError: ``already_presented``, or ``model_mismatch`` with the tensor named.
        """
        self._check_unpresented()
        self._stage = workload = Workload(setup, self._admit_split, self._word_threads)
        return workload.facts

    @guarded
    def initial_parameters(self) -> np.ndarray:
        """Return the parameters that the run starts from, float32[d]; of a worker that has opened its data, no more.

        Raises:
            ProtocolError: ``already_presented``.
        """
        self._check_unpresented()
        assert isinstance(self._stage, Workload), "the dataset is opened first"
        return read_flat(self._stage.module)

    @guarded
    def compute_known_answer(self, mechanism: Mechanism, *measurements: Measurement) -> bytes:
        """Return the digest of the public synthetic batch's vectors; the evidence presented later contains it.

        Raises:
            ProtocolError: ``already_presented``; ``mechanism_bounds`` if no proof covers a mechanism.
            ConfigError: ``batch_too_large``, ``measurement_labels`` or ``measurement_too_large``.
            RefusedError: ``not_public`` if there is to be no noise on data that is not declared public.
            ModelError: ``nondeterministic_op``, with the operation's name: no example is in reach of it yet.
        """
        self._check_unpresented()
        workload = self._stage.workload if isinstance(self._stage, PlannedWorkload) else self._stage
        assert isinstance(workload, Workload), "the dataset is opened first"
        self._stage = planned = PlannedWorkload(workload, mechanism, measurements)
        return planned.known_answer

    @guarded
    def present(self, challenge: Challenge, admission: Admission) -> Envelope:
        """Check the manifest against what this process really runs, then answer the challenge with evidence.

        Raises:
            ProtocolError: ``manifest_mismatch`` with the field named, ``mechanism_bounds``, ``policy_mismatch``,
                ``challenge_mismatch``, or ``already_presented`` if this worker is bound to another manifest.
            EvidenceError: ``code_unlisted``, or why the orchestrator's own evidence is refused; nothing has been sent.
        """
        manifest, member = admission.manifest, self._stage
        planned = member.planned if isinstance(member, RunMember) else member
        assert isinstance(planned, PlannedWorkload), "the known answer is computed first"
        planned.check(manifest)
        if admission.policy.digest() != manifest.policy_digest:
            raise ProtocolError("policy_mismatch", "the policy is not the manifest's")
        check_code(admission, planned.workload.setup, planned.workload.facts)
        if isinstance(member, RunMember) and member.manifest_digest != manifest.digest():
            self._check_unpresented()
        self._peers.appraise_orchestrator(admission)
        check_key_address(manifest, admission.key_service)
        # Bound before evidence leaves: an answer that is lost on its way may have been admitted.
        if isinstance(member, RunMember):
            member.renew(admission)
        else:
            of_worker = self._attester, planned, self._peers, self._halves
            self._stage = RunMember(*of_worker, admission, self.is_cancelled)
        return self._attester.present(challenge, manifest.digest(), planned.known_answer, manifest.code)

    @guarded
    def accept_keys(self, release: KeyRelease) -> Envelope:
        """Take virtual-worker keys whose release the evidence log has, if it is still the log that was seen before.

        Where the manifest names a key service, the orchestrator has released one half of each key. The other half is
        fetched from that service first.

        Returns:
            Signed keyed commitments to the slices that the keys belong to.

        Raises:
            EvidenceError, ProtocolError: why the release is refused.
            DatasetError: ``sealed_changed`` or ``dataset_unreadable``.
        """
        return self._member.accept_keys(release)

    def step(
        self, receipt: Envelope, request: StepRequest, *given: np.ndarray
    ) -> tuple[StepReply, *tuple[RingVector, ...]]:
        """Compute, mask and sign this worker's contribution to one attempt.

        The roster's query says which of the run's mechanisms it is a step of.

        Guarantee: nothing is computed before a receipt and a roster for exactly these parameters and batches were
        verified. One masked vector leaves per (run, query, step, attempt), and a repeat gets the same bytes or a
        refusal. Every failure is answered by a code. A call that is cancelled ends between two micro-batches; its
        attempt is over, and a later one computes the step.

        Args:
            receipt: the ledger's, for the step; see `raycloak.workers.terms.receipt`.
            given: the float32 parameters of each range, in range order. Then the bytes of each batch in
                ``request.batches``, uint8, in that order.

        Returns:
            (StepReply, masked vector of each range); the vectors are empty unless the code is ``ok``.
        """
        vectors: tuple[RingVector, ...]
        try:
            reply, vectors = self._step(receipt, request, given)
        except Exception as error:  # noqa: BLE001 - only a code may leave
            reply = StepReply(member_id=self._attester.member_id, code=answer_code(error))
            vectors = tuple(np.empty(0, np.uint32) for _ in request.ranges)
        return (reply, *vectors)

    def evaluate(self, order: Envelope, *parameters: np.ndarray) -> EvaluationReply:
        """Score parameters on the hosted slices of the run's split.

        Guarantee: that of `raycloak.workers.evaluation.HostedSplit.answer`. Every failure is answered by a code.

        Args:
            order: the orchestrator's, for these parameters.
            parameters: the float32 parameters of each range, in range order.
        """
        try:
            signed = self._evaluate(order, parameters)
        except Exception as error:  # noqa: BLE001 - only a code may leave
            return EvaluationReply(member_id=self._attester.member_id, code=answer_code(error))
        return EvaluationReply(member_id=self._attester.member_id, code="ok", answer=signed)

    def is_cancelled(self) -> bool:
        """Return whether the call under way was cancelled; only an actor's can be."""
        return False

    @guarded
    def _step(
        self, receipt: Envelope, request: StepRequest, given: Sequence[np.ndarray]
    ) -> tuple[StepReply, tuple[RingVector, ...]]:
        ranges = len(given) - len(request.batches)
        return self._member.step(receipt, request, given[:ranges], given[ranges:])

    @guarded
    def _evaluate(self, order: Envelope, parameters: Sequence[np.ndarray]) -> Envelope:
        member = self._stage
        if not isinstance(member, RunMember) or member.planned.workload.split is None:
            raise ProtocolError("evaluation_unknown", "no split is measured on here, or the run has not begun")
        of_worker = self._attester, member.manifest, self._word_threads
        return member.planned.workload.split.answer(order, parameters, *of_worker)

    def _admit_split(self, split: DatasetDescriptor) -> None:
        """Refuse a split that this process may not measure on; a vault has terms for it."""

    @property
    def _member(self) -> RunMember:
        assert isinstance(self._stage, RunMember), "the worker presents itself first"
        return self._stage

    def _check_unpresented(self) -> None:
        """Keep what was attested: data, model and mechanism are fixed by the first presentation."""
        if isinstance(self._stage, RunMember):
            raise ProtocolError("already_presented", f"{self._attester.member_id} is bound to its manifest")
