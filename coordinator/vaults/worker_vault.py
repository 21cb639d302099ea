"""TrainWorker in a vault: when its machine is about to end it, it finishes its step and says that it leaves."""

import signal
import time
from types import FrameType

import numpy as np

from raycloak.attestation.attester.guest import GuestGpus
from raycloak.attestation.core.evidence import Challenge
from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.openings import WorkerOpening
from raycloak.coordinator.vaults.platforms import platform_under
from raycloak.coordinator.vaults.served_terms import ServedTerms, located
from raycloak.coordinator.vaults.settings import WorkerSettings, require_apart
from raycloak.workers.answer_codes import gpu_failed
from raycloak.workers.gradients.gpus import used_gpus
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.messages import Admission, StepReply, StepRequest, WorkerFacts, WorkerSetup
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.train_worker import TrainWorker
from raycloak.workers.vectors.ring import RingVector
from raycloak.workers.vectors.threads import WordThreads


class WorkerVault(Hosted, TrainWorker):
    """A TrainWorker that leaves when it is told to.

    Guarantee: after SIGTERM, here or in its relay, the step under way finishes, and the next `StepReply` says
    ``leaving``. A call that its caller cancels ends between two micro-batches.

    Guarantee: after a call that failed with ``gpu_error``, the process ends by itself.

    Guarantee: a vault of the machine opens no data, runs no code, computes nothing of data and shows no evidence on
    other terms than those of its settings, whatever a relay sends.
    """

    OPENING = WorkerOpening

    def __init__(self, opening: WorkerOpening, inside: Inside) -> None:
        gpus = GuestGpus(opening.gpus, used_gpus) if opening.gpus else None
        platform, threads = platform_under(inside, opening.simulated), WordThreads.of_share(opening.cpus)
        TrainWorker.__init__(self, opening.member_id, platform, time.time, gpus, threads)
        self._inside = inside
        self._terms = ServedTerms(inside.settings) if isinstance(inside.settings, WorkerSettings) else None
        # The former handler, which ends the process, is put back at the first signal.
        self._before = signal.signal(signal.SIGTERM, self._asked_to_end)

    def _asked_to_end(self, _: int, __: FrameType | None) -> None:
        self._inside.leave()
        signal.signal(signal.SIGTERM, self._before)

    def prepare(self, setup: WorkerSetup) -> WorkerFacts:
        if self._terms is None:
            return super().prepare(setup)
        # None while it is not known which data is open: a failure in between must leave no terms of other data.
        self._terms.place = None
        self._terms.require_code(setup)
        setup = located(setup)
        place = self._terms.place_of(setup.dataset)
        facts = super().prepare(setup)
        self._terms.place = place
        return facts

    def _admit_split(self, split: DatasetDescriptor) -> None:
        if self._terms is not None:
            self._terms.require_public(split)

    def compute_known_answer(self, mechanism: Mechanism, *measurements: Measurement) -> bytes:
        if self._terms is not None:
            self._terms.require_noise(mechanism, *(each.mechanism for each in measurements))
        return super().compute_known_answer(mechanism, *measurements)

    def present(self, challenge: Challenge, admission: Admission) -> Envelope:
        require_apart(self._inside.settings, admission.policy)
        if self._terms is not None:
            self._terms.require_manifest(admission.manifest)
        return super().present(challenge, admission)

    def is_cancelled(self) -> bool:
        return self._inside.is_cancelled()

    def is_over(self) -> bool:
        return gpu_failed.is_set()

    def step(
        self, receipt: Envelope, request: StepRequest, *given: np.ndarray
    ) -> tuple[StepReply, *tuple[RingVector, ...]]:
        reply, *vectors = super().step(receipt, request, *given)
        return (reply.model_copy(update={"leaving": self._inside.is_leaving()}), *vectors)
