"""Workers whose models lie over the devices of `raycloak_lab.scale.tagged_devices`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from raycloak.attestation.core.keys import Secret
from raycloak.workers import train_worker, workload
from raycloak.workers.device.words import CpuWords, PiecedWords
from raycloak.workers.gradients.numerics import current_numerics
from raycloak.workers.gradients.placement import place
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.ring import RingVector
from raycloak.workers.workload import Workload
from raycloak_lab.scale.tagged_devices import Tagged, devices, tagged


class TaggedWords(CpuWords):
    """Words of sums on such a device."""

    def encoded(self, total: list[Tensor], mechanism: Mechanism, noise: Secret | None, start: int = 0) -> RingVector:
        (piece,) = total
        # A measurement is summed in the host's memory.
        return super().encoded([piece.numbers if isinstance(piece, Tagged) else piece], mechanism, noise, start)


@contextmanager
def workers_over(count: int) -> Iterator[None]:
    """Have the workers of this process lay their models over so many of these devices, as over GPUs."""
    homes = devices(count)
    words = PiecedWords({home: TaggedWords() for home in homes})
    changes = {
        "words_on": lambda _, threads: words,
        "place": lambda module, _, free: place(module, homes, free),
        "current_numerics": lambda device: current_numerics("cpu"),
    }

    class OnTags(Workload):
        def __init__(self, setup: WorkerSetup, *others: Any) -> None:
            super().__init__(setup.model_copy(update={"device": str(homes[0])}), *others)

    with ExitStack() as changed:
        changed.enter_context(tagged())
        for name, change in changes.items():
            changed.enter_context(patch.object(workload, name, change))
        changed.enter_context(patch.dict(workload.MICRO_BATCH_BYTES, {str(homes[0]): 2**30}))
        changed.enter_context(patch.object(train_worker, "Workload", OnTags))
        yield
