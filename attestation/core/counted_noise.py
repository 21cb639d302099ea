"""The noise of a release over its sensitivity, as the shares of its virtual workers add up to it.

Whoever reads a manifest computes it from the numbers that noise is drawn by: what a manifest says of its noise is a
claim. The ledger charges by it, and a dataset is unsealed by it.
"""

import math
from typing import Final

from pydantic import BaseModel, ConfigDict

ROUNDING_VARIANCE: Final = 4.0
"""The part of the noise that a proof takes, in squared ring units: a discrete Gaussian of variance s² + 4 is a
randomised rounding of a continuous one of variance s² (`docs/proofs/001-noise-sampler.md`, theorem 2)."""


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


def counted_noise(terms: NoiseTerms, shares: float) -> float:
    """Return noise over sensitivity if so many ``shares`` are unknown; 0 if none is left, or if the terms are none.

    The shares have variance ``shares * sigma^2`` in squared ring units, of which the rounding argument takes
    ``ROUNDING_VARIANCE``.
    """
    # Whoever asks may have read them from bytes of anybody's: within these no float overflows.
    usable = 0 < shares < _LARGEST and 0 < terms.sigma < _LARGEST and 0 < terms.dimension < _LARGEST
    if not (usable and terms.max_grad_norm > 0 and abs(terms.gamma_log2) < _LARGEST_EXPONENT):
        return 0.0
    variance, grid = shares * terms.sigma**2 - ROUNDING_VARIANCE, math.ldexp(1.0, terms.gamma_log2)
    return math.sqrt(max(variance, 0.0)) * grid / (terms.max_grad_norm + grid * math.sqrt(terms.dimension))
