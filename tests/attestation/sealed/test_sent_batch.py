"""Sent batches: what opens them, and what a step takes."""

import io
from typing import Any

import pytest

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.sealed.sent_batch import SentBatch, SentHead, head_of, require_step, seal_sent
from raycloak.metrics.errors import ProtocolError

V = 4
ROW = 24
OF_STEP: dict[str, Any] = {
    "run_id": "run",
    "manifest_digest": b"m" * 32,
    "step": 3,
    "epoch": 1,
    "virtual_workers": V,
    "row_bytes": ROW,
}


def key(v: int) -> Secret:
    return Secret(bytes([v]) * 32)


def hashes(*ids: int) -> bytes:
    return b"".join(i.to_bytes(16, "big") for i in ids)


def head(count: int = 6, salt: bytes = b"s" * 32, **changes: Any) -> SentHead:
    fields = {**OF_STEP, "client_id": "c", "number": 0, "first": 0, "hashes": hashes(*range(count)), "salt": salt}
    return SentHead(**fields | changes)


def rows(count: int) -> list[bytes]:
    return [bytes([65 + i]) * ROW for i in range(count)]


def sealed(of: SentHead) -> bytes:
    return seal_sent(of, rows(of.examples), key)


def code(*contents: bytes, **changes: Any) -> str | None:
    """Return why batches are not those of a step; None if they are."""
    try:
        require_step([SentBatch.read(each) for each in contents], **{**OF_STEP, "places": 10} | changes)
    except ProtocolError as refusal:
        return refusal.code
    return None


@pytest.mark.parametrize("first", [0, 3, 7])
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_place_p_belongs_to_virtual_worker_p_mod_v_and_each_opens_its_own(first, count):
    batch = SentBatch.read(sealed(head(count, first=first)))
    found = {}
    for v in range(V):
        opened = batch.open(v, key(v))
        assert all(place % V == v for place in opened)
        found |= opened
    assert found == {first + i: row for i, row in enumerate(rows(count))}


def test_only_the_key_of_the_virtual_worker_opens_its_part():
    batch = SentBatch.read(sealed(head()))
    for v in range(V):
        for other in range(V):
            if other != v:
                with pytest.raises(ProtocolError, match="batch_sealed"):
                    batch.open(v, key(other))


def open_all(content: bytes) -> None:
    batch = SentBatch.read(content)
    for v in range(V):
        batch.open(v, key(v))


def test_no_byte_of_a_batch_can_be_another():
    """Every byte is the head's, which the parts are bound to, or a part's, which is authenticated."""
    content = sealed(head(5))
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        with pytest.raises(ProtocolError) as refusal:
            open_all(bytes(changed))
        assert refusal.value.code in ("batch_malformed", "batch_sealed")


@pytest.mark.parametrize("cut", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b"", lambda c: c[:24]])
def test_a_batch_that_is_cut_or_longer_is_none(cut):
    with pytest.raises(ProtocolError, match="batch_malformed"):
        SentBatch.read(cut(sealed(head())))


def test_two_sealings_have_no_bytes_of_a_part_in_common():
    """A salt of its own gives each sealing other keys: so one nonce serves all, and equal rows do not show."""
    one, other = (sealed(head(salt=salt * 32)) for salt in (b"a", b"b"))
    start = len(one) - 2 * (ROW + 16)
    assert len(one) == len(other)
    assert one[start:] != other[start:]
    assert not any(one[i : i + 16] == other[i : i + 16] for i in range(start, len(one) - 16))


def test_the_batches_of_a_step_fill_its_places_in_their_order():
    one, two = sealed(head(4)), sealed(head(number=1, first=4, hashes=hashes(7, 8)))
    assert code(one, two) is None
    assert code() is None
    assert code(two) == code(two, one) == code(one, one) == "batch_order"
    assert code(one, two, places=5) == "batch_too_large"


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "other"},
        {"manifest_digest": b"x" * 32},
        {"step": 2},
        {"epoch": 0},
        {"virtual_workers": 5},
        {"row_bytes": ROW + 1},
    ],
)
def test_a_batch_of_anything_else_is_foreign(changes):
    assert code(sealed(head()), **changes) == "batch_foreign"


def test_the_batches_of_two_clients_are_not_one_step():
    assert code(sealed(head(4)), sealed(head(number=1, first=4, hashes=hashes(9), client_id="d"))) == "batch_foreign"


def test_an_example_is_in_a_step_once():
    assert code(sealed(head(hashes=hashes(1, 2, 1)))) == "batch_repeated"
    assert code(sealed(head(4)), sealed(head(number=1, first=4, hashes=hashes(9, 3)))) == "batch_repeated"


def test_the_head_of_a_file_is_read_without_its_parts_and_only_if_it_is_as_was_said():
    content = sealed(head(5))
    assert head_of(io.BytesIO(content), len(content), 5) == head(5)
    # A head that is longer than that of so many examples is not even read.
    long = content[:22] + (2**20).to_bytes(4, "big") + b" " * 2**20
    for wrong, size, examples in ((content, len(content) + 1, 5), (content, len(content), 4), (long, len(long), 5)):
        with pytest.raises(ProtocolError, match="batch_malformed"):
            head_of(io.BytesIO(wrong), size, examples)
    with pytest.raises(ProtocolError, match="batch_malformed"):
        head_of(io.BytesIO(b""), 0, 0)
