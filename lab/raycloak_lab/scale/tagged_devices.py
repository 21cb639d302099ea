"""Several devices on a machine that has none: a tensor says where it is, and its numbers are in the host's memory.

An operation whose operands say two devices is refused, forward, backward or computed again. Only a copy passes. So the
product's own code for several GPUs runs here, but for their kernels, streams and threads. With memory on ``meta`` there
are no numbers, only shapes: a model of any size then runs in the time that Python takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ATEN: Any = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)


_DATA: Any = Tensor.data


def devices(count: int) -> list[torch.device]:
    """Return the first devices. Torch lets anybody say ``meta``, and has no kernel or thread for it."""
    return [torch.device("meta", index) for index in range(count)]


class Tagged(Tensor):
    """A tensor with the numbers of ``numbers``, which says that it is elsewhere."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Self], numbers: Tensor, device: torch.device) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Return the numbers, which torch gives of its own kinds of tensor alone."""
        return self.numbers.tolist()

    @property
    def data(self) -> Tensor:
        """The numbers without a graph."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, Tagged), "the tag stays"
        _DATA.__set__(self, other)
        self.numbers = other.numbers

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory that holds the numbers, which views share."""
        return self.numbers.untyped_storage()


class Devices(TorchDispatchMode):
    """Makes the devices known to everything that a block runs.

    Args:
        memory: of the tensors' numbers; none on ``meta``.

    Attributes:
        copied: bytes of each copy from one to another, with the two.
        change: what a copy between devices does to a tensor; nothing, of course.
    """

    def __init__(self, memory: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = torch.device(memory)
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
        inside = [each.numbers.device for each in given if isinstance(each, Tagged)]
        there = inside[0] if inside else devices.memory if devices else home
        kwargs = {**kwargs, "device": torch.device("cpu") if home.type == "cpu" else there}
    inner_args, inner_kwargs = tree_map(lambda each: each.numbers if isinstance(each, Tagged) else each, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if copies and devices is not None and len({given[-1].device, home}) == 2 and home.type == given[-1].device.type:
        devices.copied.append((given[-1].device, home, given[-1].nbytes))
        result = devices.change(result)
    known = {id(each.numbers): each for each in given if isinstance(each, Tagged)}

    def wrapped(each: Any) -> Any:
        if not isinstance(each, Tensor) or home.type == "cpu":
            return each
        return known[id(each)] if id(each) in known else Tagged(each, home)

    return tree_map(wrapped, result)


@contextmanager
def tagged(memory: str = "cpu") -> Iterator[Devices]:
    """Run a block in which there are these devices. Sums are added up on them as on GPUs.

    Args:
        memory: ``cpu``, or ``meta`` for shapes without numbers.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Devices(memory) as devices:
            yield devices
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
