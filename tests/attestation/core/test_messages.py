import json
from enum import StrEnum
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict, Field, JsonValue, ValidationError, field_serializer
from pydantic_core import from_json

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, parse, seal
from raycloak.metrics.errors import ProtocolError


class Ping(Message):
    DOMAIN: ClassVar[str] = "raycloak/test/ping/v1"

    number: int
    data: bytes
    items: tuple[bytes, ...] = ()


class Pong(Ping):
    DOMAIN: ClassVar[str] = "raycloak/test/pong/v1"


class Colour(StrEnum):
    RED = "red"
    UMBER = 'umb"er'


class Compact(Ping):
    """A message that says for itself how byte strings are written."""

    DOMAIN: ClassVar[str] = "raycloak/test/compact/v1"
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class Loud(Ping):
    """A message that says for itself how a field is written."""

    DOMAIN: ClassVar[str] = "raycloak/test/loud/v1"

    @field_serializer("number")
    def louder(self, number: int) -> str:
        return f"{number}!"


class Grown(Ping):
    """A message with a field that it did not always have."""

    DOMAIN: ClassVar[str] = "raycloak/test/ping/v1"

    later: int | None = Field(default=None, exclude_if=lambda value: value is None)


class Parcel(Message):
    """One field of every type that messages have."""

    DOMAIN: ClassVar[str] = "raycloak/test/parcel/v1"

    zone: str
    kind: Literal["a", "b"]
    colour: Colour
    sealed: bool
    weight: float | None
    ping: Ping | None
    pings: tuple[Ping, ...]
    compact: tuple[Compact, ...]
    pairs: tuple[tuple[str, int], ...]
    claims: dict[str, JsonValue]
    numbered: dict[int, bytes]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PINGS = st.builds(Ping, number=st.integers(), data=st.binary(max_size=4), items=st.just((b"", b"\x0a")))
PARCELS = st.builds(
    Parcel,
    zone=TEXT,
    kind=st.sampled_from(["a", "b"]),
    colour=st.sampled_from(Colour),
    sealed=st.booleans(),
    weight=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ping=st.none() | PINGS,
    pings=st.lists(PINGS, max_size=2).map(tuple),
    compact=st.lists(st.builds(Compact, number=st.integers(), data=st.binary()), max_size=1).map(tuple),
    pairs=st.lists(st.tuples(TEXT, st.integers()), max_size=2).map(tuple),
    claims=st.dictionaries(TEXT, JSON, max_size=3),
    numbered=st.dictionaries(st.integers(0, 9), st.binary(max_size=2), max_size=1),
)

PING = Ping(number=3, data=b"\xff", items=(b"", b"a"))


def test_encoding_is_canonical_and_parses_back() -> None:
    assert PING.encode() == b'{"data":"ff","items":["","61"],"number":3}'
    assert parse(Ping, PING.encode()) == PING


def test_a_message_may_write_byte_strings_in_its_own_way() -> None:
    assert Compact(number=1, data=b"\xff").encode() == b'{"data":"_w==","items":[],"number":1}'


def test_a_message_may_write_a_field_in_its_own_way() -> None:
    assert Loud(number=1, data=b"\xff").encode() == b'{"data":"ff","items":[],"number":"1!"}'


@given(PARCELS)
def test_every_message_is_written_as_its_document_with_sorted_keys(parcel: Parcel) -> None:
    assert parcel.encode() == canonical_json(from_json(parcel.model_dump_json()))
    assert parse(Parcel, parcel.encode()) == parcel


@pytest.mark.parametrize(
    "body",
    [
        b'{"items":["","61"],"data":"ff","number":3}',
        b'{"data": "ff","items":[],"number":3}',
        b'{"data":"FF","items":[],"number":3}',
        b'{"data":"ff","items":[],"number":3,"more":1}',
        b'{"data":"ff","data":"ff","items":[],"number":3}',
        b'{"data":"ff","items":[],"number":"3"}',
        b'{"data":"ff","items":[],"number":3.0}',
        b'{"data":"ff","number":3}',
        b"[]",
        b"",
    ],
)
def test_whatever_is_not_canonical_is_malformed(body: bytes) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse(Ping, body)
    assert refused.value.code == "malformed"


@given(st.binary(max_size=60) | st.text().map(json.dumps).map(str.encode))
def test_parse_raises_nothing_but_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(Ping, body)


def test_messages_are_frozen_and_strict() -> None:
    with pytest.raises(ValidationError):
        PING.number = 4
    with pytest.raises(ValidationError):
        Ping(number=True, data=b"")


def test_an_envelope_opens_only_under_its_key_type_and_bytes() -> None:
    key = IdentityKey.generate()
    envelope = seal(PING, key)
    assert open_envelope(Ping, envelope, key.public) == PING
    attempts = [
        (Pong, envelope, key.public),
        (Ping, envelope, IdentityKey.generate().public),
        (Ping, Envelope(body=envelope.body.replace(b"3", b"4"), signature=envelope.signature), key.public),
        (Ping, Envelope(body=envelope.body, signature=bytes(64)), key.public),
    ]
    for attempt in attempts:
        with pytest.raises(ProtocolError) as refused:
            open_envelope(*attempt)
        assert refused.value.code == "signature"


def test_digests_of_different_types_differ() -> None:
    assert PING.digest() != Pong(**PING.model_dump()).digest()


def test_a_field_that_is_left_out_changes_no_byte_of_older_messages():
    old = Ping(number=1, data=b"x")
    grown = parse(Grown, old.encode())
    assert (grown.later, grown.encode(), grown.digest()) == (None, old.encode(), old.digest())
    assert parse(Grown, grown.model_copy(update={"later": 3}).encode()).later == 3
    with pytest.raises(ProtocolError, match="canonical"):
        parse(Grown, b'{"data":"78","items":[],"later":null,"number":1}')
