"""Releases, which accountants add up: Poisson-subsampled Gaussians, each repeated a number of times.

Adjacency is zero-out throughout (one example contributes nothing, ids and keys stay; `REPLACE_SPECIAL` in
dp-accounting). For this mechanism its privacy loss, in both directions, is that of adding or removing one example:
without the example the output is N(0, z^2), with it the mixture (1 - q) N(0, z^2) + q N(1, z^2).

Also the fixed physical shape of a step, which cuts draws: how many rows hold a Poisson draw, and how surely. It is
public and the same in every step, so that timing shows nothing of the draw.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from raycloak.coordinator.accounting.outward import lowered, sum_up
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.terms.mechanism import Mechanism

ROW_MULTIPLE = 4
"""Micro-batches shrink to a multiple of this. Kernels take other paths for fewer rows, and give other bits."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of every draw to a capacity: of more drawn ids a uniformly random ``capacity`` stay.

    Attributes:
        slice_sizes: the numbers of ids that a virtual worker may have; an example is in a slice of one of them.
        capacity: most ids of a slice that stay, at least 1.
    """

    slice_sizes: tuple[int, ...]
    capacity: int

    def __post_init__(self) -> None:
        cuts = 1 <= self.capacity < max(self.slice_sizes, default=0)
        require_bound(cuts, "a draw is cut to less than it may hold, and at least to 1")

    def chances(self, sample_rate: float) -> tuple[tuple[float, float], ...]:
        """Return, per slice size, P[E] and P[E and the example stays].

        E says that at least ``capacity`` ids other than the example's are drawn (docs/proofs/007).
        """
        from scipy.stats import binom

        return tuple(
            (
                float(binom.sf(self.capacity - 1, size - 1, sample_rate)),
                float(binom.sf(self.capacity, size, sample_rate)) * self.capacity / size,
            )
            for size in self.slice_sizes
        )


@dataclass(frozen=True, slots=True)
class Release:
    """A number of independent outputs of one subsampled Gaussian.

    Attributes:
        sample_rate: q in (0, 1]; 1 is the plain Gaussian.
        noise_multiplier: z > 0, standard deviation over l2 sensitivity.
        count: how often, at least 1.
        cut: of each draw, where epsilon pays for it; None where nothing is cut, or where delta pays.
    """

    sample_rate: float
    noise_multiplier: float
    count: int
    cut: Cut | None = None

    def __post_init__(self) -> None:
        sampled = 0 < self.sample_rate <= 1 and 0 < self.noise_multiplier < math.inf
        require_bound(sampled and self.count >= 1, "a release is sampled, has noise, and is made at least once")
        require_bound(self.cut is None or self.sample_rate < 1, "a full batch holds whole slices")


Releases = tuple[Release, ...]


def cut_of(mechanism: Mechanism) -> Cut | None:
    """Return the cut that a mechanism's fixed shape makes, whatever pays for it; None if every draw fits."""
    capacity = mechanism.micro_batch_size * mechanism.micro_batches
    return cut_at(mechanism.num_examples, mechanism.virtual_workers, capacity, mechanism.bands)


def cut_at(num_examples: int, virtual_workers: int, capacity: int, parts: int = 1) -> Cut | None:
    """Return the cut of slices of examples, or of the parts of each, to ``capacity``; None if each fits whole."""
    # Slices differ by one example at most, and so do all parts of them together.
    smallest, larger = divmod(num_examples, virtual_workers)
    slices = (smallest, smallest + bool(larger))
    sizes = tuple(sorted({(size + more) // parts for size in slices for more in (0, parts - 1)}))
    return Cut(sizes, capacity) if capacity < sizes[-1] else None


def release_of(mechanism: Mechanism, count: int) -> Release:
    """Return what ``count`` releases of a private mechanism, at least one, cost one example.

    Guarantee: of data that a client sends, they are as many Gaussians as the example can take part in, whichever
    releases these are and no matter who chose them (docs/proofs/009).

    The cut is in it exactly if delta has no share for it: the one place that decides what pays.
    """
    cut = None if mechanism.overflow_probability else cut_of(mechanism)
    return Release(mechanism.sample_rate, mechanism.noise_multiplier, mechanism.participations(count), cut)


def releases_of(counts: Iterable[tuple[Mechanism, int]]) -> Releases:
    """Return the releases of mechanisms that were each released so often, without those that are not private."""
    return tuple(release_of(each, count) for each, count in counts if each.private and count)


def uncut(releases: Releases) -> Releases:
    """Return the same releases as if no draw were cut."""
    return tuple(replace(each, cut=None) for each in releases)


def merged(releases: Iterable[Release]) -> Releases:
    """Return the same composition in its one shortest form, so that equal ones compare equal.

    Equal mechanisms add up their counts. All plain Gaussians together are one Gaussian, of noise multiplier
    ``(sum of count / z^2)^(-1/2)``, rounded down: the reason that full batches cost no numerical composition.
    """
    counts: Counter[Release] = Counter()
    precisions = []
    for release in releases:
        if release.sample_rate == 1:
            precisions.append(release.count / release.noise_multiplier**2)
        else:
            counts[replace(release, count=1)] += release.count

    def order(release: Release) -> tuple[float, float, tuple[int, ...]]:
        cut = release.cut
        return release.sample_rate, release.noise_multiplier, (*cut.slice_sizes, cut.capacity) if cut else ()

    sampled = tuple(replace(one, count=counts[one]) for one in sorted(counts, key=order))
    # Less noise than there is, by some last bits.
    return (*sampled, Release(1.0, lowered(sum_up(precisions) ** -0.5), 1)) if precisions else sampled


def overflow_bound(slice_size: int, sample_rate: float, draws: int, capacity: int) -> float:
    """Return an upper bound on the chance that any of ``draws`` Binomial(slice_size, q) draws exceeds ``capacity``.

    Guarantee: the Chernoff bound ``draws * exp(-n KL((capacity + 1) / n || q))``, and 0 where none can exceed it.
    """
    if capacity >= slice_size:
        return 0.0
    share, exponent = (capacity + 1) / slice_size, 0.0
    if share > sample_rate:
        rest = (1 - share) * math.log((1 - share) / (1 - sample_rate)) if share < 1 else 0.0
        exponent = slice_size * (share * math.log(share / sample_rate) + rest)
    return min(1.0, draws * math.exp(-exponent) * (1 + 1e-9))


def least_within(budget: float, slice_size: int, sample_rate: float, draws: int) -> int:
    """Return the least capacity, at least 1, at which :func:`overflow_bound` is at most ``budget``."""
    return least(lambda capacity: overflow_bound(slice_size, sample_rate, draws, capacity) <= budget, 1, slice_size)


def least(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least whole number from ``low`` to ``high`` that ``fits``; assumes that ``high`` and all above do."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def physical_shape(capacity: int, largest: int) -> tuple[int, int]:
    """Return rows m and count M of the micro-batches: the fewest of at most ``largest`` rows that hold ``capacity``.

    Guarantee: ``m * M >= capacity`` and ``m <= largest``.
    """
    batches = -(-capacity // largest)
    rows = -(-capacity // (batches * ROW_MULTIPLE)) * ROW_MULTIPLE
    return min(rows, largest), batches
