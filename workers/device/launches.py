"""Launches the kernels of words, and holds what they are given.

The results are those of `masked_sum`, `encode_into`, `NoiseSampler.add_to` and `leaf_digests`, byte for byte. Keys lie
in the device's memory while a kernel runs, and are zeroed behind it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.device.leaf_kernel import LEAF_LANES, leaf_kernel
from raycloak.workers.device.word_kernels import (
    DRAW_LANES,
    DRAW_WORDS,
    ENCODE_WORDS,
    MASK_LANES,
    OPEN,
    SETTLE_LANES,
    draw_kernel,
    encode_kernel,
    mask_kernel,
    settle_kernel,
)
from raycloak.workers.vectors.noise import BLOCK, NoiseSampler
from raycloak.workers.vectors.ring import RingSpec
from raycloak.workers.vectors.streams import BLOCK_BYTES, KeyStream

_WORD = {32: torch.uint32, 64: torch.uint64}


@dataclass(frozen=True, slots=True)
class Made:
    """Ring words that kernels wrote.

    Attributes:
        vector: uint32 or uint64 [d].
        unfinite: int32 [1], on the device: values that are not finite, whose words mean nothing.
        unsettled: int32 [1], on the device: open words that found no room in a list, and so added nothing.
    """

    vector: Tensor
    unfinite: Tensor
    unsettled: Tensor


@dataclass(frozen=True, slots=True)
class NoiseTables:
    """One noise sampler's numbers on a device.

    Guarantee: a block has more open words than ``room`` with a probability below 2^-128.

    Attributes:
        powers: the ring's words of the factors of the base draws.
        index, high, low: the table's index, and both halves of its bounds.
        room: entries of a block's list.
    """

    draws: int
    powers: Tensor
    index: Tensor
    high: Tensor
    low: Tensor
    lowest: int
    room: int
    bits: int

    @classmethod
    def of(cls, sampler: NoiseSampler, device: torch.device) -> Self:
        """Copy them from the CPU's sampler."""
        require_bound(DRAW_WORDS.value == BLOCK, "a kernel draws one block")
        table, found = sampler._table, sampler.decomposition
        words = found.draws * BLOCK
        return cls(
            draws=found.draws,
            powers=_ring([found.multiplier**part for part in range(found.draws)], sampler.ring_bits, device),
            index=torch.from_numpy(table.index).to(device),
            high=torch.from_numpy(table._high).to(device),
            low=torch.from_numpy(np.array(table._low, np.uint64)).to(device),
            lowest=table._lowest,
            room=room_for(words * float((table.index == OPEN.value).mean()), words),
            bits=sampler.ring_bits,
        )


def room_for(mean: float, words: int) -> int:
    """Return the entries of a list for as many of ``words`` as are open, ``mean`` on average.

    Forty deviations above the mean, and 64 entries where it is small: a sum of independent draws exceeds that with a
    probability below 2^-128 (Chernoff).
    """
    return min(words, math.ceil(mean + 40 * math.sqrt(mean) + 64))


def masked(vector: Tensor, masks: Sequence[tuple[Secret, int]], first_block: int = 0) -> Tensor:
    """Return a copy of ``vector`` with every (key, +1 or -1) added, each keystream from ``first_block`` on.

    Raises:
        RefusedError: ``keystream_exhausted``.
    """
    require_bound(all(sign in (1, -1) for _, sign in masks), "a mask is added or subtracted once")
    bits = 8 * vector.itemsize
    blocks = -(-vector.nbytes // BLOCK_BYTES)
    _require_stream(first_block + blocks)
    out = torch.empty_like(vector)
    keys = _keys([key for key, _ in masks], vector.device)
    signs = _ring([sign for _, sign in masks], bits, vector.device)
    mask_kernel[(triton.cdiv(blocks, MASK_LANES.value),)](
        vector, out, keys, signs, len(masks), len(vector), first_block, WIDE=bits == 64, num_warps=4
    )
    keys.zero_()
    return out


def encoded(values: Tensor, spec: RingSpec) -> Made:
    """Return the ring words of float32 or float64 [d]."""
    out, unfinite = torch.empty(len(values), dtype=_WORD[spec.bits], device=values.device), _none(values.device)
    limits = _limits(spec, values.device)
    encode_kernel[(triton.cdiv(len(values), ENCODE_WORDS.value),)](
        values, out, unfinite, limits, len(values), WIDE=spec.bits == 64, num_warps=4
    )
    return Made(out, unfinite, _none(values.device))


def add_noise(vector: Tensor, tables: NoiseTables, key: Secret, start: int = 0) -> Made:
    """Add draws [start, start + d) of ``key`` to ``vector`` in place.

    Raises:
        RefusedError: ``keystream_exhausted``.
    """
    unused = torch.zeros(2, dtype=torch.float64, device=vector.device)
    return _drawn(vector, vector, unused, tables, key, start, encodes=False)


def encoded_with_noise(values: Tensor, spec: RingSpec, tables: NoiseTables, key: Secret, start: int = 0) -> Made:
    """Return the ring words of ``values`` plus draws [start, start + d) of ``key``, in one pass over the values.

    Raises:
        RefusedError: ``keystream_exhausted``.
    """
    out = torch.empty(len(values), dtype=_WORD[spec.bits], device=values.device)
    return _drawn(out, values, _limits(spec, values.device), tables, key, start, encodes=True)


def _drawn(
    out: Tensor, values: Tensor, limits: Tensor, tables: NoiseTables, key: Secret, start: int, *, encodes: bool
) -> Made:
    device, length, wide = out.device, len(out), tables.bits == 64
    first = start // BLOCK
    blocks = -(-(start + length) // BLOCK) - first
    _require_stream((first + blocks) * tables.draws * DRAW_LANES.value)
    listed = torch.empty(blocks * tables.room, dtype=torch.uint32, device=device)
    counts = torch.empty(blocks, dtype=torch.int32, device=device)
    unfinite = _none(device)
    index_key, residue_key = (
        _keys([derive(key, purpose)], device) for purpose in (Purpose.NOISE_INDEX, Purpose.NOISE_RESIDUE)
    )
    draw_kernel[(blocks,)](
        out, values, unfinite, limits, tables.index, listed, counts, index_key, tables.powers,
        start, length, first, tables.room, tables.draws, WIDE=wide, ENCODES=encodes, num_warps=8,
    )  # fmt: skip
    chunks = triton.cdiv(tables.room, 4 * SETTLE_LANES.value)
    settle_kernel[(blocks, chunks)](
        out, listed, counts, tables.high, tables.low, residue_key, tables.powers, len(tables.high),
        len(tables.high).bit_length(), tables.lowest, start, length, first, tables.room, WIDE=wide, num_warps=1,
    )  # fmt: skip
    index_key.zero_()
    residue_key.zero_()
    # Which words were open tells of the noise.
    listed.view(torch.int32).zero_()
    return Made(out, unfinite, (counts - tables.room).clamp(min=0).sum(dtype=torch.int32)[None])


def leaf_digests(words: Tensor, leaves: Sequence[range]) -> list[bytes]:
    """Return the SHA-256 of parts of a vector, 32 bytes each, in order.

    Args:
        words: uint32 or uint64 [d], whose bytes are little-endian.
        leaves: the bytes of each part, from one word's first to another's last; there is at least one part.
    """
    device = words.device
    starts = torch.tensor([leaf.start // 4 for leaf in leaves], dtype=torch.int64, device=device)
    lengths = torch.tensor([len(leaf) // 4 for leaf in leaves], dtype=torch.int32, device=device)
    out = torch.empty(len(leaves) * 8, dtype=torch.uint32, device=device)
    longest = (int(lengths.max()) + 18) // 16
    leaf_kernel[(triton.cdiv(len(leaves), LEAF_LANES.value),)](
        words.view(torch.uint32), starts, lengths, torch.from_numpy(_SHA256).to(device), out, len(leaves), longest, 8,
        num_warps=1,
    )  # fmt: skip
    digests = out.cpu().numpy().astype(">u4").tobytes()
    return [digests[place : place + 32] for place in range(0, len(digests), 32)]


def _sha256_constants() -> NDArray[np.uint32]:
    """Return the constants of the 64 rounds, and the first state.

    They are the first 32 bits of the fractions of cube roots of the first 64 primes, and of square roots of eight.
    """
    primes = [number for number in range(2, 312) if all(number % each for each in range(2, math.isqrt(number) + 1))]
    cubes = [_root(prime << 96, 3) % 2**32 for prime in primes]
    return np.array(cubes + [math.isqrt(prime << 64) % 2**32 for prime in primes[:8]], np.uint32)


def _root(number: int, power: int) -> int:
    """Return the largest integer whose ``power`` is at most ``number``."""
    found = 0
    for bit in reversed(range(number.bit_length() // power + 1)):
        if (found | 1 << bit) ** power <= number:
            found |= 1 << bit
    return found


_SHA256 = _sha256_constants()


def _require_stream(blocks: int) -> None:
    """Refuse a keystream of more blocks than there are, as the CPU does."""
    KeyStream(Secret(bytes(32)), block_counter=blocks)


def _keys(keys: Sequence[Secret], device: torch.device) -> Tensor:
    words = np.frombuffer(b"".join(key.reveal() for key in keys), "<u4")
    return torch.from_numpy(words.copy()).to(device)


def _ring(numbers: Sequence[int], bits: int, device: torch.device) -> Tensor:
    """Return integers as ring words, modulo 2^bits."""
    words: Any = np.array([number % 2**bits for number in numbers], f"<u{bits // 8}")
    return torch.from_numpy(words).to(device)


def _limits(spec: RingSpec, device: torch.device) -> Tensor:
    return torch.tensor([spec.clamp, math.ldexp(1.0, -spec.gamma_log2)], dtype=torch.float64, device=device)


def _none(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)
