"""Several devices on a machine that has none: a tensor says where it is, and its numbers are in the host's memory.

An operation whose operands say two devices is refused, forward, backward or computed again. Only a copy passes. So the
product's own code for several GPUs runs here, but for their kernels, streams and threads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from raycloak.attestation.core.keys import Secret
from raycloak.workers import train_worker, workload
from raycloak.workers.device.words import CpuWords, PiecedWords
from raycloak.workers.gradients import parts, vocabulary_loss
from raycloak.workers.gradients.numerics import current_numerics
from raycloak.workers.gradients.placement import place
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.ring import RingVector
from raycloak.workers.workload import Workload

_ATEN: Any = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)


def devices(count: int) -> list[torch.device]:
    """Return the first devices. Torch lets anybody say ``meta``, and has no kernel or thread for it."""
    return [torch.device("meta", index) for index in range(count)]


class Tagged(Tensor):
    """A tensor with the numbers of ``inner``, which says that it is elsewhere."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "Tagged":
        made: Tagged = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Return the numbers, which torch gives of its own kinds of tensor alone."""
        return self.inner.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory that holds the numbers, which views share."""
        return self.inner.untyped_storage()


class Devices(TorchDispatchMode):
    """Makes the devices known to everything that a block runs.

    Attributes:
        copied: bytes of each copy from one to another, with the two.
        change: what a copy between devices does to a tensor; nothing, of course.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[torch.device, torch.device, int]] = []
        self.change: Callable[[Tensor], Tensor] = lambda tensor: tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self)


def _run(func: Any, args: Any, kwargs: Any, devices: Devices | None = None) -> Any:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    # Torch lets a number of the host enter any operation.
    of = {each.device for each in given if each.ndim or isinstance(each, Tagged)}
    copies = func in _COPIES
    if len(of) > 1 and not copies:
        shapes = [tuple(each.shape) for each in given]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} has {of}, shapes {shapes}")
    named = kwargs.get("device")
    if named is not None:
        home = torch.device(named)
    elif given:
        home = given[0].device if func is _ATEN.copy_.default or not of else next(iter(of))
    else:
        home = torch.device("cpu")
    if named is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map(lambda each: each.inner if isinstance(each, Tagged) else each, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if copies and devices is not None and len({given[-1].device, home}) == 2 and home.type == given[-1].device.type:
        devices.copied.append((given[-1].device, home, given[-1].nbytes))
        result = devices.change(result)
    known = {id(each.inner): each for each in given if isinstance(each, Tagged)}

    def wrapped(each: Any) -> Any:
        if not isinstance(each, Tensor) or home.type == "cpu":
            return each
        return known[id(each)] if id(each) in known else Tagged(each, home)

    return tree_map(wrapped, result)


@contextmanager
def tagged() -> Iterator[Devices]:
    """Run a block in which there are these devices. Sums are added up on them as on GPUs."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with ExitStack() as changed:
            tables = [parts.BLOCK, parts._SQUARED, parts.SUMS, vocabulary_loss.PIECE_BYTES]
            for table in tables:
                changed.enter_context(patch.dict(table, meta=table["cuda"]))
            # Kernels of Triton read memory of their device.
            changed.enter_context(patch.object(parts, "_has_kernels", lambda device: False))
            yield changed.enter_context(Devices())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class TaggedWords(CpuWords):
    """Words of sums on such a device."""

    def encoded(
        self, total: Sequence[Tensor], mechanism: Mechanism, noise: Secret | None, start: int = 0
    ) -> RingVector:
        (piece,) = total
        # A measurement is summed in the host's memory.
        return super().encoded([piece.inner if isinstance(piece, Tagged) else piece], mechanism, noise, start)


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
