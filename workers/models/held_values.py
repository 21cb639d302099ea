"""The values that a model or a loss holds beside its code: tensors, arrays, numbers and texts that its code can reach.

A tensor in a list, a NumPy array or a table at the top of the user's file affects a gradient as much as a registered
buffer does. So one walk finds them all, for the digests that keys depend on and for the check that a forward pass keeps
no state.

The walk follows layers, attributes, containers, closures, bound arguments, and the globals that the user's own code
names. Code is user code unless it is raycloak's or lies in an installed package. It does not see inside compiled
objects such as a tokenizer, nor what code reads from a file as it runs.
"""

import argparse
import functools
import os
import sys
import sysconfig
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

LOSS = "loss"
"""The owner of all that belongs to the loss."""

# Keyed by numbers that count all hooks of a process.
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
# What torch keeps in every layer decides nothing about a forward pass, but for these hooks and the mode.
_TORCHS_OWN = set(vars(nn.Module())) - {"training"}
# Most values are of these; asking for their exact type is the fastest way through a large model.
_COMMON = {bool, int, float, str, type(None)}
_PLAIN = (str, bytes, bytearray, Number, range, slice, type(None), type(...), torch.dtype, torch.device, torch.layout)
_DICTS = (dict, UserDict, types.MappingProxyType)
_LISTS = (list, tuple, deque, UserList, set, frozenset)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
# A node's own folders are no content, and no table hides in a text as short as a path.
_LONGEST_PATH = 4096


class HeldValue(NamedTuple):
    """One value.

    Attributes:
        owner: name of the layer that holds it, empty for the model itself; ``LOSS`` for the loss.
        name: a path to it, such as ``encoder.rows[0]``.
        value: a tensor, an array, or the text of a plain value or a reference.
        trained: whether it is a parameter of the model that the run changes.
    """

    owner: str
    name: str
    value: Tensor | NDArray[Any] | str
    trained: bool = False


View = Callable[[], Iterable[object]]
"""The values that one object holds directly, as they are now."""


def held_values(
    module: nn.Module, loss_fn: Callable[..., Any] | None = None, views: list[View] | None = None
) -> Iterator[HeldValue]:
    """Yield all that ``module`` holds, then all that ``loss_fn`` holds beside it.

    Parameters come first, then buffers, both in the model's order; every tensor and array comes once.

    Args:
        views: gets a view of each object that the walk went through. As long as all views give the very same objects,
            another walk would meet the same tensors, arrays and plain values.
    """
    walk = _Walk([] if views is None else views)
    yield from _flat(walk.module("", module, trains=True))
    if loss_fn is not None:
        yield from _flat(iter([walk.value(LOSS, LOSS, loss_fn, plain=True)]))


# Of values, and of further such steps: mypy has no finite type for it.
_Steps: TypeAlias = Iterator[Any]


def _flat(steps: _Steps) -> Iterator[HeldValue]:
    """Yield all values in order; Python's own stack would be too small for a long list of linked objects."""
    waiting = [steps]
    while waiting:
        step = next(waiting[-1], None)
        if step is None:
            waiting.pop()
        elif isinstance(step, HeldValue):
            yield step
        else:
            waiting.append(step)


class _Walk:
    """One walk; it meets each object once, so a cycle ends it."""

    def __init__(self, views: list[View]) -> None:
        self._views = views
        # With the objects, which an id names only as long as they live.
        self._seen: dict[int, tuple[str, object]] = {}

    def module(self, prefix: str, module: nn.Module, trains: bool = False, owner: str | None = None) -> _Steps:
        """Yield the values that the layers of ``module`` hold; each layer owns its values unless ``owner`` is given."""
        layers = [(name, layer) for name, layer in module.named_modules(prefix=prefix) if self._is_new(name, layer)]
        # Before any attribute: one that is a registered tensor is a reference to it.
        for registered in (module.named_parameters(prefix=prefix), module.named_buffers(prefix=prefix)):
            for name, tensor in registered:
                if self._is_new(name, tensor):
                    trained = trains and isinstance(tensor, nn.Parameter) and tensor.requires_grad
                    yield HeldValue(name.rpartition(".")[0] if owner is None else owner, name, tensor, trained)
        for name, layer in layers:
            yield self._layer(name if owner is None else owner, name, layer)

    def _layer(self, owner: str, name: str, layer: nn.Module) -> _Steps:
        # The dictionaries that torch keeps in a layer, and the layer's own.
        for held in (vars(layer), *(each for each in vars(layer).values() if type(each) in (dict, OrderedDict))):
            self._views.append(held.values)
        for attribute, value in sorted(vars(layer).items()):
            if attribute in _HOOKS and value:
                yield self.value(owner, _path(name, attribute), list(value.values()), plain=True)
            elif attribute not in _TORCHS_OWN:
                yield self.value(owner, _path(name, attribute), value, plain=True)
        yield self._class(owner, type(layer))

    def value(self, owner: str, name: str, value: object, plain: bool) -> "HeldValue | _Steps":
        """Return ``value``, or the steps to what it holds.

        Args:
            plain: whether numbers, texts and references count; in an object of an installed package they do not, since
                such objects count calls and hold locks.
        """
        if type(value) in _COMMON:
            return HeldValue(owner, name, _text_of(value)) if plain else iter(())
        return self._value(owner, name, value, plain)

    def _value(self, owner: str, name: str, value: object, plain: bool) -> _Steps:
        if isinstance(value, (*_PLAIN, np.generic)):
            yield self._text(owner, name, _text_of(value), plain)
        elif isinstance(value, tuple | frozenset):
            yield self._items(owner, name, value, plain)
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            yield self._text(owner, name, value.__qualname__, plain)
            yield self._code(owner, name, value)
        elif id(value) in self._seen:
            yield self._text(owner, name, f"is {self._seen[id(value)][0]}", plain)
        elif isinstance(value, nn.Module):
            yield self.module(name, value, owner=owner)
        else:
            self._seen[id(value)] = (name, value)
            yield self._content(owner, name, value, plain)

    def _content(self, owner: str, name: str, value: object, plain: bool) -> _Steps:
        if isinstance(value, np.ndarray) and value.dtype == object:
            self._views.append(value.ravel().tolist)
            yield self._items(owner, name, value.ravel().tolist(), plain)
        elif isinstance(value, Tensor | np.ndarray):
            yield HeldValue(owner, name, value)
        elif isinstance(value, (*_LISTS, *_DICTS)):
            yield self._items(owner, name, value, plain)
        elif hasattr(type(value), "__array__"):
            yield HeldValue(owner, name, np.asarray(value))
        else:
            yield self._object(owner, name, value, plain)

    def _text(self, owner: str, name: str, text: str, plain: bool) -> _Steps:
        if plain:
            yield HeldValue(owner, name, text)

    def _items(self, owner: str, name: str, container: Any, plain: bool) -> _Steps:
        yield self._text(owner, name, f"{type(container).__qualname__} of {len(container)}", plain)
        self._views.append(container.values if isinstance(container, _DICTS) else container.__iter__)
        if isinstance(container, _DICTS):
            self._views.append(container.keys)
            for index, (key, value) in enumerate(container.items()):
                if isinstance(key, _PLAIN):
                    yield self.value(owner, f"{name}[{_text_of(key)}]", value, plain)
                else:
                    yield self.value(owner, f"{name}.keys[{index}]", key, plain)
                    yield self.value(owner, f"{name}[{index}]", value, plain)
            return
        # The order of a set differs from process to process.
        items = sorted(container, key=_set_order) if isinstance(container, set | frozenset) else container
        for index, value in enumerate(items):
            yield self.value(owner, f"{name}[{index}]", value, plain)

    def _object(self, owner: str, name: str, value: Any, plain: bool) -> _Steps:
        kind = type(value)
        users = _is_users(kind.__module__) or isinstance(value, _NAMESPACES)
        yield self._text(owner, name, kind.__qualname__, plain)
        if isinstance(value, functools.partial):
            yield self._items(owner, name, (value.func, value.args, value.keywords), plain)
        elif isinstance(value, types.MethodType):
            yield self._items(owner, name, (value.__self__, value.__func__), plain)
        elif users or not (_is_of_python(kind.__module__) or _is_raycloaks(kind.__module__)):
            self._views.append(lambda: (held for _, held in _attributes(value)))
            for attribute, held in _attributes(value):
                yield self.value(owner, f"{name}.{attribute}", held, plain and users)
            yield self._class(owner, kind)
        else:
            # A property, a class method, a function with a cache.
            for wrapped in ("fget", "fset", "func", "__wrapped__"):
                yield self._code(owner, name, getattr(value, wrapped, None))

    def _class(self, owner: str, kind: type) -> _Steps:
        for each in kind.__mro__:
            if _is_users(each.__module__) and self._is_new(each.__qualname__, each):
                self._views.append(vars(each).values)
                for attribute, value in sorted(vars(each).items()):
                    # What only __init__ reads is in attributes by now.
                    if not _is_dunder(attribute):
                        yield self.value(owner, f"{each.__qualname__}.{attribute}", value, plain=True)
                    elif attribute != "__init__":
                        yield self._code(owner, f"{each.__qualname__}.{attribute}", value)

    def _code(self, owner: str, name: str, code: Any) -> _Steps:
        """Yield what the user's own function or class holds, and the globals that it names."""
        if isinstance(code, type):
            yield self._class(owner, code)
        if (
            not isinstance(code, types.FunctionType)
            or not _is_users(code.__module__ or "")
            or not self._is_new(name, code)
        ):
            return
        for cell_name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
            yield self.value(owner, f"{name}:{cell_name}", _content_of(cell), plain=True)
        for index, default in enumerate(code.__defaults__ or ()):
            yield self.value(owner, f"{name}:default {index}", default, plain=True)
        for key, held in sorted({**(code.__kwdefaults__ or {}), **vars(code)}.items()):
            yield self.value(owner, f"{name}:{key}", held, plain=True)
        names = sorted(_names_in(code.__code__))
        self._views.append(lambda: _held_by_function(code, names))
        for each in names:
            if each in code.__globals__ and not _is_dunder(each):
                yield self._global(owner, f"{name}:{each}", code.__globals__[each], names)

    def _global(self, owner: str, name: str, value: object, names: list[str]) -> _Steps:
        if not isinstance(value, types.ModuleType):
            yield self.value(owner, name, value, plain=True)
        elif _is_users(value.__name__):
            self._views.append(lambda: (vars(value).get(each) for each in names))
            for each in names:
                if each in vars(value) and not _is_dunder(each):
                    yield self._global(owner, f"{name}.{each}", vars(value)[each], [])

    def _is_new(self, name: str, value: object) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = (name, value)
        return True


def _path(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


def _text_of(value: object) -> str:
    if isinstance(value, str) and value[:1] == os.sep and len(value) <= _LONGEST_PATH:
        return "an absolute path"
    return repr(value)


def _set_order(value: object) -> tuple[str, str]:
    return type(value).__qualname__, repr(value) if isinstance(value, _PLAIN) else ""


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        yield from ((each, getattr(value, each)) for each in names if not _is_dunder(each) and hasattr(value, each))
    yield from sorted(getattr(value, "__dict__", {}).items(), key=lambda item: str(item[0]))


def _content_of(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # of a name that is not bound yet


def _held_by_function(code: types.FunctionType, names: list[str]) -> Iterator[object]:
    yield from map(_content_of, code.__closure__ or ())
    yield from (code.__defaults__, *vars(code).values(), *(code.__kwdefaults__ or {}).values())
    yield from map(code.__globals__.get, names)


def _names_in(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_of_python(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _is_raycloaks(module: str) -> bool:
    return module.partition(".")[0] == "raycloak"


def _is_users(module: str) -> bool:
    """Return whether the module of that name is the user's own, and neither raycloak's nor installed."""
    if _is_of_python(module) or _is_raycloaks(module):
        return False
    # The file of a worker's main program is Ray's, while its classes came from a driver's.
    return module == "__main__" or _is_users_file(getattr(sys.modules.get(module), "__file__", None))


@functools.cache
def _is_users_file(file: str | None) -> bool:
    # Code that a driver sent as it was has none.
    if file is None:
        return True
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        return False
    return not Path(file).is_relative_to(sysconfig.get_path("stdlib"))
