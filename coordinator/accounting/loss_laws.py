"""The law of one release's privacy loss: probabilities of finitely many losses, which dominate the real one.

Outcomes are put on nodes by connecting the dots (Doroshenko et al., arXiv 2207.04380). Everything is kept as logarithms
of sums of positive terms. So the smallest probability has as small a relative error as the largest.

Guarantee: a law dominates the real one, up to the rounding that ``terms`` bounds (docs/proofs/015-tight-epsilon.md).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

UNIT = 2.0**-53
"""Relative error of one rounded operation."""

TERM_ERROR = 64 * UNIT
"""Error of the logarithms of a law for each unit of its ``terms``."""

_NODE_STEP = 2.0**-7
"""Most deviations of the noise between two nodes. The excess falls with its square; it is 1e-5 of epsilon here."""


@dataclass(frozen=True, slots=True, eq=False)
class LossLaw:
    """The privacy loss of one release, seen from one of two neighbours.

    Attributes:
        losses: [nodes], rounded up.
        log_masses: [nodes], logarithms of their probabilities, off by at most ``TERM_ERROR`` times ``terms``.
        beyond: probability of all other outcomes, which count as an infinite loss.
        terms: magnitudes that a logarithm was added up from.
    """

    losses: Vector
    log_masses: Vector
    beyond: float
    terms: float


Laws = tuple[LossLaw, LossLaw]
"""Of one release, from the data with an example to that without it, and back."""


def sampled_gaussian(noise_multiplier: float, stays: float, deviations: float) -> Laws:
    """Return the laws of a Gaussian sum that the example moves by 1 with chance ``stays``, in (0, 1].

    Args:
        deviations: where outcomes begin to count as an infinite loss. Their probability is below
            2 exp(-deviations^2 / 2).
    """
    return _on_nodes(1 / noise_multiplier, stays, deviations, opposite=False)


def displacing_gaussian(noise_multiplier: float, stays: float, deviations: float) -> Laws:
    """Return the laws of two Gaussian sums that move by 2 with chance ``stays``, in (0, 1), in opposite directions."""
    return _on_nodes(2 / noise_multiplier, stays, deviations, opposite=True)


def mixed(first: Laws, second: Laws, chance: float, error: float) -> Laws:
    """Return the laws of a release that also says which of two it is: the second with ``chance``, else the first.

    Args:
        chance: in (0, 1); its relative error is at most ``error``.
    """
    weights = (1 - chance * (1 - error), chance * (1 + error))

    def one(direction: int) -> LossLaw:
        laws = (first[direction], second[direction])
        return LossLaw(
            losses=np.concatenate([law.losses for law in laws]),
            log_masses=np.concatenate([law.log_masses + math.log(w) for law, w in zip(laws, weights, strict=True)]),
            beyond=sum(w * law.beyond for law, w in zip(laws, weights, strict=True)),
            terms=sum(law.terms - math.log(min(w, 1)) for law, w in zip(laws, weights, strict=True)),
        )

    return one(0), one(1)


def _on_nodes(shift: float, stays: float, deviations: float, *, opposite: bool) -> Laws:
    """Return the laws of (1 - p) N(0, 1) + p N(shift, 1) against N(0, 1); opposite: (1 - p) N(0, 1) + p N(-shift, 1).

    With the ratios N and D of the two densities to that of N(0, 1), node j has the masses N_j x_j and D_j x_j, and its
    loss is log(N_j / D_j). Each x_j is an integral over the two cells beside it.
    """
    nodes = _nodes(shift, stays, deviations, opposite)
    step = float(nodes[1] - nodes[0])
    places, weights = _gauss_rule()
    low, high, inside = nodes[:-1], nodes[1:], step * (places + 1) / 2
    density = step * weights / 2 * np.exp(-inside * (low[:, None] + inside / 2))
    to_low = _moved(high, inside - step, shift, stays, opposite) / _moved(high, -step, shift, stays, opposite)
    to_high = _moved(low, inside, shift, stays, opposite) / _moved(low, step, shift, stays, opposite)
    log_x = np.full(len(nodes), -np.inf)
    log_x[:-1] = np.log((density * to_low).sum(axis=1)) - low**2 / 2
    log_x[1:] = np.logaddexp(log_x[1:], np.log((density * to_high).sum(axis=1)) - low**2 / 2)
    log_x -= math.log(2 * math.pi) / 2

    log_stays, log_not = math.log(stays), math.log1p(-stays) if stays < 1 else -math.inf
    log_n = np.logaddexp(log_not, log_stays + shift * nodes - shift**2 / 2)
    log_d = np.logaddexp(log_not, log_stays - shift * nodes - shift**2 / 2) if opposite else np.zeros(len(nodes))
    furthest = float(np.abs(nodes).max())
    terms = (furthest + shift) ** 2 - log_stays - (log_not if stays < 1 else 0.0) + len(nodes) / 64 + 64
    beyond = 2 * math.exp(-(deviations**2) / 2)
    return (
        LossLaw(log_n - log_d + TERM_ERROR * terms, log_x + log_n, beyond, terms),
        LossLaw(log_d - log_n + TERM_ERROR * terms, log_x + log_d, beyond, terms),
    )


def _nodes(shift: float, stays: float, deviations: float, opposite: bool) -> Vector:
    """Return the outcomes that a law is put on: multiples of a power of two, so that they and their cells are exact."""
    step = 2.0 ** math.floor(math.log2(min(_NODE_STEP, 1 / (4 * shift))))
    # Where the example is rarely in, fewer deviations from its side are as unlikely.
    last = max(deviations, shift + math.sqrt(max(0.0, deviations**2 + 2 * math.log(stays))))
    first = -last if opposite else -deviations
    return np.asarray(step * np.arange(math.floor(first / step), math.ceil(last / step) + 1), dtype=np.float64)


@lru_cache(maxsize=1)
def _gauss_rule() -> tuple[Vector, Vector]:
    """Return places in [-1, 1] and weights. The relative error on a cell between two nodes is below 2^-52."""
    places, weights = np.polynomial.legendre.leggauss(8)
    return np.asarray(places), np.asarray(weights)


def _moved(start: Vector, by: Vector | float, shift: float, stays: float, opposite: bool) -> Vector:
    """Return N D_j - N_j D at ``start + by``, with node j at ``start``, over a constant factor of each node.

    [cells, places], all of one sign. Without opposite moves it is the same in each cell: [1, places].
    """
    exponents = shift * np.atleast_1d(by)
    if not opposite:
        return np.asarray(np.expm1(exponents)[None, :])
    scale = shift * np.abs(start)
    up, down = (np.exp(sign * shift * start - scale) * (1 - stays) for sign in (1, -1))
    both = np.exp(-(shift**2) / 2 - scale) * (2 * stays)
    return np.asarray(
        np.outer(up, np.expm1(exponents)) - np.outer(down, np.expm1(-exponents)) + np.outer(both, np.sinh(exponents))
    )
