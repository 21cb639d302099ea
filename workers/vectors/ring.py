"""The integer ring: its width and grid step, and how a clamped float vector becomes ring words and back.

The grid step gamma is a power of two, so scaling is exact and the only rounding is one half-to-even rounding per
coordinate. The bounds used here are proved in `docs/proofs/002-ring-and-sensitivity.md`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT, ROUNDING_VARIANCE, mixed_norm
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.vectors.noise import MAX_SIGMA, MIN_SIGMA, decompose
from raycloak.workers.vectors.threads import ONE_THREAD, PIECE_WORDS, WordThreads, blocks_of

RingBits = Literal[32, 64]
RingVector = NDArray[np.uint32] | NDArray[np.uint64]
FloatVector = NDArray[np.float32] | NDArray[np.float64]

CACHE_BLOCK_BYTES = 1 << 18
"""The size of one working block; three of them fit a level-2 cache of 1 MiB. Half the size costs 2 % of masking."""

TAIL_DEVIATIONS = 16
"""The standard deviations of the whole noise that the capacity leaves room for."""

# Sensitivity that rounding adds is paid for in noise: 1 % is cheaper than twice the bytes on the wire.
AUTO_INFLATION = 0.01
# A grid so coarse that rounding doubles the sensitivity is a configuration that nobody means.
LARGEST_INFLATION = 1.0

# The scale 2^-gamma_log2 and the clamp must be normal float32 numbers, for float32 input to be scaled exactly.
_GAMMA_LOG2_LIMIT = 120
# Of a float32.
_SIGNIFICAND_BITS = 24
_COEFFICIENT_BITS = COEFFICIENT_UNIT.bit_length() - 1
# Of sums times coefficients, in units of both: half a coefficient's unit, for the rounding, is far within 64 bits.
_LARGEST_MIX = 1 << 62
# A clamp is cut to whole grid steps: by a thousandth at most, where a coarser grid is chosen for speed.
_LEAST_CLAMP_UNITS = 1024


def ring_dtype(bits: int) -> np.dtype[Any]:
    """Return the dtype of ring words: little-endian, unsigned, of ``bits`` bits."""
    return np.dtype(f"<u{bits // 8}")


@dataclass(frozen=True, slots=True)
class RingSpec:
    """The terms of encoding and decoding: the ring Z_{2^bits}, the grid step 2^gamma_log2 and the clamp.

    ``clamp`` is a multiple of gamma and a float32 number, so float32 and float64 input are clamped alike.
    """

    bits: RingBits
    gamma_log2: int
    clamp: float

    def holds(self, virtual_workers: int, sigma: float, coefficients: Sequence[int] = ()) -> bool:
        """Return whether ``virtual_workers`` noised vectors add up as :func:`fit_ring` guarantees, on a grid as above.

        Args:
            sigma: standard deviation of one virtual worker's noise in ring units.
            coefficients: by which a vector mixes clamped sums; none where it is one.
        """
        if not abs(self.gamma_log2) <= _GAMMA_LOG2_LIMIT:
            return False
        units = Fraction(self.clamp) / Fraction(2) ** self.gamma_log2
        whole = units.denominator == 1 and units == _cut(units.numerator) and units > 0
        return whole and _is_held(virtual_workers, units.numerator, sigma, coefficients, self.bits)


def _cut(units: int) -> int:
    """Return ``units`` rounded down to an integer of at most 24 significant bits."""
    spare = max(units.bit_length() - _SIGNIFICAND_BITS, 0)
    return units >> spare << spare


def _load(virtual_workers: int, clamp_units: int, sigma: float) -> int:
    """Return the largest magnitude that the decoded sum is sized for, in ring units, rounded up."""
    # A square root of at most 2^63 is off by far less than the unit added here, next to 16·σ.
    tail = math.ceil(TAIL_DEVIATIONS * Fraction(sigma) * Fraction(math.sqrt(virtual_workers))) + 1
    return virtual_workers * clamp_units + (virtual_workers + 1) // 2 + tail


def _is_held(virtual_workers: int, clamp_units: int, sigma: float, coefficients: Sequence[int], bits: int) -> bool:
    """Return whether a ring holds the sum of so many vectors, each of which mixes clamped sums."""
    if not coefficients:
        return _load(virtual_workers, clamp_units, sigma) < 1 << (bits - 1)
    mixed = sum(coefficients) * clamp_units
    # A mix is computed in 64 bits before it is rounded.
    fits = mixed < _LARGEST_MIX
    return fits and _load(virtual_workers, -(-mixed // COEFFICIENT_UNIT), sigma) < 1 << (bits - 1)


@dataclass(frozen=True, slots=True)
class RingFit(RingSpec):
    """A ring that fits a configuration; the clamp is the wanted one, rounded down to a float32 on the grid.

    Attributes:
        sigma: standard deviation of one virtual worker's noise in ring units; 0 without noise.
        inflation: C'/C - 1, what rounding adds to the sensitivity.
    """

    sigma: float
    inflation: float


@dataclass(frozen=True, slots=True)
class RingDemand:
    """The vectors that a ring has to hold, and their demands on a grid step.

    Attributes:
        max_grad_norm: C, l2 bound of one example's contribution; positive.
        clamp: wanted bound of each coordinate of one virtual worker's sum; positive.
        dimension: d. virtual_workers: V.
        noise_multiplier: z; 0 for a run without noise, which has no bounds on sigma or inflation.
        honest_share: h in (0, 1].
        coefficients: by which a vector mixes clamped sums, in 2^-16; none where it is one.
    """

    max_grad_norm: float
    clamp: float
    dimension: int
    virtual_workers: int
    noise_multiplier: float
    honest_share: float
    coefficients: tuple[int, ...] = ()

    def clamp_units(self, gamma_log2: int) -> int:
        """Return the clamp in ring units, rounded down to what a float32 holds."""
        return _cut(math.floor(Fraction(self.clamp) / Fraction(2) ** gamma_log2))

    def needed_variance(self, gamma_log2: int) -> Fraction:
        """Return a number above (z·C'/γ)² + 4, by far less than a float rounds."""
        sensitivity = Fraction(self.max_grad_norm) / Fraction(2) ** gamma_log2 + _root(self.dimension)
        if self.coefficients:
            rounded = _root(len(self.coefficients) * self.dimension)
            sensitivity = mixed_norm(self.coefficients) * sensitivity + rounded
        return (Fraction(self.noise_multiplier) * sensitivity) ** 2 + Fraction(ROUNDING_VARIANCE)

    def is_paid_by(self, sigma: float, gamma_log2: int) -> bool:
        """Return whether noise of ``sigma`` ring units pays for the sensitivity that the grid step leaves, exactly.

        The inequality of :func:`fit_ring`.
        """
        counted = self.virtual_workers * Fraction(self.honest_share) * Fraction(sigma) ** 2
        return counted >= self.needed_variance(gamma_log2)

    def sigma(self, gamma_log2: int) -> float:
        """Return the least float that satisfies the variance inequality; infinite if far above ``MAX_SIGMA``."""
        if self.noise_multiplier == 0:
            return 0.0
        if not self.is_paid_by(2 * MAX_SIGMA, gamma_log2):
            return math.inf
        share = self.virtual_workers * Fraction(self.honest_share)
        sigma = math.sqrt(self.needed_variance(gamma_log2) / share)
        while not self.is_paid_by(sigma, gamma_log2):
            sigma = math.nextafter(sigma, math.inf)
        return sigma

    def inflation(self, gamma_log2: int) -> float:
        """Return C'/(‖c‖C) - 1."""
        rounded = math.ldexp(math.sqrt(self.dimension), gamma_log2) / self.max_grad_norm
        bands = len(self.coefficients)
        return rounded * (1 + math.sqrt(bands) / float(mixed_norm(self.coefficients))) if bands else rounded

    def __str__(self) -> str:
        return (
            f"{self.virtual_workers} virtual workers, clamp {self.clamp:g}, max_grad_norm {self.max_grad_norm:g}, "
            f"noise multiplier {self.noise_multiplier:g}, honest share {self.honest_share:g}, "
            f"dimension {self.dimension}"
        )


def fit_ring(
    demand: RingDemand,
    *,
    bits: Literal["auto", 32, 64] = "auto",
    least_clamp: float | None = None,
    affordable: Callable[[float], bool] | None = None,
) -> RingFit:
    """Return a grid on which the clamped, noised vectors of all virtual workers can be summed.

    It is the finest one, or the finest of those whose noise takes the fewest base draws at an affordable inflation.

    Guarantee: the sum of V clamped vectors cannot overflow, and overflows with noise only beyond 16 standard
    deviations of the whole noise: V·clamp/γ + V/2 + 16·σ·√V < 2^(bits-1), with Σc·clamp for the clamp where vectors
    mix sums. Noise pays for the rounded sensitivity: V·h·σ² ≥ (z·C'/γ)² + 4 with C' = C + γ√d, or
    ‖c‖(C + γ√d) + γ√(bd) where b sums are mixed, in exact arithmetic, and 16 ≤ σ ≤ 2^40.

    Args:
        bits: ring width; ``auto`` takes 32 when the inflation is below 1 %, else 64.
        least_clamp: ``auto`` may halve the clamp down to this one where that keeps 32 bits; None keeps it whole. Any
            clamp is private; one that binds changes what is learned.
        affordable: whether an inflation may be paid for fewer base draws; asked once for each number of draws, in
            growing inflation. It has no say in the width. None keeps the finest grid.

    Raises:
        ConfigError: ``ring_capacity`` or ``ring_sigma``, with the numbers.
    """
    positive = min(demand.max_grad_norm, demand.clamp, demand.dimension, demand.virtual_workers) > 0
    require_bound(positive, "clip, clamp, dimension and virtual workers are above 0")
    require_bound(demand.noise_multiplier >= 0, "a noise multiplier is at least 0")
    require_bound(0 < demand.honest_share <= 1, "the noise that is counted on is a share in (0, 1]")
    demand, finest = _auto_fit(demand, least_clamp or demand.clamp) if bits == "auto" else (demand, _fit(demand, bits))
    return finest if affordable is None or finest.sigma == 0 else _fewest_draws(demand, finest, affordable)


def _root(number: int) -> Fraction:
    """Return a number above √number, by far less than a float rounds."""
    return Fraction(math.isqrt(number << 104) + 1, 1 << 52)


def _fit(demand: RingDemand, bits: RingBits) -> RingFit:
    for gamma_log2 in range(-_GAMMA_LOG2_LIMIT, _GAMMA_LOG2_LIMIT + 1):
        units, sigma = demand.clamp_units(gamma_log2), demand.sigma(gamma_log2)
        held = sigma <= MAX_SIGMA and _is_held(demand.virtual_workers, units, sigma, demand.coefficients, bits)
        if held:
            return _accepted(demand, bits, gamma_log2, sigma)
    raise _capacity(demand, bits, "No grid step holds the sum")


def _auto_fit(demand: RingDemand, least_clamp: float) -> tuple[RingDemand, RingFit]:
    """Return the finest grid in the narrowest ring that takes it, and the demand that it meets."""
    tried = demand
    while tried.clamp >= least_clamp:
        try:
            narrow = _fit(tried, 32)
        except ConfigError:
            narrow = None
        if narrow is not None and narrow.inflation < AUTO_INFLATION:
            return tried, narrow
        tried = replace(tried, clamp=tried.clamp / 2)
    return demand, _fit(demand, 64)


def _fewest_draws(demand: RingDemand, finest: RingFit, affordable: Callable[[float], bool]) -> RingFit:
    """Return the fit with the fewest base draws whose inflation is affordable, on the finest grid for that number.

    Noise takes a base draw less with each factor of about 150 by which the grid is coarser.
    """
    chosen, draws = finest, decompose(finest.sigma).draws
    for gamma_log2 in range(finest.gamma_log2 + 1, _GAMMA_LOG2_LIMIT + 1):
        sigma = demand.sigma(gamma_log2)
        # A clamp of few units would be cut: it is a whole number of them.
        if draws == 1 or sigma < MIN_SIGMA or demand.clamp_units(gamma_log2) < _LEAST_CLAMP_UNITS:
            break
        fewer = decompose(sigma).draws
        if fewer < draws:
            inflation = demand.inflation(gamma_log2)
            if inflation > LARGEST_INFLATION or not affordable(inflation):
                break
            chosen, draws = _accepted(demand, finest.bits, gamma_log2, sigma), fewer
    return chosen


def _accepted(demand: RingDemand, bits: RingBits, gamma_log2: int, sigma: float) -> RingFit:
    """Return the fit at this grid step, or raise the refusal that says why it is too coarse."""
    inflation = demand.inflation(gamma_log2)
    units = demand.clamp_units(gamma_log2)
    if units == 0:
        why = f"The clamp is below the grid step 2^{gamma_log2}"
        raise _capacity(demand, bits, why, "Raise ring.clamp, or dp_config.max_grad_norm where no clamp is given.")
    if sigma and sigma < MIN_SIGMA:
        raise ConfigError(
            "ring_sigma",
            f"A {bits}-bit ring leaves the noise of one virtual worker {sigma:.3g} ring units, below {MIN_SIGMA:g} "
            f"({demand}, grid step 2^{gamma_log2}).",
            _remedy(bits),
        )
    if sigma and inflation > LARGEST_INFLATION:
        raise _capacity(demand, bits, f"The grid step 2^{gamma_log2} would inflate the sensitivity by {inflation:.3g}")
    return RingFit(bits, gamma_log2, math.ldexp(float(units), gamma_log2), sigma, inflation)


def _capacity(demand: RingDemand, bits: RingBits, why: str, remedy: str = "") -> ConfigError:
    return ConfigError("ring_capacity", f"{why} in a {bits}-bit ring ({demand}).", remedy or _remedy(bits))


def _remedy(bits: RingBits) -> str:
    return f"Lower the clamp or use fewer virtual workers{', or set the ring to 64 bits' if bits == 32 else ''}."


def encode_into(values: FloatVector, spec: RingSpec, out: RingVector, threads: WordThreads = ONE_THREAD) -> None:
    """Clamp ``values`` [d], scale by 2^-gamma_log2, round half to even and write the ring words to ``out`` [d].

    Guarantee: for any x, x' the results differ by at most ‖x − x'‖/γ + √d in l2, in centred ring units. The words
    depend only on the real numbers given, not on their float type, on block boundaries or on threads. The work done
    depends on d alone, not on the values.

    Args:
        out: may be a view of the memory of ``values`` where both have elements of one size.
        threads: that share the blocks.

    Raises:
        ProtocolError: ``encode_non_finite``; a caller's bug, since per-example gradients are made finite before
            they are summed. ``out`` is then undefined.
    """
    require_bound(values.ndim == 1 and values.shape == out.shape, "a vector and its words have one length")
    exact = out.dtype == ring_dtype(spec.bits) and values.dtype in (np.float32, np.float64)
    require_bound(exact, "floats of 32 or 64 bits become words of the ring")
    ahead = values.itemsize != out.itemsize and np.may_share_memory(values, out)
    require_bound(not ahead, "no word is written over a value that is still to be read")
    # Twice the usual: the scratch alone stays in the cache, and threads wait less for each other in longer operations.
    block = 2 * CACHE_BLOCK_BYTES // values.itemsize
    # Scalars of the input's own type: each is exact in float32 (see RingSpec).
    high, scale = values.dtype.type(spec.clamp), values.dtype.type(math.ldexp(1.0, -spec.gamma_log2))
    words = out.view(np.int32 if spec.bits == 32 else np.int64)

    def encode(pieces: Iterator[range]) -> None:
        scratch, finite = np.empty(block, values.dtype), np.empty(block, np.bool_)
        for place in blocks_of(pieces, block):
            part = values[place]
            work = scratch[: len(part)]
            if not np.isfinite(part, out=finite[: len(part)]).all():
                raise ProtocolError("encode_non_finite", "a virtual worker's sum is not finite")
            np.clip(part, -high, high, out=work)
            np.multiply(work, scale, out=work)
            np.rint(work, out=work)
            np.copyto(words[place], work, casting="unsafe")

    threads.share(threads.cut(len(values), PIECE_WORDS), encode)


def mix_into(
    sums: Sequence[RingVector], coefficients: Sequence[int], out: RingVector, threads: WordThreads = ONE_THREAD
) -> None:
    """Write the mix of encoded sums [d] to ``out`` [d], in 64 bits exactly and rounded half to even once.

    Args:
        sums: of the newest step first, at most as many as ``coefficients``; those that lack are zero.
        coefficients: in units of 2^-16.
        out: memory of its own, of the ring of the sums.
    """
    require_bound(0 < len(sums) <= len(coefficients), "a mix has a coefficient for each sum")
    require_bound(all(each.shape == out.shape and each.dtype == out.dtype for each in sums), "sums have one ring")
    signed = np.int32 if out.itemsize == 4 else np.int64
    words, block, half = out.view(signed), CACHE_BLOCK_BYTES // 8, COEFFICIENT_UNIT // 2

    def mix(pieces: Iterator[range]) -> None:
        total, scratch, rest = (np.empty(block, np.int64) for _ in range(3))
        for place in blocks_of(pieces, block):
            length = place.stop - place.start
            mixed, term, left = total[:length], scratch[:length], rest[:length]
            mixed.fill(0)
            for each, coefficient in zip(sums, coefficients, strict=False):
                np.multiply(each.view(signed)[place], coefficient, out=term, dtype=np.int64)
                np.add(mixed, term, out=mixed)
            np.bitwise_and(mixed, COEFFICIENT_UNIT - 1, out=left)
            np.right_shift(mixed, _COEFFICIENT_BITS, out=mixed)
            # Up above the half, and at it where the quotient is odd.
            np.add(left, np.bitwise_and(mixed, 1, out=term), out=left)
            np.add(mixed, left > half, out=mixed)
            np.copyto(words[place], mixed, casting="unsafe")

    threads.share(threads.cut(len(out), PIECE_WORDS), mix)


def decode(total: RingVector, gamma_log2: int, out: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return the real vector [d] that ring words stand for: centred lift times 2^gamma_log2.

    Exact while the lift fits 53 bits, as it always does in a 32-bit ring; beyond that, correctly rounded to float64.

    Args:
        out: where to write it, [d]; a new array if absent.
    """
    lifted = np.empty(len(total)) if out is None else out
    np.copyto(lifted, total.view(np.int32 if total.itemsize == 4 else np.int64))
    return np.multiply(lifted, math.ldexp(1.0, gamma_log2), out=lifted)
