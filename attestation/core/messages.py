"""Typed messages and the signed envelope they travel in.

A message is a frozen pydantic model. Its bytes are canonical JSON with hexadecimal byte strings. A signature covers
``LP(domain, body)``, so a message of one type never verifies as another. A receiver parses only verified bytes.

A field may be a record, a frozen dataclass of such fields, which is written and checked like a message. A set is none,
because it has no order.

The rule for a field that is added later: it has a default with today's meaning, and is left out of the bytes where it
has that value (``Field(exclude_if=...)``). So what was written before keeps its bytes, digest and signature, and means
what it meant. A field that cannot be left out, or another meaning of one that is there, is a new domain.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from raycloak.attestation.core.canonical import canonical_json, digest, length_prefixed
from raycloak.attestation.core.keys import IdentityKey, signature_is_valid
from raycloak.metrics.errors import ConfigError, ProtocolError

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """The base of every message: frozen, unknown fields refused, types strict."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_bytes="hex", val_json_bytes="hex", allow_inf_nan=False
    )
    DOMAIN: ClassVar[str]

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        try:
            return _text(self).encode()
        except _NotPlainError:
            return canonical_json(from_json(self.model_dump_json()))

    def digest(self) -> bytes:
        """Return SHA-256 of ``LP(domain, bytes)``."""
        return digest(length_prefixed(self.DOMAIN, self.encode()))


class Envelope(Message):
    """A message's bytes and an Ed25519 signature over ``LP(domain, body)``."""

    DOMAIN: ClassVar[str] = "raycloak/envelope/v1"

    body: bytes
    signature: bytes


def parse(cls: type[M], body: bytes) -> M:
    """Parse ``body``; ProtocolError ``malformed`` if it is not a message of type ``cls`` in canonical form."""
    try:
        message = cls.model_validate_json(body)
    except ValidationError as error:
        raise ProtocolError("malformed", f"not a {cls.__name__}: {error.error_count()} invalid fields") from None
    # A second encoding of one message would have another digest and signature.
    if message.encode() != body:
        raise ProtocolError("malformed", f"a {cls.__name__} that is not in canonical form")
    return message


def parse_stored(cls: type[M], body: bytes, name: str) -> M:
    """Parse a document that outlives the version that wrote it; its class has a field ``format``.

    Args:
        name: the document's, for the message.

    Raises:
        ConfigError: ``former_format`` if ``body`` is of another format, or of none.
        ProtocolError: as :func:`parse`.
    """
    try:
        found = from_json(body)
    except ValueError:
        found = None
    current = cls.model_fields["format"].default
    if found and isinstance(found, dict) and found.get("format") != current:
        stated = f"of format {found['format']}" if "format" in found else "without a format"
        raise ConfigError(
            "former_format",
            f"{name} is a {cls.__name__} {stated}; this version reads format {current}.",
            "Use the version of raycloak that wrote it, or make it again with this one.",
        )
    return parse(cls, body)


def checked(cls: type[M], message: M) -> M:
    """Return ``message`` as its bytes say; errors as :func:`parse`, and those of the class's own rules.

    For a message that came as an object: a pickle, or a copy with changed fields, is not validated.
    """
    return parse(cls, message.encode())


def seal(message: Message, key: IdentityKey) -> Envelope:
    """Sign ``message`` with ``key``."""
    body = message.encode()
    return Envelope(body=body, signature=key.sign(length_prefixed(message.DOMAIN, body)))


def open_envelope(cls: type[M], envelope: Envelope, public: bytes) -> M:
    """Verify that ``public`` signed the message, then parse it; ProtocolError ``signature`` otherwise."""
    if not signature_is_valid(public, length_prefixed(cls.DOMAIN, envelope.body), envelope.signature):
        raise ProtocolError("signature", f"a {cls.__name__} that its signer did not sign")
    return parse(cls, envelope.body)


# Writing a message's few fields one by one is several times faster than sorting a document afterwards. The bytes are
# the same in both ways. A value of any other type makes the message take the slower way.


class _NotPlainError(Exception):
    """An error for a value whose text only pydantic knows."""


def _text(value: Any) -> str:
    return (_WRITERS.get(type(value)) or _writer_of(type(value)))(value)


def _writer_of(kind: type) -> Callable[[Any], str]:
    """Find the writer of a class, once for each class that is written here."""
    # A class that configures or serializes itself may have other bytes.
    if issubclass(kind, Message) and kind.model_config == Message.model_config and not _serializes_itself(kind):
        _WRITERS[kind] = _message_writer(kind)
    elif issubclass(kind, StrEnum):
        _WRITERS[kind] = lambda value: encode_basestring_ascii(value.value)
    else:
        raise _NotPlainError
    return _WRITERS[kind]


def _serializes_itself(kind: type[Message]) -> bool:
    found = kind.__pydantic_decorators__
    leaves_out = any(field.exclude or field.exclude_if for field in kind.model_fields.values())
    return bool(leaves_out or found.field_serializers or found.model_serializers or found.computed_fields)


def _message_writer(kind: type[Message]) -> Callable[[Message], str]:
    named = [(name, f"{encode_basestring_ascii(name)}:") for name in sorted(kind.model_fields)]

    def write(message: Message) -> str:
        values = message.__dict__
        return f"{{{','.join([start + _text(values[name]) for name, start in named])}}}"

    return write


def _list_text(values: tuple[Any, ...] | list[Any]) -> str:
    return f"[{','.join([_text(value) for value in values])}]"


def _object_text(fields: Mapping[Any, Any]) -> str:
    if any(type(name) is not str for name in fields):
        raise _NotPlainError
    return f"{{{','.join([f'{encode_basestring_ascii(name)}:{_text(fields[name])}' for name in sorted(fields)])}}}"


# Keyed by exact type. A float is not among them, because it may stand where an integer was given.
_WRITERS: Final[dict[type, Callable[[Any], str]]] = {
    str: encode_basestring_ascii,
    bytes: lambda value: f'"{value.hex()}"',
    int: int.__repr__,
    bool: lambda value: "true" if value else "false",
    type(None): lambda _: "null",
    tuple: _list_text,
    list: _list_text,
    dict: _object_text,
}
