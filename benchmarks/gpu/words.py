"""The words of a vector on a device: launches the kernels and holds what they are given.

The results are those of `masked_sum`, `encode_into` and `NoiseSampler.add_to`, byte for byte. Keys lie in the device's
memory while a kernel runs, and are zeroed behind it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

import benchmarks.gpu.interpreter  # noqa: F401 - before a kernel is run
from benchmarks.gpu.word_kernels import (
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
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.vectors.noise import BLOCK, NoiseSampler
from raycloak.workers.vectors.ring import RingSpec
from raycloak.workers.vectors.streams import BLOCK_BYTES, MAX_BLOCKS

_WORD = {32: torch.uint32, 64: torch.uint64}


@dataclass(frozen=True, slots=True)
class Words:
    """Ring words that a kernel wrote.

    Attributes:
        vector: uint32 or uint64 [d].
        faults: int32 [1], on the device: values that are not finite, and open words for which there was no room.
    """

    vector: Tensor
    faults: Tensor


@dataclass(frozen=True, slots=True)
class NoiseTables:
    """What the kernels need of one noise sampler, on a device.

    Attributes:
        powers: the ring's words of the factors of the base draws.
        index, high, low: the table's index, and both halves of its bounds.
        room: entries of a block's list. Forty standard deviations above the mean, or all words, whichever is less.
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
    def of(cls, sampler: NoiseSampler, device: torch.device) -> "NoiseTables":
        """Take them from the product's sampler."""
        require_bound(DRAW_WORDS.value == BLOCK, "a kernel draws one block")
        table, found = sampler._table, sampler.decomposition
        share = float((table.index == OPEN.value).mean())
        words = found.draws * BLOCK
        room = min(words, math.ceil(words * share + 40 * math.sqrt(words * share) + 64))
        return cls(
            draws=found.draws,
            powers=_ring([found.multiplier**part for part in range(found.draws)], sampler.ring_bits, device),
            index=torch.from_numpy(table.index).to(device),
            high=torch.from_numpy(table._high).to(device),
            low=torch.from_numpy(np.array(table._low, np.uint64)).to(device),
            lowest=table._lowest,
            room=room,
            bits=sampler.ring_bits,
        )


def masked(vector: Tensor, masks: Sequence[tuple[Secret, int]], first_block: int = 0) -> Words:
    """Return ``vector`` with every (key, +1 or -1) added, each keystream from ``first_block`` on."""
    bits = 8 * vector.itemsize
    blocks = -(-vector.nbytes // BLOCK_BYTES)
    require_bound(first_block + blocks <= MAX_BLOCKS, "a keystream ends after 2^32 blocks")
    out = torch.empty_like(vector)
    keys = _keys([key for key, _ in masks], vector.device)
    signs = _ring([sign for _, sign in masks], bits, vector.device)
    programs = triton.cdiv(blocks, MASK_LANES.value)
    mask_kernel[(programs,)](
        vector, out, keys, signs, len(masks), len(vector), first_block, WIDE=bits == 64, num_warps=4
    )
    keys.zero_()
    return Words(out, _no_faults(vector.device))


def encoded(values: Tensor, spec: RingSpec) -> Words:
    """Return the ring words of float32 or float64 [d]."""
    out = torch.empty(len(values), dtype=_WORD[spec.bits], device=values.device)
    faults = _no_faults(values.device)
    programs = triton.cdiv(len(values), ENCODE_WORDS.value)
    limits = _limits(spec, values.device)
    encode_kernel[(programs,)](values, out, faults, limits, len(values), WIDE=spec.bits == 64, num_warps=4)
    return Words(out, faults)


def add_noise(vector: Tensor, tables: NoiseTables, key: Secret, start: int = 0) -> Words:
    """Add draws [start, start + d) of ``key`` to ``vector`` in place."""
    none = torch.zeros(2, dtype=torch.float64, device=vector.device)
    return _drawn(vector, vector, none, tables, key, start, encodes=False)


def encoded_with_noise(values: Tensor, spec: RingSpec, tables: NoiseTables, key: Secret) -> Words:
    """Return the ring words of ``values`` plus the draws of ``key``, in one pass over the values."""
    out = torch.empty(len(values), dtype=_WORD[spec.bits], device=values.device)
    return _drawn(out, values, _limits(spec, values.device), tables, key, 0, encodes=True)


def _drawn(
    out: Tensor, values: Tensor, limits: Tensor, tables: NoiseTables, key: Secret, start: int, *, encodes: bool
) -> Words:
    device, length, wide = out.device, len(out), tables.bits == 64
    first = start // BLOCK
    blocks = -(-(start + length) // BLOCK) - first
    used = (first + blocks) * tables.draws * DRAW_LANES.value
    require_bound(used <= MAX_BLOCKS, "a keystream ends after 2^32 blocks")
    listed = torch.empty(blocks * tables.room, dtype=torch.uint32, device=device)
    counts = torch.empty(blocks, dtype=torch.int32, device=device)
    faults = _no_faults(device)
    index_key, residue_key = (
        _keys([derive(key, purpose)], device) for purpose in (Purpose.NOISE_INDEX, Purpose.NOISE_RESIDUE)
    )
    draw_kernel[(blocks,)](
        out, values, faults, limits, tables.index, listed, counts, index_key, tables.powers,
        start, length, first, tables.room, tables.draws, WIDE=wide, ENCODES=encodes, num_warps=8,
    )  # fmt: skip
    chunks = triton.cdiv(tables.room, 4 * SETTLE_LANES.value)
    settle_kernel[(blocks, chunks)](
        out, listed, counts, tables.high, tables.low, residue_key, tables.powers, len(tables.high),
        len(tables.high).bit_length(), tables.lowest, start, length, first, tables.room, WIDE=wide, num_warps=1,
    )  # fmt: skip
    index_key.zero_()
    residue_key.zero_()
    return Words(out, faults + (counts - tables.room).clamp(min=0).sum(dtype=torch.int32))


def _keys(keys: Sequence[Secret], device: torch.device) -> Tensor:
    words = np.frombuffer(b"".join(key.reveal() for key in keys), "<u4")
    return torch.from_numpy(words.copy()).to(device)


def _ring(numbers: Sequence[int], bits: int, device: torch.device) -> Tensor:
    """Return integers as ring words, modulo 2^bits."""
    words: Any = np.array([number % 2**bits for number in numbers], f"<u{bits // 8}")
    return torch.from_numpy(words).to(device)


def _limits(spec: RingSpec, device: torch.device) -> Tensor:
    return torch.tensor([spec.clamp, math.ldexp(1.0, -spec.gamma_log2)], dtype=torch.float64, device=device)


def _no_faults(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)
