"""Delta and epsilon of composed Gaussian sums, by other mathematics than the accountant's.

`exact_delta` inverts a Laplace transform: it has no grid of losses, no dominating law and no Fourier transform of one.
`lower_epsilon` bounds epsilon from below, where an example is so rarely drawn that the first converges too slowly.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import ndtr
from scipy.stats import binom

from raycloak.coordinator.accounting.releases import Release

Vector = NDArray[np.float64]

_AT, _WEIGHT = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True)
class Outcomes:
    """Places at which a smooth integral over one release's outcomes is exact.

    Attributes:
        losses: at each. logs: of the first law's weights.
    """

    losses: Vector
    logs: Vector

    def log_moment(self, order: float) -> float:
        """Return log E exp(order * loss)."""
        terms = self.logs + order * self.losses
        return float(terms.max() + np.log(np.exp(terms - terms.max()).sum()))


def exact_delta(releases: Sequence[Release], epsilon: float, removed: bool) -> float:
    """Return delta at ``epsilon``, to eight digits; a cut release has one slice size.

    ``delta = E (1 - e^(eps - L))+ = 1/(2 pi i) int M(s) e^(-s eps) / (s (s + 1)) ds`` along Re s = c, with
    ``M(s) = E e^(sL)``. The integrand is analytic, so equal steps converge exponentially; the step follows from how
    much of the law is further than half a period away.

    Args:
        removed: whether the first of two neighbours has the example.
    """
    coarse = [(_outcomes(release, removed, 1.0), release.count) for release in releases]

    def log_moment(order: float) -> float:
        return sum(count * law.log_moment(order) for law, count in coarse)

    saddle, height = _least(lambda order: log_moment(order) - order * epsilon)
    middle = 0.97 * saddle
    below = (30 - height) / middle
    above = _least(lambda more: (log_moment(middle + more) - (middle + more) * epsilon + 30 - height) / more)[1]
    step = 2 * math.pi / max(below, above)
    scale = math.exp(log_moment(middle) - middle * epsilon)
    total, done, last = 0.0, 0, 32
    while True:
        terms = _integrand(releases, epsilon, removed, middle, step * np.arange(done, last))
        total += float(terms.real.sum()) - (float(terms[0].real) / 2 if done == 0 else 0.0)
        if np.abs(terms[-4:]).max() * last < 1e-10 * abs(total):
            return total * step / math.pi * scale
        assert last < 4096, "it converges too slowly for a test"
        done, last = last, 2 * last


def _integrand(
    releases: Sequence[Release], epsilon: float, removed: bool, middle: float, heights: Vector
) -> NDArray[np.complex128]:
    """Return the integrand at ``middle + i heights``, over its value at ``middle``."""
    logs = np.zeros(len(heights), dtype=np.complex128)
    for release in releases:
        law = _outcomes(release, removed, float(heights[-1]) + 1)
        weights = np.exp(law.logs + middle * law.losses - law.log_moment(middle))
        kept = weights > 1e-20
        losses, weights = law.losses[kept], weights[kept]
        logs += release.count * np.log([weights @ np.exp(1j * height * losses) for height in heights])
    at = middle + 1j * heights
    return np.asarray(np.exp(logs - 1j * heights * epsilon) / (at * (at + 1)))


def _outcomes(release: Release, removed: bool, largest_height: float) -> Outcomes:
    """Return outcomes so dense that exp(i height loss) is integrated to all digits."""
    found = [_of_one(*kind, removed, largest_height) for kind in _kinds(release)]
    return Outcomes(*(np.concatenate([getattr(each, name) for each in found]) for name in ("losses", "logs")))


def _kinds(release: Release) -> Iterator[tuple[float, float, float, bool]]:
    """Yield weight, shift over noise, chance, and whether both mixtures are moved, oppositely (proof 007)."""
    chance, shift = 0.0, 1 / release.noise_multiplier
    if release.cut:
        (size,), capacity = release.cut.slice_sizes, release.cut.capacity
        others = np.arange(capacity, size)
        law = binom.pmf(others, size - 1, release.sample_rate)
        chance = float(law.sum())
        stays = float((law * release.sample_rate * capacity / (others + 1)).sum()) / chance
        yield chance, 2 * shift, stays, True
    yield 1 - chance, shift, release.sample_rate, False


def _of_one(
    weight: float, shift: float, stays: float, opposite: bool, removed: bool, largest_height: float
) -> Outcomes:
    def ratio(at: Vector, direction: int) -> Vector:
        rest = math.log1p(-stays) if stays < 1 else -math.inf
        return np.logaddexp(rest, math.log(stays) + direction * shift * at - shift**2 / 2)

    def second(at: Vector) -> Vector:
        return ratio(at, -1) if opposite else np.zeros_like(at)

    def loss(at: Vector) -> Vector:
        return ratio(at, 1) - second(at)

    furthest = 26.0
    rough = np.arange(-furthest - opposite * shift, furthest + shift, 0.25)
    pieces = np.maximum(1, np.ceil(np.abs(np.diff(loss(rough))) * largest_height / 12)).astype(int)
    cells = zip(rough[:-1], rough[1:], pieces, strict=True)
    ends = np.concatenate([np.linspace(low, high, count, endpoint=False) for low, high, count in cells])
    widths = np.diff(np.append(ends, rough[-1])) / 2
    at = (ends + widths)[:, None] + widths[:, None] * _AT
    logs = -(at**2) / 2 - math.log(2 * math.pi) / 2 + np.log(widths[:, None] * _WEIGHT) + math.log(weight)
    at, logs = at.ravel(), logs.ravel()
    if removed:
        return Outcomes(loss(at), logs + ratio(at, 1))
    return Outcomes(-loss(at), logs + second(at))


def _least(function: Callable[[float], float]) -> tuple[float, float]:
    found = minimize_scalar(
        lambda log: function(math.exp(log)), bounds=(-18, 14), method="bounded", options={"xatol": 1e-3}
    )
    return math.exp(found.x), float(found.fun)


def lower_epsilon(release: Release, delta: float, often: float, interval: float, largest: float) -> float:
    """Return a lower bound on epsilon of a sampled Gaussian, from the side that removes an example.

    Outcomes with a loss below ``often`` are merged into one, and all other losses are rounded down to a grid that has
    the merged one's loss among its places. Both are channels' outputs, or lower losses. The sum is computed in extended
    precision, whose rounding is below a thousandth of delta here.

    Args:
        largest: losses above it are left out.
    """
    q, shift = release.sample_rate, 1 / release.noise_multiplier
    edges = often + interval * np.arange(int((largest - often) / interval) + 1)
    at = (np.log1p(np.expm1(edges) / q) + shift**2 / 2) / shift
    still, moved = ndtr(-at), ndtr(shift - at)
    with_it = (1 - q) * still + q * moved
    merged = math.log1p(-q * (moved[0] - still[0]) / (1 - still[0]))
    size = 2 ** math.ceil(math.log2(1.5 * largest / interval))
    law = np.zeros(size, dtype=np.longdouble)
    law[0] = 1 - with_it[0]
    law[math.floor((often - merged) / interval) + np.arange(len(edges) - 1)] += with_it[:-1] - with_it[1:]
    composed = np.fft.irfft(np.fft.rfft(law) ** release.count, size)
    losses = release.count * merged + interval * np.arange(size)
    low, high = 0.0, largest
    for _ in range(50):
        middle = (low + high) / 2
        above = losses > middle
        found = float((-np.expm1(middle - losses[above]) * composed[above]).sum())
        low, high = (middle, high) if found > delta else (low, middle)
    return low
