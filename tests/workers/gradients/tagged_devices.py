"""Workers whose models lie over the devices of `raycloak_lab.scale.tagged_devices`."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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

HOST = torch.device("meta", 99)
"""The host's memory, for a tensor that is to be on a device and on the host in turn: the tag stays then."""


def on_host(module: nn.Module) -> None:
    """Say of all tensors of a model that they are in the host's memory, as in fact they stay."""
    # A tied tensor is met twice.
    module._apply(lambda each: each if isinstance(each, Tagged) else Tagged(each.detach(), HOST))


class FromHost(TorchDispatchMode):
    """Counts the bytes of copies from the host that are alive.

    Attributes:
        peak: the most at once.
        sources: the tensors that were copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sources: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device == HOST:
            self.sources.append(args[0])
            self.now += result.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(result.untyped_storage(), self._gone, result.nbytes)
        return result

    def _gone(self, size: int) -> None:
        self.now -= size


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
        "place": lambda module, _, free, beside: place(module, homes, free, beside),
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
