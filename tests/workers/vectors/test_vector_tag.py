"""Vector tags of `workers/vectors/vector_tag.py`; docs/proofs/010-vector-tag.md names these tests."""

import hashlib
import hmac
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.metrics.errors import RefusedError
from raycloak.workers.vectors.ring import ring_dtype
from raycloak.workers.vectors.vector_tag import (
    LEAF_BYTES,
    TensorLeaves,
    by_tensor,
    leaf_digests,
    leaf_places,
    vector_tag,
)

KEY = Secret(b"k" * 32)
SIZES = (40_000, 1, 16_384, 7)
"""Tensors of several leaves, of one word, of whole leaves (in either ring), and of a short one."""


def words_of(bits: int, sizes=SIZES) -> np.ndarray:
    return np.random.default_rng(10).integers(0, 2**bits, sum(sizes), ring_dtype(bits).type)


def tensors_of(words: np.ndarray, sizes=SIZES) -> list[np.ndarray]:
    return np.split(words, np.cumsum(sizes)[:-1])


def tag_of(words: np.ndarray, sizes=SIZES, key=KEY) -> bytes:
    return vector_tag(key, 8 * words.itemsize, [TensorLeaves.of(part) for part in tensors_of(words, sizes)])


def prefixed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_tag_is_hmac_sha256_of_ring_lengths_and_leaves_cut_to_sixteen_bytes(bits):
    words = words_of(bits)
    fields = [b"raycloak/vector-leaves/v2", bits.to_bytes(8, "big"), len(SIZES).to_bytes(8, "big")]
    for part in tensors_of(words):
        raw = part.astype(f"<u{bits // 8}").tobytes()
        fields.append(len(part).to_bytes(8, "big"))
        fields += [hashlib.sha256(raw[start : start + 65536]).digest() for start in range(0, len(raw), 65536)]
    assert tag_of(words) == hmac.new(b"k" * 32, prefixed(*fields), hashlib.sha256).digest()[:16]


@pytest.mark.parametrize("bits", [32, 64])
def test_guarantee_the_tag_is_the_same_whatever_ranges_threads_or_split_of_the_work(bits):
    words = words_of(bits)
    expected, step = tag_of(words), LEAF_BYTES * 8 // bits
    # In ranges of other arrays, as devices hold them; the last tensor first; a leaf at a time, by several threads.
    copies = [TensorLeaves.of(part.copy()) for part in reversed(tensors_of(words))][::-1]
    assert vector_tag(KEY, bits, copies) == expected
    with ThreadPoolExecutor(4) as pool:
        leaves = []
        for part in tensors_of(words):
            pieces = [part[start : start + step] for start in range(0, len(part), step)]
            leaves.append(TensorLeaves(len(part), sum(pool.map(leaf_digests, pieces), ())))
    assert vector_tag(KEY, bits, leaves) == expected
    for cut in range(step, SIZES[0], step):
        parts = words[:cut], words[cut : SIZES[0]]
        first = TensorLeaves(SIZES[0], leaf_digests(parts[0]) + leaf_digests(parts[1]))
        assert vector_tag(KEY, bits, [first, *leaves[1:]]) == expected


@pytest.mark.parametrize("bits", [32, 64])
def test_guarantee_one_changed_bit_of_any_word_gives_another_tag(bits):
    words = words_of(bits)
    borders = [*np.cumsum(SIZES) - 1, *(np.cumsum((0, *SIZES[:-1])))]
    places = {*map(int, borders), *range(0, len(words), 4096)}
    tags = {tag_of(words)}
    for place in places:
        words[place] ^= words.dtype.type(1 << (place % bits))
        tags.add(tag_of(words))
    # Each change stays, so no two of the vectors are equal.
    assert len(tags) == 1 + len(places)


def test_guarantee_another_length_border_order_ring_or_key_gives_another_tag():
    words = words_of(32)
    first, *others = tensors_of(words)
    tags = [
        tag_of(words),
        tag_of(words[:-1], (*SIZES[:-1], 6)),
        tag_of(np.append(words, np.uint32(0)), (*SIZES[:-1], 8)),
        # The same words, and a border between them at another place, of a leaf too; or none.
        tag_of(words, (SIZES[0] - 1, 2, *SIZES[2:])),
        tag_of(words, (32_768, 7_233, *SIZES[2:])),
        tag_of(words, (sum(SIZES),)),
        tag_of(np.concatenate([*others, first]), (*SIZES[1:], SIZES[0])),
        # And moved by whole leaves, so that digests and number of tensors stay.
        tag_of(words, (16_384, sum(SIZES) - 16_384)),
        tag_of(words, (32_768, sum(SIZES) - 32_768)),
        # The same bytes as words of the other ring.
        tag_of(words.view("<u8"), (len(words) // 2,)),
        tag_of(words, key=Secret(b"l" * 32)),
    ]
    assert len(set(tags)) == len(tags)


def test_guarantee_a_former_tag_has_another_key():
    """Tags of the first version hashed the words as they are, under a key of their own purpose."""
    stream, words = Secret(b"s" * 32), words_of(32)
    extracted = hmac.new(bytes(32), stream.reveal(), "sha256").digest()
    former, own = (
        Secret(hmac.new(extracted, prefixed(label, b"gradient") + b"\1", "sha256").digest())
        for label in (b"raycloak/vector-tag/v1", b"raycloak/vector-tag/v2")
    )
    key = derive(stream, Purpose.VECTOR_TAG, "gradient")
    assert key.reveal() == own.reveal()
    raw = hmac.new(former.reveal(), words.tobytes(), hashlib.sha256).digest()[:16]
    assert len({raw, tag_of(words, key=former), tag_of(words, key=key)}) == 3


@pytest.mark.parametrize("digests", [(), (b"a" * 32,), (b"a" * 32,) * 3])
def test_leaves_that_do_not_fill_the_length_are_refused(digests):
    """A list of fields would otherwise stand for two vectors."""
    with pytest.raises(RefusedError) as refusal:
        vector_tag(KEY, 32, [TensorLeaves(LEAF_BYTES // 4 + 1, digests)])
    assert refusal.value.code == "proof_bound"


def test_hashing_copies_no_words():
    words = np.ones(1_000_000, np.uint32)
    tracemalloc.start()
    tag_of(words, (words.size,))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


@pytest.mark.parametrize("bits", [32, 64])
def test_a_vector_of_more_words_than_31_bits_count_has_a_tag_of_all_its_leaves(bits):
    """Of zeros, of which a piece is hashed once."""
    sizes, word = (2**31 - 2, 7), bits // 8
    places = leaf_places(sizes, word)
    assert places[0] == range(LEAF_BYTES)
    assert places[-2] == range((2**31 - 2) // (LEAF_BYTES // word) * LEAF_BYTES, (2**31 - 2) * word)
    assert places[-1] == range((2**31 - 2) * word, (2**31 + 5) * word)
    zeros = memoryview(bytes(LEAF_BYTES))
    known = {length: hashlib.sha256(zeros[:length]).digest() for length in set(map(len, places))}
    tensors = by_tensor(sizes, word, [known[len(place)] for place in places])
    assert [len(each.digests) for each in tensors] == [(2**31 // (LEAF_BYTES // word)), 1]
    tag = vector_tag(KEY, bits, tensors)
    for index, tensor in enumerate(tensors):
        other = list(tensors)
        other[index] = TensorLeaves(tensor.length, (*tensor.digests[:-1], b"o" * 32))
        assert vector_tag(KEY, bits, other) != tag
