"""Payloads: what was written, chunk by chunk, and nothing else."""

import io
import itertools
import tracemalloc

import pytest

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.sealed.chunk_stream import read_payload, write_payload
from raycloak.attestation.sealed.package_manifest import TAG_BYTES
from raycloak.metrics.errors import EvidenceError

KEY = Secret(b"k" * 32)
CONTEXT = b"c" * 32
NAME = "parameters.safetensors.enc"


def written(plain, chunk_bytes=8, pieces=None):
    sink = io.BytesIO()
    payload = write_payload(sink, KEY, CONTEXT, NAME, [plain] if pieces is None else pieces, chunk_bytes)
    return payload, sink.getvalue()


def read(payload, data, key=KEY, context=CONTEXT):
    return b"".join(read_payload(io.BytesIO(data), key, context, payload))


def is_refused(payload, data, **changes):
    try:
        read(payload, data, **changes)
    except EvidenceError as error:
        return error.code == "package_file_changed"
    return False


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 17, 800])
def test_what_was_written_is_read(size):
    plain = bytes(i % 251 for i in range(size))
    payload, data = written(plain)
    assert (payload.plain_bytes, payload.cipher_bytes) == (size, len(data))
    assert read(payload, data) == plain


def test_pieces_of_any_size_give_the_same_chunks():
    plain = bytes(range(100))
    cuts = [0, 0, 1, 9, 10, 50, 50, 99, 100]
    payload, data = written(b"", pieces=[plain[a:b] for a, b in itertools.pairwise(cuts)])
    assert payload.chunks == 13
    assert read(payload, data) == plain


def chunks_of(data, chunk_bytes=8):
    size = chunk_bytes + TAG_BYTES
    return [data[i : i + size] for i in range(0, len(data), size)]


def test_a_truncated_reordered_repeated_or_added_chunk_is_refused():
    payload, data = written(bytes(range(32)))
    chunks = chunks_of(data)
    assert len(chunks) == 4
    wrong = {
        "truncated": chunks[:-1],
        "a byte short": [data[:-1]],
        "reordered": [chunks[1], chunks[0], *chunks[2:]],
        "repeated": [chunks[0], chunks[0], *chunks[2:]],
        "added": [*chunks, chunks[-1]],
        "empty": [],
    }
    assert [name for name, change in wrong.items() if not is_refused(payload, b"".join(change))] == []


def test_a_truncation_that_the_manifest_agrees_with_is_refused():
    payload, data = written(bytes(range(32)))
    shorter = payload.model_copy(update={"plain_bytes": 24, "chunks": 3, "cipher_bytes": 72})
    assert is_refused(shorter, b"".join(chunks_of(data)[:3]))


def test_another_key_package_or_payload_name_does_not_decrypt():
    payload, data = written(b"x" * 20)
    assert is_refused(payload, data, key=Secret(b"K" * 32))
    assert is_refused(payload, data, context=b"C" * 32)
    assert is_refused(payload.model_copy(update={"name": "optimizer.safetensors.enc"}), data)


def test_every_flipped_byte_is_refused_without_the_hash_of_the_file():
    payload, data = written(bytes(20))
    assert all(is_refused(payload, data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]) for i in range(len(data)))


def test_two_payloads_share_no_key_stream():
    first, second = written(bytes(64))[1], written(bytes(64))[1]
    assert first != second


def test_memory_is_constant_in_writing_and_reading(tmp_path):
    piece, count, chunk = bytes(2**18), 256, 2**16
    path = tmp_path / "payload"
    tracemalloc.start()
    try:
        with path.open("wb") as sink:
            payload = write_payload(sink, KEY, CONTEXT, NAME, itertools.repeat(piece, count), chunk)
        with path.open("rb") as source:
            total = sum(map(len, read_payload(source, KEY, CONTEXT, payload)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == count * len(piece) == 64 * 2**20
    assert peak < 2 * 2**20
