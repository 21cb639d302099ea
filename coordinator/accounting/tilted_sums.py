"""Epsilon of the sum of many privacy losses, with an error that is a share of delta.

Laws on a grid are convolved by Fourier transforms, whose rounding error is a share of the largest probability. A small
delta lies far out in the tail, below that error. So each law is tilted first: a loss l gets the weight exp(theta l).
Then the losses that decide about delta are likely ones. The weight is taken back at the end.

Guarantee: no epsilon is below the true one, float rounding included (docs/proofs/015-tight-epsilon.md).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raycloak.coordinator.accounting.loss_laws import TERM_ERROR, UNIT, LossLaw, Vector

TRANSFORM_ERROR = 8 * UNIT
"""Relative error of a transform in the Euclidean norm, for each doubling of its length (Higham 2002, theorem 24.2)."""

SPARE = 2.0**-16
"""Share of delta that may go to losses outside the window, which a transform wraps into it."""

LARGEST_ROUNDING = 2.0**-4
"""Most that rounding errors may add to delta, as a share of it. Epsilon then grows by less than a hundredth."""

SMALLEST_DELTA = 2.0**-450
"""Above it, the weights that take a tilt back are within a float64."""

SETTLED = 2e-3
"""Relative change of epsilon under a halved interval at which it counts as settled; three times the excess that is
left."""

LARGEST_GRID = 2**21
"""Most points of a transform, which takes 0.1 s with so many."""

_FIRST_GRID = 2**10

_MANY_POINTS = 2**14
"""Length of a transform above which another window may be cheaper."""

_MOST_WINDOWS = 12

_STRAY = 2.0**-6
"""Share of delta above which the transforms' error is worth another window."""

_LARGEST_TILT = 64.0
"""Of a grid of interval 1: larger tilts see nothing but its last place."""

_RESOLUTION = 1e-9
"""Share of the window's end to which epsilon is solved for."""

Parts = Sequence[tuple[LossLaw, int]]
"""Laws of releases, seen from the same one of two neighbours, and how often each is released."""


class FloatsExceeded(ArithmeticError):
    """Rounding errors would take more than ``LARGEST_ROUNDING`` of delta, or delta is below ``SMALLEST_DELTA``."""


def reach(delta: float, count: int) -> float:
    """Return the deviations beyond which ``count`` releases' outcomes take ``SPARE`` of ``delta`` together at most."""
    return math.ceil(8 * math.sqrt(2 * (_spare(delta) + math.log(2 * count)))) / 8


def settled_epsilon(parts: Parts, delta: float, enough: float = 0.0) -> tuple[float, float]:
    """Return epsilon on a grid that is fine enough, and the grid's interval.

    Guarantee: not below the true one.

    Args:
        enough: an epsilon at which the search may end before it has settled.

    Raises:
        FloatsExceeded: as it says.
    """
    if delta < SMALLEST_DELTA:
        raise FloatsExceeded
    # A coarse grid to begin with, of a power of two.
    nodes = [(law.losses, law.log_masses, count) for law, count in parts]
    _, top = _least(lambda tilt: (_log_moment(nodes, tilt) + _spare(delta)) / tilt, 2.0**40)
    largest = max(float(np.abs(law.losses).max()) for law, _ in parts)
    interval = 2.0 ** math.floor(math.log2(min(top / _FIRST_GRID, largest)))
    best = _on_grid(parts, delta, interval, enough)
    while best.epsilon > enough and 2 * best.points <= LARGEST_GRID:
        interval /= 2
        found = _on_grid(parts, delta, interval, enough)
        before, best = best, min(best, found, key=lambda each: each.epsilon)
        if before.epsilon - best.epsilon <= SETTLED * best.epsilon:
            break
    if best.epsilon > enough and best.stray > LARGEST_ROUNDING:
        raise FloatsExceeded
    return best.epsilon, interval


def epsilon_on_grid(parts: Parts, delta: float, interval: float) -> float:
    """Return epsilon on the grid of ``interval``, a power of two; the rest as :func:`settled_epsilon`."""
    return _on_grid(parts, delta, interval).epsilon


def _on_grid(parts: Parts, delta: float, interval: float, enough: float = 0.0) -> "_Found":
    """Return epsilon on a grid, by the first window and tilt whose rounding errors are small, or the smallest epsilon.

    Args:
        enough: an epsilon at which any rounding errors will do.
    """
    grid = _Grid.of(parts, delta, interval)
    window = grid.anywhere()
    if grid.points(window) > _MANY_POINTS:
        window = min(window, grid.around(grid.by_chernoff(), 1.0), key=grid.points)
    best = grid.epsilon(grid.tail(window))
    for doubled in range(_MOST_WINDOWS):
        if best.stray <= _STRAY or best.epsilon <= enough:
            return best
        again = grid.epsilon(grid.tail(grid.around(best.epsilon, 2.0**doubled / 4)))
        settled = again.stray < math.inf and best.epsilon - again.epsilon <= SETTLED * again.epsilon
        best = min(best, again, key=lambda each: each.epsilon)
        if settled:
            break
    limit = best.epsilon
    for _ in range(_MOST_WINDOWS):
        if best.stray <= _STRAY or best.epsilon <= enough:
            return best
        limit /= 2
        best = min(best, grid.apart(limit, best.epsilon), key=lambda each: each.epsilon)
    return best


@dataclass(frozen=True, slots=True)
class _Found:
    """An epsilon.

    Attributes:
        stray: share of delta that the transforms' error takes; infinite if it is not known.
        points: length of the transform.
    """

    epsilon: float
    stray: float
    points: int


@dataclass(frozen=True, slots=True)
class _Window:
    """The losses among which epsilon is looked for. The choice decides how tight the result is, never whether it holds.

    Attributes:
        bottom, top: the losses that a transform holds; no epsilon below ``bottom`` is found.
        tilt: theta.
        far_tilt: whose Chernoff bound covers the losses above the window.
    """

    bottom: float
    top: float
    tilt: float
    far_tilt: float


@dataclass(frozen=True, slots=True, eq=False)
class _Tail:
    """The sum of losses, as far as delta is concerned; probabilities are over delta.

    Attributes:
        bottom, end: of the window.
        losses: [points], ascending by one interval.
        weighted: [points], their probabilities.
        beyond: of all losses above the window, infinite ones included.
        log_stray: logarithm of what the transforms' error may add at an epsilon of 0.
        tilt: by which that falls as epsilon grows.
    """

    bottom: float
    end: float
    losses: Vector
    weighted: Vector
    beyond: float
    log_stray: float
    tilt: float

    def share(self, epsilon: float) -> float:
        """Return an upper bound on the true delta at ``epsilon``, over delta."""
        above = slice(int(np.searchsorted(self.losses, epsilon, side="right")), None)
        inside = -float((np.expm1(epsilon - self.losses[above]) * self.weighted[above]).sum())
        return inside + self.stray(epsilon) + self.beyond

    def stray(self, epsilon: float) -> float:
        """Return the part of it that the transforms' error takes."""
        return float(_exp(self.log_stray - self.tilt * epsilon))


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Laws of releases on one grid of losses.

    Attributes:
        places: per law, of each loss on the grid; they may repeat.
        nodes: per law, the losses, the logarithms of their probabilities, and how often it is released.
    """

    parts: Parts
    delta: float
    interval: float
    places: tuple[NDArray[np.int64], ...]
    nodes: tuple[tuple[Vector, Vector, int], ...]

    @classmethod
    def of(cls, parts: Parts, delta: float, interval: float) -> "_Grid":
        """Give each loss to the two places beside it, such that the mean of exp(-loss) stays."""
        found = [_spread(law, interval) for law, _ in parts]
        nodes = tuple(
            (interval * at.astype(np.float64), logs, count) for (at, logs), (_, count) in zip(found, parts, strict=True)
        )
        return cls(parts, delta, interval, tuple(at for at, _ in found), nodes)

    def anywhere(self) -> _Window:
        """Return the narrowest window from 0 on that does for every epsilon."""
        far, top = self._least(lambda tilt: (_log_moment(self.nodes, tilt) + 2 * _spare(self.delta)) / tilt)
        # Of a part of a law, all losses together may be rarer than is spared.
        top = max(top, self.interval)
        return _Window(0.0, top, _spare(self.delta) / top, far)

    def around(self, epsilon: float, below: float) -> _Window:
        """Return a window around ``epsilon``, above 0, with the tilt at which that is about the mean loss.

        Args:
            below: how much of the window lies below ``epsilon``, as a share of what lies above.
        """
        tilt, _ = self._least(lambda tilt: _log_moment(self.nodes, tilt) - tilt * epsilon)

        def width(more: float) -> float:
            return (_log_moment(self.nodes, tilt + more) - (tilt + more) * epsilon + _spare(self.delta)) / more

        more, above = self._least(width)
        above = max(above, _spare(self.delta) / tilt)
        return _Window(max(0.0, epsilon - below * above), epsilon + above, tilt, tilt + more)

    def _least(self, function: Callable[[float], float]) -> tuple[float, float]:
        return _least(function, _LARGEST_TILT / self.interval)

    def points(self, window: _Window) -> int:
        """Return the length of the transform, a power of two."""
        return int(2 ** math.ceil(math.log2((window.top - window.bottom) / self.interval + 2)))

    def epsilon(self, *tails: "_Tail") -> _Found:
        """Return the least epsilon that tails show, which together bound the sum of all losses.

        Guarantee: it is not below the true one.
        """
        from scipy.optimize import brentq

        def share(epsilon: float) -> float:
            return sum(tail.share(epsilon) for tail in tails)

        bottom, end = max(tail.bottom for tail in tails), max(tail.end for tail in tails)
        points = max(len(tail.losses) for tail in tails)
        if share(bottom) <= 1:
            return _Found(bottom, math.inf if bottom else 0.0, points)
        if share(end) > 1:
            return _Found(self.by_chernoff(), math.inf, points)
        resolution = _RESOLUTION * end
        found = float(brentq(lambda epsilon: math.log(share(epsilon)), bottom, end, xtol=resolution))
        while share(found) > 1:
            found += resolution
        return _Found(found, sum(tail.stray(found) for tail in tails), points)

    def by_chernoff(self) -> float:
        """Return an epsilon by Chernoff's bound, which is Renyi's at the best order."""
        beyond = sum(count * law.beyond for law, count in self.parts)
        if beyond >= self.delta:
            return math.inf
        log_delta = math.log(self.delta - beyond)

        def bound(tilt: float) -> float:
            return (_log_moment(self.nodes, tilt) + self._law_error(tilt) - log_delta) / tilt

        return self._least(bound)[1]

    def tail(self, window: _Window) -> "_Tail":
        """Return what the sum of all losses has above any epsilon in the window.

        Raises:
            FloatsExceeded: as it says.
        """
        masses, error = self.convolved(window)
        return self._taken_back(window, masses, error, error)

    def apart(self, limit: float, near: float) -> _Found:
        """Return an epsilon from the sums without and with a loss above ``limit``, each under a tilt of its own.

        Where few losses are large, a tilt that suits the many sees nothing but the few (proof 015, section 6).

        Args:
            near: an epsilon that it is expected to be near.
        """
        kept = [losses <= limit for losses, *_ in self.nodes]
        if not all(keep.any() for keep in kept):
            return _Found(math.inf, math.inf, 0)
        places = tuple(at[keep] for at, keep in zip(self.places, kept, strict=True))
        nodes = tuple((at[keep], logs[keep], count) for (at, logs, count), keep in zip(self.nodes, kept, strict=True))
        often = replace(self, places=places, nodes=nodes)
        tail = often.tail(often.anywhere())
        if tail.stray(near) > _STRAY / 2:
            tail = often.tail(often.around(near, 1.0))
        return self.epsilon(tail, self._rare(limit))

    def _rare(self, limit: float) -> "_Tail":
        """Return what the sums that have a loss above ``limit`` have above any epsilon."""
        chance = sum(count * float(np.exp(logs[at > limit]).sum()) for at, logs, count in self.nodes)
        below = max(1.0, math.log(max(chance, self.delta * SPARE)) + _spare(self.delta))
        far, top = self._least(lambda tilt: (_log_moment(self.nodes, tilt) + below + _spare(self.delta)) / tilt)
        window = _Window(0.0, top, below / top, far)
        return self._taken_back(window, *self.convolved_apart(window, limit))

    def convolved_apart(self, window: _Window, limit: float) -> tuple[Vector, float, float]:
        """Return what :meth:`convolved` does, of the sums that have a loss above ``limit`` alone, and their growth.

        Proof 015, section 6. Growth is what :meth:`_taken_back` calls so.
        """
        size, count = self.points(window), sum(count for _, count in self.parts)
        without, difference, moved = np.ones(1, dtype=np.complex128), np.zeros(1, dtype=np.complex128), 0.0
        for (often, rare), (_, _, times) in zip(self.folded(window, size, limit), self.nodes, strict=True):
            power, more = _repeated_apart(np.fft.rfft(often), np.fft.rfft(rare), times)
            without, difference = without * power, difference * (power + more) + without * more
            moved += times * float(rare.sum())
        transform, products = self._roundings(size)
        error = moved * (2 * count + 3) * (transform + products)
        return np.fft.irfft(difference, size), error, count * transform

    def _taken_back(self, window: _Window, masses: Vector, error: float, growth: float) -> "_Tail":
        """Return the tail of a law of sums from its probabilities under the window's tilt.

        Args:
            error: bound on the Euclidean norm of what their rounding errors are.
            growth: by which no transform exceeds 1, over the root of its length.
        """
        size, first, tilt = len(masses), math.floor(window.bottom / self.interval), window.tilt
        factor = self._law_error(tilt) + math.sqrt(size) * growth + 8 * UNIT * size
        if factor > LARGEST_ROUNDING:
            raise FloatsExceeded
        losses = self.interval * (first + np.arange(size, dtype=np.float64))
        end = self.interval * (first + size)
        # Logarithms over delta: of what takes the tilt back, and of Chernoff's bound on losses above the window.
        scale = _log_moment(self.nodes, tilt) - math.log(self.delta)
        far = _log_moment(self.nodes, window.far_tilt) - window.far_tilt * end - math.log(self.delta)
        infinite = sum(count * law.beyond / self.delta for law, count in self.parts)
        norm = 1 / (self.interval * tilt * (2 * tilt + 1) * (2 * tilt + 2)) + 1 / (tilt + 1) ** 2
        return _Tail(
            bottom=window.bottom,
            end=end,
            losses=losses,
            weighted=np.roll(np.maximum(masses, 0), -(first % size)) * _exp(factor + scale - tilt * losses),
            beyond=float(_exp(far + self._law_error(window.far_tilt))) + infinite,
            log_stray=factor + scale + math.log(max(error * math.sqrt(norm), 1e-300)),
            tilt=tilt,
        )

    def convolved(self, window: _Window) -> tuple[Vector, float]:
        """Return the law of the sum of all losses, tilted and wrapped, and the Euclidean norm that its error may have.

        Proof 015, section 5.
        """
        size = self.points(window)
        # Of each transform, less 1: where most of a law is at loss 0, its error is a share of the rest alone.
        spectrum, moved = np.zeros(size // 2 + 1, dtype=np.complex128), 0.0
        for (law, _), (_, _, count) in zip(self.folded(window, size), self.nodes, strict=True):
            law[0] -= 1
            spectrum = _times(spectrum, _repeated(np.fft.rfft(law), count))
            moved += count * math.sqrt(float(np.square(law).sum()))
        masses = np.fft.irfft(spectrum, size)
        masses[0] += 1
        transform, products = self._roundings(size)
        return masses, moved * (transform + products) + 3 * transform

    def folded(self, window: _Window, size: int, limit: float = math.inf) -> list[tuple[Vector, Vector]]:
        """Return each law under the window's tilt, wrapped to ``size`` places: of losses up to a limit, and of others.

        Raises:
            FloatsExceeded: as it says.
        """
        if self._law_error(window.tilt) > LARGEST_ROUNDING:
            raise FloatsExceeded
        found = []
        for places, (losses, logs, _) in zip(self.places, self.nodes, strict=True):
            tilted = logs + window.tilt * losses
            masses, rare = np.exp(tilted - _log_sum(tilted)), losses > limit
            found.append((_folded(places[~rare], masses[~rare], size), _folded(places[rare], masses[rare], size)))
        return found

    def _roundings(self, size: int) -> tuple[float, float]:
        """Return bounds on the relative errors of a transform, and of the products of all releases."""
        products = math.log2(sum(count for _, count in self.parts)) + len(self.parts) + 1
        return TRANSFORM_ERROR * math.log2(size), 16 * UNIT * products

    def _law_error(self, tilt: float) -> float:
        """Return a bound on the relative error of all laws' probabilities together under a tilt."""
        terms = (
            count * (law.terms + tilt * float(np.abs(losses).max()))
            for (law, count), (losses, *_) in zip(self.parts, self.nodes, strict=True)
        )
        return 2 * TERM_ERROR * sum(terms)


def _spread(law: LossLaw, interval: float) -> tuple[NDArray[np.int64], Vector]:
    """Return places on a grid and the logarithms of their probabilities: connecting the dots once more."""
    places = np.floor(law.losses / interval)
    into = law.losses - places * interval
    # A little too much goes up, so that no loss gets less than its share by rounding.
    upper = np.minimum(np.expm1(-into) / math.expm1(-interval) * (1 + TERM_ERROR), 1)
    with np.errstate(divide="ignore"):
        logs = np.concatenate([law.log_masses + np.log1p(-upper), law.log_masses + np.log(upper)])
    return np.concatenate([places, places + 1]).astype(np.int64), logs


def _folded(places: NDArray[np.int64], masses: Vector, size: int) -> Vector:
    return np.asarray(np.bincount(places % size, masses, size), dtype=np.float64)


def _spare(delta: float) -> float:
    return -math.log(delta * SPARE)


def _times(first: NDArray[np.complex128], second: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """Return (1 + first) (1 + second) - 1."""
    return np.asarray(first + second + first * second)


def _repeated(one: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """Return (1 + one)^count - 1, by repeated squaring."""
    result = np.zeros_like(one)
    while count:
        if count & 1:
            result = _times(result, one)
        count >>= 1
        if count:
            one = _times(one, one)
    return result


def _exp(exponents: Vector | float) -> Vector:
    """Return exponentials; of huge ones a number that is above any share of delta, even times a transform's error."""
    return np.asarray(np.exp(np.minimum(exponents, 700.0)))


def _repeated_apart(
    often: NDArray[np.complex128], rare: NDArray[np.complex128], count: int
) -> tuple[NDArray[np.complex128], NDArray[np.complex128]]:
    """Return often^count and (often + rare)^count - often^count, whose error is a share of ``rare``."""
    power, difference = np.ones_like(often), np.zeros_like(rare)
    while count:
        if count & 1:
            power, difference = power * often, difference * (often + rare) + power * rare
        count >>= 1
        if count:
            often, rare = often * often, rare * (2 * often + rare)
    return power, difference


def _log_moment(nodes: Sequence[tuple[Vector, Vector, int]], tilt: float) -> float:
    """Return the logarithm of the mean of exp(tilt loss), all releases together."""
    return sum(count * _log_sum(logs + tilt * losses) for losses, logs, count in nodes)


def _log_sum(logs: Vector) -> float:
    """Return the logarithm of the sum of exponentials."""
    largest = float(logs.max())
    return largest + math.log(float(np.exp(logs - largest).sum()))


def _least(function: Callable[[float], float], largest: float) -> tuple[float, float]:
    """Return where in (0, ``largest``] a function is about least, and its value there."""
    from scipy.optimize import minimize_scalar

    bounds = (math.log(largest) - 60, math.log(largest))
    found = minimize_scalar(
        lambda log: function(math.exp(log)), bounds=bounds, method="bounded", options={"xatol": 0.01}
    )
    return math.exp(found.x), float(found.fun)
