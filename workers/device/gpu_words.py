"""Words in a GPU's memory, by Triton kernels, with the bytes of `raycloak.workers.device.words.CpuWords`.

A kernel that computes other words would be silent: wrong noise cannot be told from right noise by whoever decodes the
sum. So every vector and every masked range is compared with the CPU's in one block, which nobody can foresee.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.device import launches
from raycloak.workers.device.launches import NoiseTables
from raycloak.workers.device.memory import clear_free_memory, zero_span
from raycloak.workers.device.step_clock import StepClock
from raycloak.workers.device.words import CpuWords, ring_of
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.noise import BLOCK, NoiseSampler
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.ring import RingSpec, RingVector, encode_into, mix_into, ring_dtype
from raycloak.workers.vectors.streams import BLOCK_BYTES, KeyStream
from raycloak.workers.vectors.vector_tag import TensorLeaves, by_tensor, leaf_places

# Two blocks of noise, of which the second is not whole.
_GOLDEN_WORDS = BLOCK + 100
# Tensors of which digests are compared: of 30 words, padding takes a block of its own.
_GOLDEN_SIZES = (30, 1, 100)
# Everybody may know it.
_GOLDEN_KEY = Secret(bytes(32))
_SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}


class GpuWords:
    """Words in a GPU's memory; a vector is a tensor, uint32 or uint64 [d].

    Words leave the device through :meth:`masked` alone. To compare a block, the host sends the noise or masks that it
    computed. Digests of leaves come to the host, since a tag is made of them.

    Guarantee: before the first vector of a mechanism, public words by all of its kernels equal the CPU's. Of every
    vector and masked range, a block that nobody can foresee does. Otherwise there is ``not_reproducible`` and no
    result.

    Guarantee: a sum is zeroed once it is encoded, and so is all memory of its GPU that the process holds and does not
    use. The words stay until the next request, which may ask for them under other masks.

    Args:
        device: of the sums.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clock = StepClock(device)
        # By what their kernels compute: samplers of the mechanisms that gave golden words.
        self._proven: dict[tuple[RingSpec, float | None], _Noise | None] = {}

    def encoded(self, total: list[Tensor], mechanism: Mechanism, noise: Secret | None, start: int = 0) -> Tensor:
        """See `raycloak.workers.device.words.Words.encoded`."""
        spec, sigma = ring_of(mechanism), None if noise is None else mechanism.sigma
        (given,) = total
        values = given.to(self._device)
        if values is not given:
            given.zero_()
        with _current(values):
            self.prove(spec, sigma)
            vector = _encoded(values, spec, self._proven[spec, sigma], noise, start)
        if self._device.type == "cuda":
            clear_free_memory(self._device)
        return vector

    def mixed(self, sums: Sequence[Tensor], mechanism: Mechanism, noise: Secret, start: int = 0) -> Tensor:
        """See `raycloak.workers.device.words.Words.mixed`."""
        # The noise first, by the kernels that are compared with a CPU's, and then the mix by integers of torch.
        zeros = [torch.zeros(len(sums[0]), dtype=torch.float64, device=self._device)]
        vector = self.encoded(zeros, mechanism, noise, start)
        with _current(vector):
            _add_mix(vector, sums, mechanism.coefficients)
        if self._device.type == "cuda":
            # The mix without noise was in memory of its own.
            clear_free_memory(self._device)
        return vector

    def leaves(self, vector: Tensor, sizes: Sequence[int]) -> list[TensorLeaves]:
        """See `raycloak.workers.device.words.Words.leaves`."""
        require_bound(sum(sizes) == len(vector), "tensors make up a vector")
        with _unfilled(), _current(vector):
            digests = launches.leaf_digests(vector, leaf_places(sizes, vector.itemsize))
        return by_tensor(sizes, vector.itemsize, digests)

    def add(self, total: Tensor, vector: Tensor) -> None:
        """See `raycloak.workers.device.words.Words.add`."""
        # Signed and unsigned words have the same sums, and torch adds signed ones only.
        _signed(total).add_(_signed(vector))

    def masked(
        self, vector: Tensor, part: VectorRange, masks: Sequence[tuple[Secret, int]], start: int = 0
    ) -> RingVector:
        """See `raycloak.workers.device.words.Words.masked`."""
        clear = vector[part.offset : part.offset + part.length]
        # A keystream is read from the beginning of a block on.
        block, unread = divmod(start * vector.itemsize, BLOCK_BYTES)
        lead = unread // vector.itemsize
        with _unfilled(), _current(vector):
            padded = torch.cat([torch.empty_like(clear[:1]).expand(lead), clear]) if lead else clear
            out = launches.masked(padded, masks, block)[lead:]
        place = _random_block(part.length)
        mask = np.zeros(len(place), ring_dtype(8 * vector.itemsize))
        for key, sign in masks:
            words = np.empty(lead + len(mask), mask.dtype)
            KeyStream(key, block_counter=block + place.start * mask.itemsize // BLOCK_BYTES).into(words)
            (np.add if sign > 0 else np.subtract)(mask, words[lead:], out=mask)
        here = slice(place.start, place.stop)
        expected = _signed(clear[here]) + _signed(torch.from_numpy(mask).to(self._device))
        _require_equal(torch.equal(_signed(out[here]), expected))
        self.clock.begin("out")
        return _on_host(out)

    def prove(self, spec: RingSpec, sigma: float | None) -> None:
        """Compare public words by all kernels with the CPU's, the first time that it is asked for these terms.

        Raises:
            ProtocolError: ``not_reproducible``.
        """
        if (spec, sigma) not in self._proven:
            drawn = None if sigma is None else _Noise.of(sigma, spec, self._device)
            self._prove(spec, drawn)
            self._proven[spec, sigma] = drawn

    def _prove(self, spec: RingSpec, drawn: "_Noise | None") -> None:
        """Compare ties, both zeros, values beyond the clamp, noise, masks, digests, and memory that is zeroed."""
        cpu, noise = CpuWords(), None if drawn is None else _GOLDEN_KEY
        draws = np.empty(_GOLDEN_WORDS, "<i8")
        KeyStream(_GOLDEN_KEY).into(draws)
        values = np.ldexp(draws.astype(np.float64), -63) * (1.25 * spec.clamp)
        values[::4] = np.ldexp((draws[::4] >> 44) + 0.5, spec.gamma_log2)
        values[1::16], values[2::64], values[3::64] = values[1::16] * 1e-30, 0.0, -0.0
        theirs = np.empty(_GOLDEN_WORDS, ring_dtype(spec.bits))
        encode_into(values, spec, theirs)
        if drawn is not None:
            drawn.sampler.add_to(theirs, _GOLDEN_KEY)
        own = _encoded(torch.tensor(values, device=self._device), spec, drawn, noise)
        # From an odd word on, as a range may begin.
        part = VectorRange(index=0, offset=1, length=_GOLDEN_WORDS - 1)
        masks = [(_GOLDEN_KEY, 1), (Secret(bytes(31) + b"1"), -1)]
        _require_equal(np.array_equal(self.masked(own, part, masks), cpu.masked(theirs, part, masks)))
        hashed = slice(sum(_GOLDEN_SIZES))
        _require_equal(self.leaves(own[hashed], _GOLDEN_SIZES) == cpu.leaves(theirs[hashed], _GOLDEN_SIZES))
        # Words that nobody needs any more, of which the middle goes by its address.
        zero_span(own.data_ptr() + own.itemsize, own.nbytes - 2 * own.itemsize, self._device)
        _require_equal(np.array_equal(np.flatnonzero(_on_host(own)), [0, _GOLDEN_WORDS - 1]))


@dataclass(frozen=True, slots=True)
class _Noise:
    """One sampler, for the CPU and the device."""

    sampler: NoiseSampler
    tables: NoiseTables

    @classmethod
    def of(cls, sigma: float, spec: RingSpec, device: torch.device) -> "_Noise":
        sampler = NoiseSampler(sigma, spec.bits)
        return cls(sampler, NoiseTables.of(sampler, device))


def _encoded(values: Tensor, spec: RingSpec, drawn: _Noise | None, noise: Secret | None, start: int = 0) -> Tensor:
    """Return the words of ``values`` with the draws of ``noise``, one block compared; the values are then zeros."""
    with _unfilled():
        if drawn is None or noise is None:
            made = launches.encoded(values, spec)
        else:
            made = launches.encoded_with_noise(values, spec, drawn.tables, noise, start)
    place = _random_block(len(values))
    draws = np.zeros(len(place), ring_dtype(spec.bits))
    if drawn is not None and noise is not None:
        drawn.sampler.add_to(draws, noise, start=start + place.start)
    here = slice(place.start, place.stop)
    # By torch, which rounds half to even too: what the kernel does shall not be judged by itself.
    scaled = (values[here].double().clamp(-spec.clamp, spec.clamp) * 2.0**-spec.gamma_log2).round()
    own = _signed(made.vector[here])
    differ = own != scaled.to(own.dtype) + _signed(torch.from_numpy(draws).to(values.device))
    # One synchronisation for all three.
    unfinite, unsettled, others = torch.cat([made.unfinite, made.unsettled, differ.any()[None].int()]).tolist()
    values.zero_()
    if unfinite:
        raise ProtocolError("encode_non_finite", "a virtual worker's sum is not finite")
    require_bound(not unsettled, "a list of open words has room")
    _require_equal(not others)
    return made.vector


def mixed_words(sums: Sequence[Tensor], coefficients: Sequence[int]) -> Tensor:
    """Return the mix of encoded sums, int64 [d], as `raycloak.workers.vectors.ring.mix_into` writes it."""
    total = torch.zeros(len(sums[0]), dtype=torch.int64, device=sums[0].device)
    for each, coefficient in zip(sums, coefficients, strict=False):
        total.add_(_signed(each), alpha=coefficient)
    left = total & (COEFFICIENT_UNIT - 1)
    total >>= COEFFICIENT_UNIT.bit_length() - 1
    left += total & 1
    total += left > COEFFICIENT_UNIT // 2
    return total


def _add_mix(vector: Tensor, sums: Sequence[Tensor], coefficients: Sequence[int]) -> None:
    """Add the mix of sums to a vector, one block compared."""
    place = _random_block(len(vector))
    here, words = slice(place.start, place.stop), _signed(vector)
    drawn = words[here].clone()
    words.add_(mixed_words(sums, coefficients).to(words.dtype))
    theirs = np.empty(len(place), ring_dtype(8 * vector.itemsize))
    mix_into([_on_host(each[here]) for each in sums], coefficients, theirs)
    expected = drawn + _signed(torch.from_numpy(theirs)).to(vector.device)
    _require_equal(torch.equal(words[here], expected))


def _random_block(length: int) -> range:
    """Return the places of one block of ``BLOCK`` words; it begins where a block of each keystream does."""
    start = secrets.randbelow(-(-length // BLOCK)) * BLOCK
    return range(start, min(start + BLOCK, length))


def _require_equal(alike: bool) -> None:
    if not alike:
        raise ProtocolError("not_reproducible", "this worker's GPU computes other words than its CPU")


def _signed(words: Tensor) -> Tensor:
    return words.view(_SIGNED[words.dtype])


def _current(tensor: Tensor) -> AbstractContextManager[None]:
    """Make a tensor's GPU the current one, on which kernels are launched wherever their operands are."""
    current: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return current


def _on_host(words: Tensor) -> RingVector:
    """Return words in memory of the host that the device writes to by itself, without a copy of the driver's."""
    out = torch.empty(words.shape, dtype=words.dtype, pin_memory=words.is_cuda)
    return out.copy_(words).numpy()


@contextmanager
def _unfilled() -> Iterator[None]:
    """Leave new memory as it is: a kernel writes all of it, and filling it first is one more pass."""
    settings: Any = torch.utils.deterministic
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled
