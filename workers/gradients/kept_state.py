"""The check that a forward pass and a loss keep nothing: what a model holds is the same afterwards.

A model may remember an example in a buffer, a list or a Python number. That example then changes the gradients of all
later ones, and clipping each gradient would bound nothing.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.models.held_values import LOSS, HeldValue, View, held_values
from raycloak.workers.models.models import content_hash, dtype_name

_COPIED_BYTES = 2**22
"""Largest tensor that is compared bit by bit. Every probe of a model would else read a frozen base whole."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the integers that it is compared as."""


class KeptState:
    """A record of the state of a model and a loss at one moment, to be compared with a later one.

    Guarantee: :meth:`check` refuses an array or plain value that differs, a tensor that is another object, and a tensor
    that an operation wrote to. Only a write past torch's own count of writes escapes it, where there is no copy.

    Args:
        copies: whether tensors of up to 4 MiB are also compared bit by bit, for which each is copied.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any], copies: bool = False) -> None:
        self._module, self._loss_fn = module, loss_fn
        self._views: list[View] = []
        self._before = {held.name: _Moment(held, copies) for held in held_values(module, loss_fn, self._views)}
        self._met = self._objects()
        # Plain values are fixed: other ones are other objects.
        self._written = [each for each in self._before.values() if not isinstance(each.held.value, str)]

    def parameters_set(self) -> None:
        """Take what the trained parameters hold now for what they held before."""
        for moment in self._before.values():
            moment.set_if_trained()

    def check(self) -> None:
        """Require that nothing has changed.

        Raises:
            ModelError: ``buffer_update``, or ``mixing_loss`` for what the loss holds; the value is named.
        """
        # As long as everything holds the very same objects, only tensors and arrays can have other content.
        now = self._objects()
        if len(now) == len(self._met) and all(map(operator.is_, now, self._met)):
            for moment in self._written:
                if not moment.is_still(moment.held):
                    _refuse(moment.held)
            return
        found = {held.name: held for held in held_values(self._module, self._loss_fn)}
        for name, held in found.items():
            if name not in self._before or not self._before[name].is_still(held):
                _refuse(held)
        for name, moment in self._before.items():
            if name not in found:
                _refuse(moment.held)

    def _objects(self) -> list[object]:
        """Return what each view holds, and after it the view, which tells where it ends."""
        found = list[object]()
        for view in self._views:
            found.extend(view())
            found.append(view)
        return found


class _Moment:
    """One value as it was."""

    def __init__(self, held: HeldValue, copies: bool) -> None:
        self.held = held
        self._version = _version(held.value) if isinstance(held.value, Tensor) else 0
        self._copy: object = None
        if not isinstance(held.value, Tensor):
            self._copy = _fixed(held)
        elif copies and held.value.nbytes <= _COPIED_BYTES:
            self._copy = held.value.detach().clone()

    def set_if_trained(self) -> None:
        if self.held.trained and isinstance(self.held.value, Tensor):
            self._version = _version(self.held.value)

    def is_still(self, held: HeldValue) -> bool:
        if isinstance(held.value, str):
            return held.value == self.held.value
        if not isinstance(held.value, Tensor):
            return self._copy == _fixed(held)
        if held.value is not self.held.value or _version(held.value) != self._version:
            return False
        if not isinstance(self._copy, Tensor):
            return True
        # As integers: a NaN does not equal itself. Bytes would take four times as long as whole numbers.
        whole = _INTEGERS.get(self._copy.element_size(), torch.uint8)
        # A streamed one may have been on the host.
        here = held.value.detach().to(self._copy.device)
        before, now = (each.contiguous().reshape(-1).view(whole) for each in (self._copy, here))
        return self._copy.shape == held.value.shape and torch.equal(before, now)


def _fixed(held: HeldValue) -> object:
    """Return what an array or a plain value is compared by; NumPy counts no writes."""
    if isinstance(held.value, str | Tensor):
        return held.value
    return dtype_name(held.value), held.value.shape, content_hash(held.value)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _refuse(held: HeldValue) -> None:
    if held.owner == LOSS:
        raise ModelError(
            "mixing_loss",
            f"a call of the loss changes '{held.name}', so one example could change the loss of the next.",
            "Compute one number per example from its own output and label, and keep nothing.",
        )
    raise ModelError(
        "buffer_update",
        f"a forward pass changes '{held.name}', so one example could change the gradients of others.",
        "Keep nothing from one forward pass to the next: no running statistics, counters, caches or last outputs.",
    )
