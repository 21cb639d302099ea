"""The tight epsilon of a plan that is fixed in advance, by dp-accounting's privacy loss distributions.

A privacy loss distribution is put on a grid by connecting the dots (Doroshenko et al., arXiv 2207.04380). The result
dominates the real one, so epsilon is an upper bound on any grid. Halving the interval quarters the excess;
:func:`epsilon` halves it until that settles.

A draw that is cut to a capacity is charged as what it is: truncated Poisson sampling (arXiv 2508.15089). What that
assumes, and why it holds here, is in docs/proofs/007-truncated-batches.md.

Plain Gaussians among the releases are one Gaussian, and alone they have a closed form (Balle and Wang, arXiv
1805.06530).
"""

import itertools
import math
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from raycloak.coordinator.accounting.outward import lowered
from raycloak.coordinator.accounting.releases import Cut, Release, Releases, merged, uncut
from raycloak.metrics.errors import ConfigError

SETTLED = 4e-3
"""Relative change of epsilon under a halved interval at which it counts as settled; three times the excess that is
left."""

STATED_ERROR = 0.01
"""Epsilon is at most this share above the tight value (and never below it); measured: 0.3 %."""

LARGEST_GRID = 2**18
"""Most grid points of one release's distribution. Building one takes 10 microseconds."""

FLOAT_ERROR = 2.0**-45
"""Delta that is set aside, a release, for the rounding of Fourier transforms. It is measured, and not proved.

An estimate chose it: a transform of n points raised to the power T has an error of about T u log2(n), which moves a
tail's delta by about T u log2(n) sqrt(n / width), below T 2^-45 for n up to 2^24 and a distribution that fills a tenth
of its grid. Against compositions of up to 128 releases without Fourier transforms, the real error is below a hundredth
of it.
"""

GAUSSIAN_ROUNDING = 1e-11
"""Added to the closed form of full batches, both absolutely and as a share. Its search ends within 1e-12 of the root of
a rounded function; measured against 60 digits, it was up to 2e-12 too low."""

NEGLIGIBLE_CHANCE = 2.0**-200
"""Chance of a cut below which the library's quotients underflow. Each release adds at most that much to delta, which
``FLOAT_ERROR`` exceeds by far."""

_COARSEST = 0.125


def library_version() -> str:
    """Return name and version of the library that composes."""
    return f"dp-accounting {version('dp-accounting')}"


def epsilon(releases: Releases, delta: float) -> float:
    """Return epsilon of all ``releases`` together at ``delta``, the accountant's share; 0 if there are none.

    Guarantee: never below the tight value. Precondition: the releases were fixed before the first of them, and each
    is at least as noisy as it says. Takes 0.1 s to 2 s for new arguments and nothing for a repeat; the first call of
    a process imports dp-accounting, which takes 2 s.

    Raises:
        ConfigError: ``delta_too_small`` where rounding errors would matter, see ``FLOAT_ERROR``.
    """
    return _settled(merged(releases), delta)[1] if releases else 0.0


def cut_excess(releases: Releases, delta: float) -> float:
    """Return epsilon of ``releases`` over that without their cuts, both on one coarse grid.

    On one grid the errors of the grid cancel, so that a difference far below them shows. Takes 0.02 s to 0.2 s.
    """
    cut = merged(releases)
    interval = _first_interval(cut)
    without = _on_grid(merged(uncut(releases)), delta, interval)
    found = _on_grid(cut, delta, interval)
    if without == 0:
        return 1.0 if found == 0 else math.inf
    return found / without


def curve(points: tuple[Releases, ...], delta: float) -> tuple[float, ...]:
    """Return epsilon of each of several growing compositions: settled for the last, on a coarse grid for the others.

    Guarantee: never below the tight values, and never decreasing. The last is as good as :func:`epsilon`; the
    others are at most 5 % too large, for a quarter of the time.
    """
    # The compositions grow: where the last has no release, none has.
    if not points or not points[-1]:
        return (0.0,) * len(points)
    interval, last = _settled(merged(points[-1]), delta)
    before = itertools.accumulate((_on_grid(merged(point), delta, 4 * interval) for point in points[:-1]), max)
    return (*(min(value, last) for value in before), last)


@lru_cache(maxsize=256)
def _settled(releases: Releases, delta: float) -> tuple[float, float]:
    """Return a grid interval that is fine enough, and the epsilon found."""
    interval = _first_interval(releases)
    best = _on_grid(releases, delta, interval)
    if _is_gaussian(releases):
        return interval, best
    while _grid_points(releases, interval / 2) <= LARGEST_GRID:
        interval /= 2
        before, best = best, min(best, _on_grid(releases, delta, interval))
        if before - best <= SETTLED * best:
            break
    return interval, best


@lru_cache(maxsize=1024)
def _on_grid(releases: Releases, delta: float, interval: float) -> float:
    if _is_gaussian(releases):
        from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

        found = float(get_epsilon_gaussian(releases[0].noise_multiplier, delta))
        return (found + GAUSSIAN_ROUNDING) * (1 + GAUSSIAN_ROUNDING)
    share = lowered(delta - FLOAT_ERROR * sum(release.count for release in releases))
    if share < 0.99 * delta:
        raise ConfigError(
            "delta_too_small",
            f"at delta {delta:.3g} the rounding errors of {sum(release.count for release in releases)} composed "
            "steps would matter to the pld accountant.",
            "Set dp_config.accountant to rdp, or ask for a larger delta.",
        )
    # An example is in one slice throughout, so it meets one of the two slice sizes in all releases.
    return max(_composed(releases, share, interval, size) for size in range(_slice_sizes(releases)))


def _slice_sizes(releases: Releases) -> int:
    return max(len(release.cut.slice_sizes) if release.cut else 1 for release in releases)


def _composed(releases: Releases, share: float, interval: float, size: int) -> float:
    """Return epsilon for an example of a slice of the smaller (0) or the larger (1) size."""
    total = None
    for release in releases:
        sizes = release.cut.slice_sizes if release.cut else ()
        one = _one(replace(release, count=1), interval, sizes[min(size, len(sizes) - 1)] if sizes else 0)
        part = one.self_compose(release.count)
        total = part if total is None else total.compose(part)
    assert total is not None
    return float(total.get_epsilon_for_delta(share))


def _may_cut(cut: Cut, sample_rate: float, slice_size: int) -> bool:
    """Return whether a cut is likely enough to be charged for."""
    chances = replace(cut, slice_sizes=(slice_size,)).chances(sample_rate) if cut.capacity < slice_size else ()
    return any(chance > NEGLIGIBLE_CHANCE for chance, _ in chances)


@lru_cache(maxsize=8)
def _one(release: Release, interval: float, slice_size: int) -> Any:
    """Return dp-accounting's distribution of one release; ``slice_size`` matters where it is cut."""
    from dp_accounting.pld import privacy_loss_distribution

    sample_rate, noise_multiplier = release.sample_rate, release.noise_multiplier
    if release.cut is not None and _may_cut(release.cut, sample_rate, slice_size):
        return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            slice_size,
            sample_rate,
            release.cut.capacity,
            noise_multiplier,
            value_discretization_interval=interval,
            use_connect_dots=True,
            neighboring_relation=privacy_loss_distribution.NeighborRel.REPLACE_SPECIAL,
        )
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=interval,
        use_connect_dots=True,
        neighboring_relation=privacy_loss_distribution.NeighborRel.REPLACE_SPECIAL,
    )


def _is_gaussian(releases: Releases) -> bool:
    return len(releases) == 1 and releases[0].sample_rate == 1


def _first_interval(releases: Releases) -> float:
    """Return a power of two near the least deviation of one release's loss, as far as the grid stays small."""
    spread = min(_spread(release) for release in releases)
    finest = max(_range(release) for release in releases) / (LARGEST_GRID / 16)
    return _power_of_two(min(max(spread, finest), _COARSEST))


def _grid_points(releases: Releases, interval: float) -> float:
    return max(_range(release) for release in releases) / interval


def _power_of_two(value: float) -> float:
    """Return the largest power of two that is at most ``value``."""
    return 2.0 ** math.floor(math.log2(value))


def _spread(release: Release) -> float:
    """Estimate the standard deviation of the privacy loss; for a small sampling rate, q (e^(1/z^2) - 1)^(1/2)."""
    inverse = 1 / release.noise_multiplier
    return min(inverse, release.sample_rate * math.sqrt(math.expm1(min(inverse**2, 40.0))))


def _range(release: Release) -> float:
    """Estimate the largest privacy loss of an output within ten standard deviations."""
    if release.cut is not None:
        # An example that displaces another moves the sum by twice its bound.
        return _range(replace(release, noise_multiplier=release.noise_multiplier / 2, cut=None))
    exponent = (10 + 0.5 / release.noise_multiplier) / release.noise_multiplier
    if exponent > 40:
        return exponent
    return 2 * math.log1p(release.sample_rate * math.expm1(exponent))
