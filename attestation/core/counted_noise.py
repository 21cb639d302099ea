"""The noise of a release over its sensitivity, as the shares of its virtual workers add up to it.

Whoever reads a manifest computes it from the numbers that noise is drawn by: what a manifest says of its noise is a
claim. The ledger charges by it, and a dataset is unsealed by it.
"""

import math
from typing import Final, Protocol

ROUNDING_VARIANCE: Final = 4.0
"""The part of the noise that a proof takes, in squared ring units: a discrete Gaussian of variance s² + 4 is a
randomised rounding of a continuous one of variance s² (`docs/proofs/001-noise-sampler.md`, theorem 2)."""


class NoiseTerms(Protocol):
    """The numbers of a mechanism that its noise follows from; see `raycloak.workers.terms.mechanism.Mechanism`."""

    @property
    def private(self) -> bool:
        """Whether there is noise at all."""
        ...

    @property
    def noise_multiplier(self) -> float:
        """The noise that is claimed, over the sensitivity."""
        ...

    @property
    def virtual_workers(self) -> int:
        """V."""
        ...

    @property
    def honest_share(self) -> float:
        """The share of them whose noise is counted on."""
        ...

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise of each, in ring units."""
        ...

    @property
    def gamma_log2(self) -> int:
        """The exponent of the grid step."""
        ...

    @property
    def max_grad_norm(self) -> float:
        """C."""
        ...

    @property
    def dimension(self) -> int:
        """d."""
        ...


def counted_noise(terms: NoiseTerms, shares: float) -> float:
    """Return noise over sensitivity if so many ``shares`` are unknown; 0 if none is left, or if the terms are none.

    The shares have variance ``shares * sigma^2`` in squared ring units, of which the rounding argument takes
    ``ROUNDING_VARIANCE``.
    """
    variance = shares * terms.sigma**2 - ROUNDING_VARIANCE
    if not (variance > 0 and terms.sigma > 0 and terms.max_grad_norm > 0 and terms.dimension > 0):
        return 0.0
    grid = math.ldexp(1.0, min(terms.gamma_log2, 1000))
    return math.sqrt(variance) * grid / (terms.max_grad_norm + grid * math.sqrt(terms.dimension))
