import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.collateral.encoding import bytes_of, certificate_text, decode, resolve
from raycloak.attestation.core.canonical import read_json

DATA = bytes(range(250, 256)) + b"\x01\x02"
HEX, STANDARD, URL_SAFE = "fafbfcfdfeff0102", "+vv8/f7/AQI=", "-vv8_f7_AQI"


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (DATA, "raw"),
        (HEX.encode(), "hex"),
        (f" 0x{HEX.upper()}\n".encode(), "hex"),
        (f"\ufeff{HEX[:4]}\r\n{HEX[4:]}\n".encode(), "hex"),
        (STANDARD.encode(), "base64"),
        (f"{STANDARD[:5]}\n {STANDARD[5:]}\n".encode(), "base64"),
        (URL_SAFE.encode(), "base64"),
        (json.dumps(HEX).encode(), "json:"),
        (json.dumps(list(DATA)).encode(), "json:"),
        (json.dumps({"a/b": [0, {"~": URL_SAFE}]}).encode(), "json:/a~1b/1/~0"),
        (json.dumps({"": {"0": STANDARD}}).encode(), "json://0"),
    ],
)
def test_every_encoding_gives_the_same_bytes(content: bytes, encoding: str) -> None:
    assert decode(content, encoding) == DATA


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (b"", "hex"),
        (b"abc", "hex"),
        (b"xy", "hex"),
        (b"\xff", "hex"),
        (b"a*==", "base64"),
        (b"a=aa", "base64"),
        (b"a", "base64"),
        (b"{", "json:"),
        (b"[256]", "json:"),
        (b"[true]", "json:"),
        (b"[1.0]", "json:"),
        (b"7", "json:"),
        (b'"abc"', "json:"),
        (b'{"a": "00", "a": "01"}', "json:/a"),
        (b'{"a": "00"}', "json:a"),
        (b'{"a": "00"}', "json:/b"),
        (b'["00"]', "json:/01"),
        (b'["00"]', "json:/-1"),
        (b'["00"]', "json:/1"),
        (b'"00"', "json:/a"),
        (b"[" * 100_000, "json:"),
    ],
)
def test_what_is_not_of_the_stated_form_is_a_value_error(content: bytes, encoding: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode(content, encoding)


def test_an_unknown_encoding_is_named() -> None:
    with pytest.raises(LookupError, match="utf-7"):
        decode(b"", "utf-7")


def test_certificates_in_json_are_text_or_encoded() -> None:
    pem = "-----BEGIN CERTIFICATE-----\nAA==\n"
    assert certificate_text(pem) == pem.encode()
    assert certificate_text(URL_SAFE) == DATA


@given(st.binary(max_size=60), st.sampled_from(["hex", "base64", "json:", "json:/0", "json:/a"]))
def test_any_content_is_decoded_or_a_value_error(content: bytes, encoding: str) -> None:
    try:
        assert isinstance(decode(content, encoding), bytes)
    except ValueError:
        return


@given(st.binary(min_size=1, max_size=60))
def test_bytes_survive_every_json_form(data: bytes) -> None:
    assert bytes_of(list(data)) == bytes_of(data.hex()) == data
    assert resolve(read_json(json.dumps([data.hex()]).encode()), "/0") == data.hex()
