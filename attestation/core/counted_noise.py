"""The noise of a release over its sensitivity, as the shares of its virtual workers add up to it.

Whoever reads a manifest computes it from the numbers that noise is drawn by: what a manifest says of its noise is a
claim. The ledger charges by it, and a dataset is unsealed by it.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

ROUNDING_VARIANCE: Final = 4.0
"""The part of the noise that a proof takes, in squared ring units: a discrete Gaussian of variance s² + 4 is a
randomised rounding of a continuous one of variance s² (`docs/proofs/001-noise-sampler.md`, theorem 2)."""

COEFFICIENT_UNIT: Final = 2**16
"""What a coefficient of correlated noise counts: the first is one, and so exactly this number."""
MOST_BANDS: Final = 64
LARGEST_COEFFICIENT: Final = 4 * COEFFICIENT_UNIT

_LARGEST: Final = 2.0**64
_LARGEST_EXPONENT: Final = 500


class NoiseTerms(BaseModel):
    """The numbers of a mechanism that its noise follows from, whatever else it states.

    Attributes:
        private: True if there is noise at all.
        noise_multiplier: the noise that is claimed, over the sensitivity.
        virtual_workers: V. honest_share: the share of them whose noise is counted on.
        sigma: standard deviation of the noise of each, in ring units.
        gamma_log2: the exponent of the grid step.
        max_grad_norm: C. dimension: d.
        coefficients: c, in 2^-16, by which a release mixes the sums of so many steps, its own first; empty, and then
            left out of the bytes, where each step's noise is its own. See docs/proofs/013-correlated-noise.md.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    private: bool
    noise_multiplier: float
    virtual_workers: int
    honest_share: float
    sigma: float
    gamma_log2: int
    max_grad_norm: float
    dimension: int
    coefficients: tuple[int, ...] = Field(default=(), exclude_if=lambda coefficients: not coefficients)


def are_coefficients(coefficients: Sequence[int]) -> bool:
    """Return whether docs/proofs/013-correlated-noise.md is about such coefficients; of none, it is."""
    if not coefficients:
        return True
    bounded = all(0 <= each <= LARGEST_COEFFICIENT for each in coefficients)
    return 2 <= len(coefficients) <= MOST_BANDS and coefficients[0] == COEFFICIENT_UNIT and bounded


def mixed_norm(coefficients: Sequence[int]) -> Fraction:
    """Return the l2 norm of the coefficients, exactly or by less than 2^-50 too much; 1 of none."""
    if not coefficients:
        return Fraction(1)
    squares = sum(each * each for each in coefficients)
    return Fraction(math.isqrt(squares << 72) + 1, COEFFICIENT_UNIT << 36)


def sensitivity_of(max_grad_norm: float, grid: float, dimension: int, coefficients: Sequence[int]) -> float:
    """Return the l2 bound of what one unit moves, by all releases that its contribution is mixed into.

    A sum that is rounded to the grid moves by C + γ√d. Mixed with ``b`` coefficients c and rounded again, it moves as
    many releases by at most ‖c‖(C + γ√d) + γ√(bd) together.
    """
    rounded = max_grad_norm + grid * math.sqrt(dimension)
    if not coefficients:
        return rounded
    norm = math.nextafter(float(mixed_norm(coefficients)), math.inf)
    return norm * rounded + grid * math.sqrt(len(coefficients) * dimension)


def counted_noise(terms: NoiseTerms, shares: float) -> float:
    """Return noise over sensitivity if so many ``shares`` are unknown; 0 if none is left, or if the terms are none.

    The shares have variance ``shares * sigma^2`` in squared ring units, of which the rounding argument takes
    ``ROUNDING_VARIANCE``.
    """
    # Whoever asks may have read them from bytes of anybody's: within these no float overflows.
    usable = 0 < shares < _LARGEST and 0 < terms.sigma < _LARGEST and 0 < terms.dimension < _LARGEST
    if not (usable and terms.max_grad_norm > 0 and abs(terms.gamma_log2) < _LARGEST_EXPONENT):
        return 0.0
    if not are_coefficients(terms.coefficients):
        return 0.0
    variance, grid = shares * terms.sigma**2 - ROUNDING_VARIANCE, math.ldexp(1.0, terms.gamma_log2)
    moved = sensitivity_of(terms.max_grad_norm, grid, terms.dimension, terms.coefficients)
    return math.sqrt(max(variance, 0.0)) * grid / moved
