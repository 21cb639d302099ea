"""Which bindings an aggregator accepts."""

from typing import Any

import pytest

from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.binding import Binding, check_binding, vectors_digest
from raycloak.workers.vectors.payload import Header

LEDGER = IdentityKey.from_seed(Secret(bytes(32)))
EXPECTED: dict[str, Any] = {
    "run_id": "ab12",
    "query": "gradient",
    "step": 7,
    "manifest_digest": b"m" * 32,
    "vectors_digest": b"v" * 32,
}
BINDING = Binding(**EXPECTED, fencing=3, sequence=9, head=b"h" * 32)


def check(envelope: Envelope, **changes: Any) -> Binding:
    """Return the check of an aggregator that expects BINDING's vectors and has seen fencing number 3."""
    return check_binding(envelope, **{"ledger_key": LEDGER.public, "lowest_fencing": 3, **EXPECTED, **changes})


def header(virtual_workers: tuple[int, ...], tags: tuple[bytes, ...]) -> Header:
    return Header(
        run_id="ab12", manifest_digest=b"m" * 32, step=7, attempt=0, roster_digest=b"r" * 32,
        input_digest=b"p" * 32, sender="worker-0", virtual_workers=virtual_workers, vector_tags=tags,
        payloads=(), ring_bits=32,
    )  # fmt: skip


def test_the_binding_of_these_vectors_is_accepted():
    assert check(seal(BINDING, LEDGER)) == BINDING


@pytest.mark.parametrize(
    "expected",
    [
        {"run_id": "ab13"},
        {"query": "evaluation"},
        {"step": 8},
        {"manifest_digest": b"n" * 32},
        {"vectors_digest": b"w" * 32},
    ],
)
def test_a_binding_of_anything_else_is_refused(expected: dict[str, Any]):
    with pytest.raises(ProtocolError, match=f"binding_mismatch: .*{next(iter(expected))}"):
        check(seal(BINDING, LEDGER), **expected)


def test_a_binding_with_an_older_fencing_number_is_refused():
    with pytest.raises(ProtocolError, match="binding_fenced"):
        check(seal(BINDING, LEDGER), lowest_fencing=4)
    assert check(seal(BINDING, LEDGER), lowest_fencing=2) == BINDING


def test_a_binding_of_another_key_is_refused():
    with pytest.raises(ProtocolError, match="signature"):
        check(seal(BINDING, IdentityKey.generate()))


def test_a_digest_of_vectors_depends_on_each_tag_and_not_on_who_hosts_what():
    tags = tuple(bytes([v]) * 16 for v in range(4))
    whole = vectors_digest([header((0, 1, 2, 3), tags)])
    assert vectors_digest([header((1, 3), (tags[1], tags[3])), header((0, 2), (tags[0], tags[2]))]) == whole
    assert vectors_digest([header((0, 1, 2, 3), (*tags[:3], b"x" * 16))]) != whole
    assert vectors_digest([header((0, 1, 2, 3), (tags[1], tags[0], *tags[2:]))]) != whole
