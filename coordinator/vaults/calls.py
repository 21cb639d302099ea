"""Calls of actors and their answers as canonical messages: an actor system carries bytes and arrays, and nothing else.

    call      one message of a method's plain arguments, then each message, array and optimizer state among them
    answer    one message; where there are arrays or states, each value by itself
    refusal   the message of a RaycloakError, in the one exception that an actor raises

A reference may stand for what travels by itself, while it is on its way or where it is put once for several calls.

The message of a call is made of the method's signature, which alone says what may arrive. So a signature has messages,
arrays, and plain values and records as `raycloak.attestation.core.messages` allows them.

Guarantee: a receiver gets what the signature says or nothing. It unpickles no object and ignores no field, and each
value has one encoding (ProtocolError ``malformed``).
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray
from pydantic import create_model

from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.processes.failure import Failed
from raycloak.metrics.errors import ProtocolError, RaycloakError

M = TypeVar("M", bound=Message)
T_co = TypeVar("T_co", covariant=True)

_Array = NDArray[Any]
# Of an optimizer: arrays by name.
_State = Mapping[str, np.ndarray]

# No objects, which NumPy itself would pickle.
_NUMBERS: Final = "biuf"


class Reference(Generic[T_co]):
    """An answer that may still be on its way, or a value that was put into the backend.

    This is only a type. Each backend hands out objects of its own, and only its ``fetch`` looks into them.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Form:
    """The way in which values of one type travel by themselves.

    Attributes:
        write: returns bytes, an array, or a tuple of these.
        read: returns the value; ProtocolError ``malformed`` if it is none of the type.
    """

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _read_array(frame: Any) -> _Array:
    if type(frame) is not np.ndarray or frame.dtype.kind not in _NUMBERS:
        raise ProtocolError("malformed", "not an array of numbers")
    return frame


def _write_array(value: Any) -> _Array:
    """Return a read-only view, so that the caller's own array stays writable."""
    view = _read_array(value).view()
    view.flags.writeable = False
    return view


class _StateNames(Message):
    """The names of a state's arrays, in their order."""

    DOMAIN: ClassVar[str] = "raycloak/state-names/v1"

    names: tuple[str, ...]


def _read_state(frame: Any) -> _State:
    if not isinstance(frame, tuple) or not frame:
        raise ProtocolError("malformed", "not a state")
    names, arrays = _parsed(_StateNames, frame[0]).names, frame[1:]
    if len(set(names)) != len(arrays) or len(names) != len(arrays):
        raise ProtocolError("malformed", f"a state of {len(arrays)} arrays has {len(names)} names")
    return dict(zip(names, map(_read_array, arrays), strict=True))


ARRAYS: Final = Form(_write_array, _read_array)
"""Arrays of numbers; who gets one may only read it."""
STATES: Final = Form(
    lambda state: (_StateNames(names=tuple(state)).encode(), *map(_write_array, state.values())), _read_state
)
"""States: the message of their names, and an array for each."""


def _messages(cls: type[Message]) -> Form:
    return Form(lambda message: message.encode(), partial(_parsed, cls))


def form_of_value(value: Any) -> Form:
    """Return the form of a value that a caller puts into a backend: a message, an array or a state."""
    if isinstance(value, Message):
        return _messages(type(value))
    return ARRAYS if isinstance(value, np.ndarray) else STATES


def _parsed(cls: type[M], frame: Any) -> M:
    if type(frame) is not bytes:
        raise ProtocolError("malformed", f"not the bytes of a {cls.__name__}")
    return parse(cls, frame)


def _form(kind: Any, name: str) -> Form:
    if _is_array(kind):
        return ARRAYS
    if kind == _State:
        return STATES
    if _is_message(kind):
        return _messages(kind)
    cls = _message(name, {"value": kind})
    return Form(
        lambda value: cls.model_validate({"value": value}).encode(), lambda frame: _parsed(cls, frame).__dict__["value"]
    )


def _is_array(kind: Any) -> bool:
    # From NumPy 2.5 on, NDArray is a named alias, which no reading of hints resolves.
    kind = getattr(get_origin(kind) or kind, "__value__", kind)
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_array, get_args(kind)))
    return np.ndarray in (kind, get_origin(kind))


def _is_message(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Message)


def _is_large(kind: Any) -> bool:
    return _is_array(kind) or kind == _State


def _message(name: str, fields: Mapping[str, Any]) -> type[Message]:
    given: dict[str, Any] = {field: (kind, ...) for field, kind in fields.items()}
    made = create_model(name, __base__=Message, **given)
    made.DOMAIN = f"raycloak/{name}/v1"
    return made


@dataclass(frozen=True, slots=True)
class Wire:
    """A method's calls and answers, as they travel.

    Attributes:
        signature: without ``self``.
        arguments: the message of all arguments that do not travel by themselves.
        forms: by parameter, of each that does; the last parameter may stand for several.
        answers: of each return value; the last stands for all further ones.
    """

    signature: inspect.Signature
    arguments: type[Message]
    forms: Mapping[str, Form]
    answers: tuple[Form, ...]

    @staticmethod
    @cache
    def of(method: Callable[..., Any]) -> "Wire":
        """Read the signature of a function of an actor's class or protocol, once for each."""
        plain = inspect.unwrap(method)
        signature, hints = inspect.signature(plain), _hints(plain)
        # Ray adds a parameter to the methods of a class that it makes actors of.
        _, *parameters = (each for each in signature.parameters.values() if not each.name.startswith("_ray_"))
        fields, forms = {}, {}
        for each in parameters:
            kind, name = hints[each.name], f"{method.__name__}.{each.name}"
            if _is_large(kind) or _is_message(kind):
                forms[each.name] = _form(kind, name)
            else:
                many = each.kind is inspect.Parameter.VAR_POSITIONAL
                fields[each.name] = tuple[kind, ...] if many else kind  # type: ignore[valid-type]
        arguments = _message(method.__name__, fields)
        answers = tuple(_form(kind, f"{method.__name__}.answer") for kind in _returned(hints["return"]))
        return Wire(signature.replace(parameters=parameters), arguments, forms, answers)

    def positional(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a call's arguments in the order of the method's parameters, defaults included."""
        bound = self.signature.bind(*args, **keywords)
        bound.apply_defaults()
        return bound.args

    def write_call(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return what travels of a call: references of ``args`` as they are, and the rest written.

        Args:
            args: as :meth:`positional` returns them.
        """
        bound = self.signature.bind(*args)
        bound.apply_defaults()
        values = bound.arguments
        own = {name: values[name] for name in self.arguments.model_fields}
        frames: list[Any] = [self.arguments.model_validate(own).encode()]
        for name, form in self.forms.items():
            given = values[name] if self._is_many(name) else (values[name],)
            frames += [each if isinstance(each, Reference) else form.write(each) for each in given]
        return tuple(frames)

    def read_call(self, frames: Sequence[Any]) -> list[Any]:
        """Return the arguments of a call in the method's order; ProtocolError ``malformed``."""
        if not frames:
            raise ProtocolError("malformed", "a call without a message")
        values, rest = dict(_parsed(self.arguments, frames[0]).__dict__), list(frames[1:])
        for name, form in self.forms.items():
            if not self._is_many(name) and not rest:
                raise ProtocolError("malformed", f"a call without {name}")
            taken, rest = (rest, []) if self._is_many(name) else (rest[:1], rest[1:])
            read = [form.read(each) for each in taken]
            values[name] = read if self._is_many(name) else read[0]
        if rest:
            raise ProtocolError("malformed", "a call with more than its method takes")
        args: list[Any] = []
        for name in self.signature.parameters:
            args += values[name] if self._is_many(name) else [values[name]]
        return args

    def write_answer(self, value: Any, returns: int) -> tuple[Any, ...]:
        """Return what travels of an answer: one frame for each of ``returns`` values."""
        values = (value,) if returns == 1 else value
        return tuple(self._answer(index).write(each) for index, each in enumerate(values))

    def read_answer(self, index: int, frame: Any) -> Any:
        """Return one value of an answer; ProtocolError ``malformed``."""
        return self._answer(index).read(frame)

    def _answer(self, index: int) -> Form:
        return self.answers[min(index, len(self.answers) - 1)]

    def _is_many(self, name: str) -> bool:
        return self.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL


def _returned(kind: Any) -> tuple[Any, ...]:
    """Return the types of the values that travel one by one; a plain tuple is one value."""
    if get_origin(kind) is not tuple:
        return (kind,)
    # The dots of a tuple of any length: its one type stands for all values.
    given = [each for each in get_args(kind) if each is not Ellipsis]
    parts = tuple(get_args(each)[0] if get_origin(each) in (tuple, Unpack) else each for each in given)
    parts = tuple(get_args(each)[0] if get_origin(each) is tuple else each for each in parts)
    return parts if any(map(_is_large, parts)) else (kind,)


def _hints(plain: Callable[..., Any]) -> dict[str, Any]:
    # A protocol names types that its module does not import, because they bring torch.
    late: Mapping[str, str] = getattr(sys.modules[plain.__module__], "LATE", {})
    used = set(re.findall(r"\w+", " ".join(map(str, plain.__annotations__.values()))))
    names = {name: getattr(import_module(module), name) for name, module in late.items() if name in used}
    return get_type_hints(plain, localns=names)


class ActorRefusal(Exception):
    """The exception by which an actor refuses; its one argument is an encoded
    `raycloak.attestation.processes.failure.Failed`."""


class Receiver:
    """The side of an actor that calls arrive at: an actor system calls this one method."""

    def receive(self, name: str, returns: int, *frames: Any) -> Any:
        """Answer one call.

        Raises:
            ActorRefusal: the method refuses, or the call is none of the actor's.
        """
        try:
            method = getattr(type(self), name, None)
            if name.startswith("_") or not inspect.isfunction(method) or method is Receiver.receive:
                raise ProtocolError("malformed", f"there is no method {name[:40]!r}")
            wire = Wire.of(method)
            answered = wire.write_answer(getattr(self, name)(*wire.read_call(frames)), returns)
        except RaycloakError as error:
            # Without its cause: an actor system would send the text of that too.
            raise ActorRefusal(Failed.of(error).encode()) from None
        return answered[0] if returns == 1 else answered
