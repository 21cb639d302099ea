"""The vector tag: a keyed function of all words of a virtual worker's vector, whoever hashes which of them.

Each tensor is hashed in leaves of 64 KiB, and no leaf crosses a tensor's border. So threads or devices that hold parts
of a vector hash these by themselves, and only digests of leaves have to meet. `docs/proofs/010-vector-tag.md` has
the proof.

Leaves are hashed without a key, and of words without a mask: their digests must not leave the worker.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Self

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.keys import Secret
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.vectors.ring import RingBits, RingVector
from raycloak.workers.vectors.threads import WordThreads

LEAF_BYTES = 1 << 16
"""Bytes under one digest: long enough that digests are 0.05 % of the words, short enough to split any tensor's work."""

VECTOR_TAG_BYTES = 16
"""Half an HMAC-SHA-256: another vector has the same tag with a chance of 2^-128, and headers stay small."""

# Leaves that are worth a thread's start: half a millisecond.
_PIECE = 8

_LABEL = "raycloak/vector-leaves/v2"


@dataclass(frozen=True, slots=True)
class TensorLeaves:
    """The words of one tensor, hashed.

    Attributes:
        length: number of words.
        digests: SHA-256 of each leaf, in order.
    """

    length: int
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, words: RingVector) -> Self:
        """Hash the words [length] of a whole tensor."""
        return cls(len(words), leaf_digests(words))


def leaf_digests(words: RingVector) -> tuple[bytes, ...]:
    """Return SHA-256 of each 64 KiB of a C-contiguous array, which is not copied; the last leaf may be shorter.

    Args:
        words: of one tensor, or a part of one that begins where a leaf does and ends where one does or the tensor.
    """
    raw = words.data.cast("B")
    return tuple(digest(raw[start : start + LEAF_BYTES]) for start in range(0, len(raw), LEAF_BYTES))


def tensor_leaves(vector: RingVector, sizes: Sequence[int], threads: WordThreads) -> list[TensorLeaves]:
    """Hash a whole vector, tensor by tensor; threads share all leaves of all tensors.

    Args:
        vector: C-contiguous words [d], which are not copied.
        sizes: words of each tensor, in order; d together.
    """
    require_bound(sum(sizes) == len(vector), "tensors make up a vector")
    raw, leaves = vector.data.cast("B"), leaf_places(sizes, vector.itemsize)
    digests = [b""] * len(leaves)

    def hash_leaves(pieces: Iterator[range]) -> None:
        for piece in pieces:
            for index in piece:
                place = leaves[index]
                digests[index] = digest(raw[place.start : place.stop])

    threads.share(threads.cut(len(leaves), _PIECE), hash_leaves)
    return by_tensor(sizes, vector.itemsize, digests)


def leaf_places(sizes: Sequence[int], itemsize: int) -> list[range]:
    """Return the bytes of each leaf of a vector, in order; ``sizes`` are the words of its tensors."""
    ends = [0, *accumulate(size * itemsize for size in sizes)]
    starts = ((at, end) for begin, end in pairwise(ends) for at in range(begin, end, LEAF_BYTES))
    return [range(at, min(at + LEAF_BYTES, end)) for at, end in starts]


def by_tensor(sizes: Sequence[int], itemsize: int, digests: Sequence[bytes]) -> list[TensorLeaves]:
    """Return the digests of the leaves of :func:`leaf_places`, given to the tensors that they are of."""
    hashed = iter(digests)
    return [TensorLeaves(size, tuple(islice(hashed, -(-size * itemsize // LEAF_BYTES)))) for size in sizes]


def vector_tag(key: Secret, ring_bits: RingBits, tensors: Sequence[TensorLeaves]) -> bytes:
    """Return HMAC-SHA-256 over the leaves of an encoded, noised vector, cut to 16 bytes.

    Guarantee: the tag is a function of key, ring, tensors' lengths and words alone. Ranges, threads, devices and the
    order of the work do not enter it. Vectors that differ in a word, a length, a border or the ring have tags of
    independent value, unless SHA-256 collides.

    Two hosts of a virtual worker hold the same key, so a recomputation that differs in one bit shows. To everybody
    else the tag is random. ``key`` must belong to one (virtual worker, query, step, input, slice, data root): otherwise
    equal vectors of two steps would show.

    Args:
        tensors: all tensors of the vector, in canonical order; a measurement is one tensor.
    """
    fields: list[bytes | int] = [ring_bits, len(tensors)]
    for each in tensors:
        # Otherwise two vectors could have one list of fields.
        whole = len(each.digests) == -(-each.length * (ring_bits // 8) // LEAF_BYTES)
        require_bound(whole, "a tensor has as many leaves as its words fill")
        fields += (each.length, *each.digests)
    mac = HMAC(key.reveal(), SHA256())
    mac.update(length_prefixed(_LABEL, *fields))
    return mac.finalize()[:VECTOR_TAG_BYTES]
