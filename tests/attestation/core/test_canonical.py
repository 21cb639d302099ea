import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.core.canonical import canonical_json, digest, length_prefixed

FIELDS = st.lists(st.binary(max_size=6), max_size=4)


@given(FIELDS, FIELDS, st.sampled_from(["a", "ab"]), st.sampled_from(["a", "ab"]))
def test_length_prefixed_is_injective(left: list[bytes], right: list[bytes], label: str, other: str) -> None:
    same = (label, left) == (other, right)
    assert (length_prefixed(label, *left) == length_prefixed(other, *right)) == same


def test_length_prefixed_has_the_documented_layout() -> None:
    encoded = length_prefixed("x", "é", 258, b"")
    assert encoded == bytes.fromhex("00000001 78 00000002 c3a9 00000008 0000000000000102 00000000")


@pytest.mark.parametrize("value", [-1, 2**64])
def test_integers_outside_u64_are_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        length_prefixed("x", value)


def test_digest_is_sha256() -> None:
    assert digest(b"abc") == hashlib.sha256(b"abc").digest()
    assert digest(memoryview(b"abc")) == digest(b"abc")


def test_canonical_json_is_sorted_ascii_without_space() -> None:
    assert canonical_json({"b": 1, "a": ["é", None]}) == b'{"a":["\\u00e9",null],"b":1}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_canonical_json_refuses_what_json_does_not_have(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": value})
