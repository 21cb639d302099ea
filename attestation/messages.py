"""Typed messages and the signed envelope they travel in.

A message is a frozen pydantic model; its bytes are canonical JSON with hexadecimal byte strings. A signature covers
``LP(domain, body)``, so a message of one type never verifies as another. The receiver parses only what verified.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from attestation.canonical import canonical_json, digest, length_prefixed
from attestation.keys import IdentityKey, signature_is_valid
from metrics.errors import ProtocolError

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """Base of every message: frozen, unknown fields refused, types strict."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_bytes="hex", val_json_bytes="hex", allow_inf_nan=False
    )
    DOMAIN: ClassVar[str]

    def encode(self) -> bytes:
        """Canonical bytes."""
        # Byte strings become text several times faster on the way to JSON than on the way to objects.
        return canonical_json(from_json(self.model_dump_json()))

    def digest(self) -> bytes:
        """SHA-256 of ``LP(domain, bytes)``."""
        return digest(length_prefixed(self.DOMAIN, self.encode()))


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message's bytes and an Ed25519 signature over ``LP(domain, body)``."""

    body: bytes
    signature: bytes


def parse(cls: type[M], body: bytes) -> M:
    """The message in ``body``; ProtocolError ``malformed`` if it is not one of type ``cls`` in canonical form."""
    try:
        message = cls.model_validate_json(body)
    except ValidationError as error:
        raise ProtocolError("malformed", f"not a {cls.__name__}: {error.error_count()} invalid fields") from None
    if message.encode() != body:
        raise ProtocolError("malformed", f"a {cls.__name__} that is not in canonical form")
    return message


def seal(message: Message, key: IdentityKey) -> Envelope:
    """Sign ``message`` with ``key``."""
    body = message.encode()
    return Envelope(body, key.sign(length_prefixed(message.DOMAIN, body)))


def open_envelope(cls: type[M], envelope: Envelope, public: bytes) -> M:
    """The message, if its signature is ``public``'s; ProtocolError ``signature`` otherwise."""
    if not signature_is_valid(public, length_prefixed(cls.DOMAIN, envelope.body), envelope.signature):
        raise ProtocolError("signature", f"a {cls.__name__} that its signer did not sign")
    return parse(cls, envelope.body)
