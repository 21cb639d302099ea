"""Releases, which accountants add up: Poisson-subsampled Gaussians, each repeated a number of times.

Adjacency is zero-out throughout (one example contributes nothing, ids and keys stay; `REPLACE_SPECIAL` in
dp-accounting). For this mechanism its privacy loss, in both directions, is that of adding or removing one example:
without the example the output is N(0, z^2), with it the mixture (1 - q) N(0, z^2) + q N(1, z^2).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from raycloak.workers.terms.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class Release:
    """A number of independent outputs of one subsampled Gaussian.

    Attributes:
        sample_rate: q in (0, 1]; 1 is the plain Gaussian.
        noise_multiplier: z > 0, standard deviation over l2 sensitivity.
        count: how often, at least 1.
    """

    sample_rate: float
    noise_multiplier: float
    count: int

    def __post_init__(self) -> None:
        assert 0 < self.sample_rate <= 1
        assert 0 < self.noise_multiplier < math.inf
        assert self.count >= 1


Releases = tuple[Release, ...]


def releases_of(counts: Iterable[tuple[Mechanism, int]]) -> Releases:
    """Return the releases of mechanisms that were each released so often, without those that are not private."""
    return tuple(
        Release(each.sample_rate, each.noise_multiplier, count) for each, count in counts if each.private and count
    )


def scaled(releases: Releases, factor: float) -> Releases:
    """Return the same releases with their noise times ``factor``."""
    return tuple(Release(each.sample_rate, each.noise_multiplier * factor, each.count) for each in releases)


def merged(releases: Iterable[Release]) -> Releases:
    """Return the same composition in its one shortest form, so that equal ones compare equal.

    Equal mechanisms add up their counts. All plain Gaussians together are one Gaussian, of noise multiplier
    ``(sum of count / z^2)^(-1/2)``: exact, and the reason that full batches cost no numerical composition.
    """
    counts: dict[tuple[float, float], int] = {}
    precision = 0.0
    for release in releases:
        if release.sample_rate == 1:
            precision += release.count / release.noise_multiplier**2
        else:
            key = (release.sample_rate, release.noise_multiplier)
            counts[key] = counts.get(key, 0) + release.count
    sampled = tuple(Release(q, z, count) for (q, z), count in sorted(counts.items()))
    return (*sampled, Release(1.0, precision**-0.5, 1)) if precision else sampled
