"""Exact-integer keyed discrete Gaussian noise, added to ring vectors.

A draw of standard deviation sigma is X_0 + k * (X_1 + k * (X_2 + ...)). The n base draws X_i are discrete Gaussians of
standard deviation sigma_0 = sigma / sqrt(1 + k^2 + ... + k^(2n-2)). They come from a table with 128-bit probabilities.
At run time there are only integers. `docs/proofs/001-noise-sampler.md` proves the distance.

Stream layout, fixed for ever (it decides the bytes of every run): draws come in blocks of BLOCK. Block b reads
n * BLOCK 16-bit words of the index stream, first all words of X_0, then of X_1, and so on. A word whose bin lies
inside one outcome's interval decides it. Each other word, in that order, takes 112 more bits from the residue stream
with nonce b: the upper 48 bits of one 64-bit word, then a whole one.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.vectors.streams import BLOCK_BYTES, KeyStream
from raycloak.workers.vectors.threads import ONE_THREAD, WordThreads, blocks_of

# The range of the proof: shares add up well from 16 on (theorem 2), and six base draws reach 2^40 (theorem 1).
MIN_SIGMA = 16.0
MAX_SIGMA = 2.0**40
# Part of the stream layout, so of the bytes of every run.
BLOCK = 8192
# Blocks that one thread draws together, in base draws: array operations are then long beside what Python does between
# them, where threads wait for each other, and their buffers still fit a second-level cache of 2 MiB. As many whole
# blocks are worth a thread's start: 1 to 4 ms. The number changes no byte.
_TOGETHER = 24

# Total variation between one draw and the ideal discrete Gaussian, for an ideal keystream. V times this also covers
# the randomised-rounding argument for a sum of V draws (theorem 2 of the proof).
SAMPLER_DISTANCE = 2.0**-110
# A discrete Gaussian of variance s^2 + 4 is a randomised rounding of a continuous one of variance s^2, up to this
# total variation (theorem 2); see `raycloak.attestation.core.counted_noise.ROUNDING_VARIANCE`.
ROUNDING_DISTANCE = 2.0**-112

# The proof is for tables of at most 8,593 outcomes, which a deviation of 320 needs at the tail below.
MAX_BASE_SIGMA = 320
# At t^2 = 9/2 one convolution step errs by 2^-127.1 (lemma 2), far below a table's share.
MIN_SMOOTHING_VARIANCE = Fraction(9, 2)
# Cut at 2^-130, a table loses less than 2^-134 of its mass: less than rounding to 128 bits does.
TAIL_BITS = 130
# Twice the bits of a probability: errors of some 4,296 multiplications stay below 2^-223.
_FIXED_BITS = 256
_PROBABILITY_BITS = 128
_BIN_BITS = 112  # the other 16 are the word of the index stream
# No outcome: these reach from -4,296 to 4,296.
_AMBIGUOUS = np.iinfo(np.int16).min

_Word = np.uint32 | np.uint64
_Vector = NDArray[_Word]


@dataclass(frozen=True)
class Decomposition:
    """The composition of one draw: ``draws`` base draws of variance ``base_variance`` with factor ``multiplier``.

    Guarantee: ``base_variance * (1 + k^2 + ... + k^(2n-2))`` is exactly sigma^2, base_variance is at most
    MAX_BASE_SIGMA^2, and ``base_variance / (1 + k^2)`` is at least MIN_SMOOTHING_VARIANCE where n > 1.
    """

    sigma: float
    draws: int
    multiplier: int
    base_variance: Fraction

    @property
    def base_sigma(self) -> float:
        """The standard deviation of a base draw."""
        return math.sqrt(self.base_variance)

    def __str__(self) -> str:
        return f"sigma {self.sigma:g} = {self.draws} draws of sigma {self.base_sigma:.2f}, factor {self.multiplier}"


def _power_sum(multiplier: int, draws: int) -> int:
    return sum(multiplier ** (2 * i) for i in range(draws))


@lru_cache(maxsize=64)
def decompose(sigma: float) -> Decomposition:
    """Return the fewest base draws whose deviation is at most MAX_BASE_SIGMA, with the largest admissible factor.

    Raises:
        ConfigError: ``noise_sigma`` if sigma is not in [MIN_SIGMA, MAX_SIGMA].
    """
    if not MIN_SIGMA <= sigma <= MAX_SIGMA:
        raise ConfigError(
            "noise_sigma",
            f"noise of standard deviation {sigma:g} ring units cannot be drawn; it must be in [16, 2^40].",
            "Change the grid step or the ring width.",
        )
    variance = Fraction(float(sigma)) ** 2
    if variance <= MAX_BASE_SIGMA**2:
        return Decomposition(float(sigma), 1, 1, variance)
    draws = 2
    while (base := variance / _power_sum(k := _largest_multiplier(variance, draws), draws)) > MAX_BASE_SIGMA**2:
        draws += 1
    return Decomposition(float(sigma), draws, k, base)


def _largest_multiplier(variance: Fraction, draws: int) -> int:
    def required(k: int) -> Fraction:
        return MIN_SMOOTHING_VARIANCE * (1 + k * k) * _power_sum(k, draws)

    # A larger factor would need a base deviation above MAX_BASE_SIGMA.
    return bisect_right(range(1, MAX_BASE_SIGMA), variance, key=required)


def gaussian_weights(variance: Fraction) -> list[int]:
    """Return exp(-x^2 / (2 variance)) for x = 0, 1, ..., in units of 2^-256, until it falls below 2^-TAIL_BITS.

    Guarantee: each is within 2^-220 of the exact value; integer arithmetic only, so equal on every platform.
    """
    step = _exp_minus(Fraction(1, 2) / variance)
    factor, ratio = step, (step * step) >> _FIXED_BITS
    weights = [1 << _FIXED_BITS]
    while weights[-1] >> (_FIXED_BITS - TAIL_BITS):
        weights.append((weights[-1] * factor) >> _FIXED_BITS)
        factor = (factor * ratio) >> _FIXED_BITS
    return weights


def _exp_minus(y: Fraction) -> int:
    """Return exp(-y) in units of 2^-256 by its Taylor series, for 0 < y < 1."""
    term = total = 1 << _FIXED_BITS
    order = 0
    while term:
        order += 1
        term = term * y.numerator // (y.denominator * order)
        total += term if order % 2 == 0 else -term
    return total


def cumulative_bounds(weights: list[int]) -> list[int]:
    """Return the upper ends of the outcomes' intervals in [0, 2^128], in outcome order; the last is 2^128.

    Guarantee: each is the cumulative probability of ``weights`` rounded to the nearest multiple of 2^-128.
    """
    total = sum(weights)
    return [((running << (_PROBABILITY_BITS + 1)) + total) // (2 * total) for running in accumulate(weights)]


class BaseTable:
    """An inverse-CDF table over 128-bit uniforms, with a 65,536-entry index on their upper 16 bits.

    Outcome ``lowest + i`` owns the interval from the i-th bound's predecessor to the i-th bound, upper end excluded.

    Args:
        lowest: first outcome.
        bounds: upper ends as from :func:`cumulative_bounds`.
    """

    def __init__(self, lowest: int, bounds: list[int]) -> None:
        # Outcomes above a bound of 2^128 have probability zero, and 2^128 itself is never compared with.
        inner = [bound for bound in bounds if bound < 1 << _PROBABILITY_BITS]
        self._lowest = lowest
        self._high = np.array([bound >> 64 for bound in inner], np.uint64)
        self._low = [bound & (2**64 - 1) for bound in inner]
        bins = np.arange(1 << 16)
        at_start = np.searchsorted([-(-bound >> _BIN_BITS) for bound in inner], bins, side="right")
        at_end = np.searchsorted([bound >> _BIN_BITS for bound in inner], bins, side="right")
        self.index = np.where(at_start == at_end, lowest + at_start, _AMBIGUOUS).astype(np.int16)

    def resolve(self, words: NDArray[np.uint16], residues: NDArray[np.uint64]) -> NDArray[np.int16]:
        """Return the outcomes of the 128-bit uniforms ``word << 112 | residue``.

        Args:
            words: upper 16 bits, shape [m].
            residues: shape [m, 2]; after the word come the upper 48 bits of the first, then the whole second.
        """
        high = (words.astype(np.uint64) << np.uint64(48)) | (residues[:, 0] >> np.uint64(16))
        below = np.searchsorted(self._high, high)
        tied = np.take(self._high, below, mode="clip") == high
        for i in np.flatnonzero(tied):
            last = int(np.searchsorted(self._high, high[i], side="right"))
            below[i] = bisect_right(self._low, int(residues[i, 1]), int(below[i]), last)
        return (self._lowest + below).astype(np.int16)


@lru_cache(maxsize=8)
def base_table(variance: Fraction) -> BaseTable:
    """Return the table of the discrete Gaussian of this variance; it takes some 10 ms to build, and is kept."""
    half = gaussian_weights(variance)
    return BaseTable(1 - len(half), cumulative_bounds(half[:0:-1] + half))


class NoiseSampler:
    """Adds discrete Gaussian noise of one standard deviation to vectors of one ring.

    Guarantee: draw i depends on (sigma, key, i) alone: not on the ring, nor on how a range is split. With an ideal
    keystream each draw is within SAMPLER_DISTANCE of the discrete Gaussian in total variation, and draws are
    independent. The time taken depends on the key, never on the vector. Threads change no draw.

    Args:
        sigma: standard deviation in ring units, in [MIN_SIGMA, MAX_SIGMA], hit exactly.
        ring_bits: 32 or 64.

    Raises:
        ConfigError: ``noise_sigma``.
    """

    def __init__(self, sigma: float, ring_bits: Literal[32, 64]) -> None:
        self.decomposition = decompose(sigma)
        self.ring_bits = ring_bits
        self._word: type[_Word] = np.uint32 if ring_bits == 32 else np.uint64
        self._table = base_table(self.decomposition.base_variance)
        # Keystream blocks for one block of draws.
        self._blocks_of_stream = self.decomposition.draws * BLOCK * np.dtype("<u2").itemsize // BLOCK_BYTES

    def add_to(self, vector: _Vector, key: Secret, *, start: int = 0, threads: WordThreads = ONE_THREAD) -> None:
        """Add draws [start, start + len(vector)) of ``key`` to ``vector`` in place, modulo 2^ring_bits.

        Args:
            vector: shape [d], of the ring's unsigned dtype.
            key: the noise key of one (virtual worker, step, parameters); both streams are derived from it.
            start: first draw; multiples of BLOCK waste nothing.
            threads: that share the blocks.

        Raises:
            RefusedError: ``keystream_exhausted`` beyond 2^37 / n draws; the vector is then unchanged.
        """
        require_bound(vector.dtype == self._word and vector.ndim == 1, "noise is added to one vector of the ring")
        require_bound(start >= 0, "draws of noise are counted from 0")
        if vector.size == 0:
            return
        first, last = start // BLOCK, -(-(start + vector.size) // BLOCK)
        index_key, residue_key = derive(key, Purpose.NOISE_INDEX), derive(key, Purpose.NOISE_RESIDUE)
        # Starting at the end refuses a range that the stream cannot serve before anything is drawn.
        KeyStream(index_key, block_counter=last * self._blocks_of_stream)

        def add(pieces: Iterator[range]) -> None:
            scratch = _Scratch(self.decomposition, self._table, self._word, index_key, residue_key)
            for piece in pieces:
                scratch.seek((first + piece.start) * self._blocks_of_stream)
                for blocks in blocks_of([piece], scratch.room):
                    drawn = scratch.draw(first + blocks.start, first + blocks.stop)
                    # The place of the first draw in the vector, which the first and the last block may reach beyond.
                    place = (first + blocks.start) * BLOCK - start
                    part = vector[max(place, 0) : place + drawn.size]
                    np.add(part, drawn[max(-place, 0) :][: part.size], out=part)

        threads.share(threads.cut(last - first, _TOGETHER), add)


class _Scratch:
    """The streams and buffers of one thread.

    Attributes:
        room: most blocks that it draws at once.
    """

    def __init__(
        self,
        decomposition: Decomposition,
        table: BaseTable,
        word: type[_Word],
        index_key: Secret,
        residue_key: Secret,
    ) -> None:
        self.room = max(1, _TOGETHER // decomposition.draws)
        shape = (self.room, decomposition.draws, BLOCK)
        self._table = table
        self._multiplier = word(decomposition.multiplier)
        self._words = np.empty(shape, "<u2")
        self._positions = np.empty(shape, np.intp)
        self._outcomes = np.empty(shape, np.int16)
        self._total = np.empty((self.room, BLOCK), word)
        self._addend = np.empty((self.room, BLOCK), word)
        self._indices, self._residues = KeyStream(index_key), KeyStream(residue_key)

    def seek(self, block_counter: int) -> None:
        """Continue at a block of the index stream."""
        self._indices.seek(block_counter)

    def draw(self, first: int, last: int) -> _Vector:
        """Return the ring words of blocks ``first`` to ``last`` (exclusive); the next call overwrites them.

        The index stream must be where block ``first`` begins.
        """
        count = last - first
        words, positions, outcomes = self._words[:count], self._positions[:count], self._outcomes[:count]
        total, addend = self._total[:count], self._addend[:count]
        self._indices.into(words)
        np.copyto(positions, words)
        np.take(self._table.index, positions, out=outcomes, mode="clip")
        flat = outcomes.reshape(-1)
        open_words = np.flatnonzero(flat == _AMBIGUOUS)
        residues, begin = np.empty((open_words.size, 2), "<u8"), 0
        ends = np.searchsorted(open_words, words[0].size * np.arange(1, count + 1))
        for number, end in enumerate(ends.tolist(), start=first):
            self._residues.seek(0, nonce=number)
            self._residues.into(residues[begin:end])
            begin = end
        flat[open_words] = self._table.resolve(words.reshape(-1)[open_words], residues)
        np.copyto(total, outcomes[:, -1], casting="unsafe")
        for base in range(outcomes.shape[1] - 2, -1, -1):
            np.copyto(addend, outcomes[:, base], casting="unsafe")
            np.multiply(total, self._multiplier, out=total)
            np.add(total, addend, out=total)
        return total.reshape(-1)
