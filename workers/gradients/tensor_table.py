"""Values by tensor: a tensor is known by its identity, which another one gets once it is gone."""

import weakref
from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


class TensorTable(Generic[V]):
    """A dictionary of tensors by identity that holds none of them, and forgets each with its end.

    torch's own `WeakIdKeyDictionary` makes two objects for each look, and a look comes with each operation of a model.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Tensor], V]] = {}

    def __setitem__(self, tensor: Tensor, value: V) -> None:
        number = id(tensor)
        self._values[number] = weakref.ref(tensor, lambda gone: self._forget(number, gone)), value

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._values

    def get(self, tensor: Tensor) -> V | None:
        """Return the value of ``tensor``; None if it has none."""
        found = self._values.get(id(tensor))
        return None if found is None else found[1]

    def _forget(self, number: int, gone: "weakref.ref[Tensor]") -> None:
        found = self._values.get(number)
        if found is not None and found[0] is gone:
            del self._values[number]
