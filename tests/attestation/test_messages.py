import json
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from attestation.keys import IdentityKey
from attestation.messages import Envelope, Message, open_envelope, parse, seal
from metrics.errors import ProtocolError


class Ping(Message):
    DOMAIN: ClassVar[str] = "raycloak/test/ping/v1"

    number: int
    data: bytes
    items: tuple[bytes, ...] = ()


class Pong(Ping):
    DOMAIN: ClassVar[str] = "raycloak/test/pong/v1"


PING = Ping(number=3, data=b"\xff", items=(b"", b"a"))


def test_encoding_is_canonical_and_parses_back() -> None:
    assert PING.encode() == b'{"data":"ff","items":["","61"],"number":3}'
    assert parse(Ping, PING.encode()) == PING


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
        (Ping, Envelope(envelope.body.replace(b"3", b"4"), envelope.signature), key.public),
        (Ping, Envelope(envelope.body, bytes(64)), key.public),
    ]
    for attempt in attempts:
        with pytest.raises(ProtocolError) as refused:
            open_envelope(*attempt)
        assert refused.value.code == "signature"


def test_digests_of_different_types_differ() -> None:
    assert PING.digest() != Pong(**PING.model_dump()).digest()
