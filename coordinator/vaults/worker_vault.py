"""TrainWorker in a vault: when its machine is about to end it, it finishes its step and says that it leaves."""

import signal
import time
from types import FrameType

import numpy as np

from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.evidence.sources import GuestGpus
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.openings import WorkerOpening
from raycloak.coordinator.vaults.platforms import platform_under
from raycloak.workers.messages import StepReply, StepRequest
from raycloak.workers.train_worker import TrainWorker
from raycloak.workers.vectors.ring import RingVector


class WorkerVault(Hosted, TrainWorker):
    """A TrainWorker that leaves when it is told to.

    Guarantee: after SIGTERM, here or in its relay, the step under way finishes, and the next `StepReply` says
    ``leaving``. A call that its caller cancels ends between two micro-batches.
    """

    OPENING = WorkerOpening

    def __init__(self, opening: WorkerOpening, inside: Inside) -> None:
        gpus = GuestGpus(opening.gpus) if opening.gpus else None
        TrainWorker.__init__(self, opening.member_id, platform_under(inside, opening.simulated), time.time, gpus)
        self._inside = inside
        # The former handler, which ends the process, is put back at the first signal.
        self._before = signal.signal(signal.SIGTERM, self._asked_to_end)

    def _asked_to_end(self, _: int, __: FrameType | None) -> None:
        self._inside.leave()
        signal.signal(signal.SIGTERM, self._before)

    def is_cancelled(self) -> bool:
        return self._inside.is_cancelled()

    def step(
        self, receipt: Envelope, request: StepRequest, *given: np.ndarray
    ) -> tuple[StepReply, *tuple[RingVector, ...]]:
        reply, *vectors = super().step(receipt, request, *given)
        return (reply.model_copy(update={"leaving": self._inside.is_leaving()}), *vectors)
