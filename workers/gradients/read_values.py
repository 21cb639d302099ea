"""The search for a forward pass that reads a value of its examples into Python.

A branch, a loop's length or a number that Python computes with may then follow from one example and steer what is
computed for all of them. No synthetic batch shows a branch that it does not take, so the reading itself is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raycloak.workers.gradients.tensor_table import TensorTable

_OUTSIDE = frozenset(
    (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__, Tensor.__format__)
)
"""Ways out of torch that read memory, and not by an operation that modes see."""

_MASKS = (torch.bool, torch.uint8)


class ReadValues:
    """Follows what depends on rows through a forward pass, and finds where Python gets a value of it.

    Guarantee: a value of a tensor that torch's operations computed from ``rows`` is found where Python gets it as a
    number, a truth value, a text, a list or an array, and where it decides the size of another tensor. Other sizes,
    types and the like are no values.

    Not seen: what leaves torch by a pointer or to another thread, and tensors that come back from outside.

    Args:
        rows: the batch.

    Attributes:
        found: name of the first operation that gave Python such a value; None if there was none.
    """

    def __init__(self, rows: Tensor) -> None:
        self.found: str | None = None
        self._followed = TensorTable[bool]()
        self._operations = _Operations(self)
        self._followed[rows] = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the operations of this block."""
        with self._operations, _SeenCalls(self):
            yield

    def called(self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run one call of torch by Python."""
        self._operations.reads = 0
        output, follows = self.run(function, args, named)
        gives = any(isinstance(each, bool | int | float | complex | str) for each in tree_leaves(output))
        slices = [each for each in tree_leaves((args, named)) if isinstance(each, slice)]
        # Torch reads the ends of a slice before any mode sees it.
        cuts = self.follows([end for each in slices for end in (each.start, each.stop, each.step)])
        if cuts or (follows and (function in _OUTSIDE or (gives and self._operations.reads))):
            self.find(function)
        return output

    def find(self, function: Callable[..., Any]) -> None:
        """Take note of an operation that shows a value, if it is the first."""
        if self.found is None:
            self.found = getattr(function, "__name__", type(function).__name__)

    def run(self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> tuple[Any, bool]:
        """Run one operation; return its output, and whether it met a tensor that depends on rows."""
        given = [each for each in tree_leaves((args, named)) if isinstance(each, Tensor)]
        follows = self.follows(given)
        output = function(*args, **named)
        if follows:
            # An operation in place writes to its first tensor. More than that is followed now and then, and never less.
            for each in (*tree_leaves(output), *given[:1]):
                if isinstance(each, Tensor):
                    self._followed[each] = True
        return output, follows

    def follows(self, given: Sequence[Any]) -> bool:
        """Return whether one of these depends on rows."""
        return any(each in self._followed for each in given)


class _SeenCalls(TorchFunctionMode):
    """Sees what Python calls, and what it gets: a number is no tensor, so no operation below shows it."""

    def __init__(self, values: ReadValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._values.called(func, args, dict(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations below, also under vmap, and counts those whose result depends on what a tensor holds.

    Torch itself marks these.
    """

    def __init__(self, values: ReadValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values
        self.reads: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch loads its compiler here, a second of processor time in every worker."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output, follows = self._values.run(func, args, dict(kwargs or {}))
        self.reads += follows and torch.Tag.data_dependent_output in func.tags
        if torch.Tag.dynamic_output_shape in func.tags and self._picks(func, args):
            self._values.find(func)
        return output

    def _picks(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an output's size depends on what is followed; that of an index does by its masks alone."""
        if function is not torch.ops.aten.index.Tensor:
            return self._values.follows(args)
        return self._values.follows([each for each in args[1] if each is not None and each.dtype in _MASKS])
