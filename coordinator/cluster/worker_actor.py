"""TrainWorker as an actor: when its process is asked to end, it finishes its step and says that it leaves."""

import signal
from collections.abc import Callable
from types import FrameType

import numpy as np
import ray

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.attester.attester import EvidenceSource, GpuSource
    from raycloak.attestation.core.messages import Envelope
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.coordinator.cluster.calls import Receiver
    from raycloak.workers.messages import StepReply, StepRequest
    from raycloak.workers.train_worker import TrainWorker
    from raycloak.workers.vectors.ring import RingVector


class TrainWorkerActor(Receiver, TrainWorker):
    """A TrainWorker that leaves when its process is asked to end.

    Guarantee: after SIGTERM the task under way finishes, and the next `StepReply` says ``leaving``. A second SIGTERM
    ends the process at once. A call that its caller cancels ends between two micro-batches.
    """

    def __init__(
        self, member_id: str, source: EvidenceSource, clock: Callable[[], float], gpus: GpuSource | None
    ) -> None:
        keep_memory_private()
        super().__init__(member_id, source, clock, gpus)
        self._leaving = False
        # The former handler, which ends the process, is put back at the first signal.
        self._before = signal.signal(signal.SIGTERM, self._asked_to_end)

    def _asked_to_end(self, _: int, __: FrameType | None) -> None:
        self._leaving = True
        signal.signal(signal.SIGTERM, self._before)

    def is_cancelled(self) -> bool:
        return bool(ray.get_runtime_context().is_canceled())

    def step(
        self, receipt: Envelope, request: StepRequest, *given: np.ndarray
    ) -> tuple[StepReply, *tuple[RingVector, ...]]:
        reply, *vectors = super().step(receipt, request, *given)
        return (reply.model_copy(update={"leaving": self._leaving}), *vectors)
