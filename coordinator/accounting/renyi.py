"""Renyi accounting, and the slack that delta must cover besides.

RDP is Opacus' of the Poisson-subsampled Gaussian. A run's spend is (steps charged) x (RDP vector of one step), so
epsilon costs one vector addition per step.

One plan that is fixed in advance costs the smallest epsilon over all ``ORDERS`` (:func:`epsilon`). A filter admits
releases that are chosen after others were seen, and has no such choice: it is held at one order, fixed before the
first release (Feldman and Zrnic, arXiv 2008.11193), or shares delta over several (:func:`filter_epsilon`). See
`docs/proofs/004-renyi-filter.md`.

Delta is split once for all. The accountant is given :func:`accountant_delta`. The rest is a reserve that pays for
the distance between the ideal mechanism and the one that runs (:class:`DeltaSlack`). The split does not depend on what
is spent, so a second run on an account never raises the first one's epsilon by its slack.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.counted_noise import counted_noise
from raycloak.coordinator.accounting.opacus_modules import opacus_module
from raycloak.coordinator.accounting.outward import lowered, raised, sum_up, weighted_sum_up
from raycloak.coordinator.accounting.releases import Cut, Release
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.noise import ROUNDING_DISTANCE, SAMPLER_DISTANCE
from raycloak.workers.vectors.ring import TAIL_DEVIATIONS

ORDERS: tuple[float, ...] = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *(float(order) for order in range(11, 65)),
    *(72.0, 80.0, 96.0, 112.0, 128.0, 160.0, 192.0, 256.0, 384.0, 512.0, 768.0, 1024.0),
)
"""Renyi orders that a new account may fix one of. An account keeps the orders it was opened with."""

WHOLE_ORDERS: tuple[float, ...] = tuple(order for order in ORDERS if order.is_integer())
"""Some of them, at which RDP takes a tenth of the time: epsilon from these is an upper bound of that from all."""

SLACK_SHARE = 0.01
"""Share of an account's delta that is reserved for slack."""

UNBOUNDED_RDP = 1e200
"""Stands for 'no guarantee at this order'; finite, so that it can be written down and added up."""

SMALLEST_RDP = 1e-300
"""Stands for a divergence that floats cannot tell from none, so that nothing released counts as nothing."""

SMALLEST_NOISE_MULTIPLIER = 2.0**-6
"""Less noise hides nothing: it is refused, not accounted."""


@lru_cache(maxsize=256)
def step_rdp(sample_rate: float, noise_multiplier: float, orders: tuple[float, ...] = ORDERS) -> tuple[float, ...]:
    """Return the RDP of one step of the Poisson-subsampled Gaussian, at each of ``orders``.

    Takes about 0.1 s for a new pair of arguments (and 0.3 s more in the process's first call), nothing for a repeat.

    Args:
        sample_rate: q in (0, 1]; 1 is the plain Gaussian.
        noise_multiplier: z > 0, standard deviation over l2 sensitivity.
    """
    require_bound(0 < sample_rate <= 1 and noise_multiplier > 0, "a release is sampled, and has noise")
    if sample_rate == 1:
        return tuple(order / (2 * noise_multiplier**2) for order in orders)
    rdp = opacus_module("opacus.accountants.analysis.rdp")
    raw = rdp.compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=list(orders))
    # Opacus rounds tiny divergences, of 1e-14, to zero and below: a release would be free, or would pay for others.
    return tuple(max(float(value), SMALLEST_RDP) if value < UNBOUNDED_RDP else UNBOUNDED_RDP for value in raw)


def release_rdp(release: Release, orders: tuple[float, ...] = ORDERS) -> NDArray[np.float64]:
    """Return the RDP of one of the outputs of ``release``, its cut included."""
    rdp = np.asarray(step_rdp(release.sample_rate, release.noise_multiplier, orders))
    return rdp if release.cut is None else cut_rdp(rdp, release, release.cut, orders)


def cut_rdp(
    uncut: NDArray[np.float64], release: Release, cut: Cut, orders: tuple[float, ...] = ORDERS
) -> NDArray[np.float64]:
    """Return an upper bound on the RDP of one output of ``release`` with its draws cut, from that without a cut.

    Guarantee: holds under zero-out. exp((a - 1) D_a) is jointly convex, and is bounded case by case: no cut is
    possible; one is, and the example does not stay; one is, and it stays, a plain Gaussian (docs/proofs/007).
    """
    excess = np.asarray(orders) - 1
    gaussian = excess * np.asarray(orders) / (2 * release.noise_multiplier**2)
    with np.errstate(divide="ignore"):
        bounds = [
            np.logaddexp(
                np.logaddexp(np.log1p(-cuts) + excess * uncut, np.log(max(cuts - stays, 0.0))),
                np.log(stays) + gaussian,
            )
            / excess
            for cuts, stays in cut.chances(release.sample_rate)
        ]
    return np.asarray(np.minimum(np.maximum(uncut, np.max(bounds, axis=0)), UNBOUNDED_RDP))


def epsilon(rdp: Sequence[float] | NDArray[np.float64], delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """Return the smallest epsilon over ``orders`` that the RDP vector gives at ``delta``; 0 if nothing was released.

    Precondition: the releases were fixed before the first of them, or ``orders`` is one order that was.
    ``delta`` is the accountant's share, see :func:`accountant_delta`. Takes microseconds.
    """
    vector = np.asarray(rdp, dtype=np.float64)
    if not vector.any():
        return 0.0
    return max(0.0, math.nextafter(float((vector + _conversion(delta, orders)).min()), math.inf))


@lru_cache(maxsize=256)
def _conversion(delta: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return what Theorem 21 of Balle et al. (arXiv 1905.09982) adds to RDP at each order, rounded up."""
    alpha: NDArray[np.float64] = np.asarray(orders, dtype=np.float64)
    first, second, third = np.log1p(-1 / alpha), math.log(delta) / (alpha - 1), np.log(alpha) / (alpha - 1)
    return raised(np.asarray(first - second - third), np.abs(first) + np.abs(second) + np.abs(third))


def filter_epsilon(rdp: Sequence[float] | NDArray[np.float64], delta: float, orders: tuple[float, ...]) -> float:
    """Return the epsilon of releases that were each chosen after those before were seen; 0 if nothing was released.

    Guarantee: ``orders`` share ``delta`` equally, so a bound holds at all of them at once, whichever is the smallest
    in the end. Precondition: ``orders`` were fixed before the first release.
    """
    return epsilon(rdp, _each_share(delta, orders), orders)


def filter_caps(epsilon_cap: float, delta: float, orders: tuple[float, ...]) -> list[float]:
    """Return the total RDP at each order at which :func:`filter_epsilon` reaches the cap."""
    return [float(cap) for cap in epsilon_cap - _conversion(_each_share(delta, orders), orders)]


def _each_share(delta: float, orders: tuple[float, ...]) -> float:
    return delta if len(orders) == 1 else lowered(delta / len(orders))


def order_shares(
    rdp: Sequence[float] | NDArray[np.float64], epsilon_cap: float, delta: float, orders: tuple[float, ...]
) -> NDArray[np.float64]:
    """Return the share of the cap that ``rdp`` takes at each order, if that order alone holds the account.

    An order at which the cap admits nothing has an infinite share.
    """
    caps = epsilon_cap - _conversion(delta, orders)
    shares = np.full(len(orders), np.inf)
    np.divide(np.asarray(rdp, dtype=np.float64), caps, out=shares, where=caps > 0)
    return shares


def least_share_order(
    rdp: Sequence[float] | NDArray[np.float64], epsilon_cap: float, delta: float, orders: tuple[float, ...]
) -> float:
    """Return the order at which ``rdp``, a whole plan's, takes the least share of the cap: the one to hold it at.

    A plan whose smallest epsilon is within the cap fits it at this order, too. Where the cap admits nothing at any
    order, it is the order of the smallest epsilon.
    """
    shares = order_shares(rdp, epsilon_cap, delta, orders)
    if math.isfinite(shares.min()):
        return orders[int(shares.argmin())]
    return orders[int((np.asarray(rdp, dtype=np.float64) + _conversion(delta, orders)).argmin())]


def accountant_delta(delta: float) -> float:
    """Return the share of an account's ``delta`` that the accountant may use.

    Guarantee: with :func:`slack_reserve` it is not more than ``delta``, in exact arithmetic.
    """
    return lowered(delta * (1 - SLACK_SHARE))


def slack_reserve(delta: float) -> float:
    """Return the share of an account's ``delta`` that is set aside for slack."""
    return lowered(delta * SLACK_SHARE)


def composed_rdp(releases: Iterable[Release], orders: tuple[float, ...] = ORDERS) -> NDArray[np.float64]:
    """Return the RDP of all ``releases`` together, rounded up."""
    return weighted_sum_up([(each.count, release_rdp(each, orders)) for each in releases], len(orders))


@dataclass(frozen=True, slots=True)
class DeltaSlack:
    """The parts of delta that the ideal mechanism does not cover, each already multiplied by its factor.

    If the real outputs are within statistical distance t of an (epsilon, delta) mechanism's for both neighbours, they
    are (epsilon, delta + (1 + e^epsilon) t) private; t adds up over coordinates, steps and virtual workers.

    Attributes:
        sampler: distance of the noise sampler from its exact law.
        batch_overflow: chance that a draw exceeds the fixed batch capacity and is cut; 0 where epsilon pays for that.
        rounding: distance of the summed shares from a randomized rounding of a continuous Gaussian.
        ring_wrap: chance that noise leaves its 16 standard deviations and wraps. Wrapping is post-processing and
            costs no privacy; it is counted all the same, so that delta also bounds a wrong decode.
        mask_split: chance that the masks of the honest workers fall apart; 0 where all pairs mask. It does not depend
            on the data, so delta pays for it once, without the factor.
    """

    sampler: float = 0.0
    batch_overflow: float = 0.0
    rounding: float = 0.0
    ring_wrap: float = 0.0
    mask_split: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts, rounded up."""
        return sum_up(astuple(self))


def delta_slack(mechanism: Mechanism, epsilon: float) -> DeltaSlack:
    """Return the slack of all planned steps of ``mechanism`` for a claim of ``epsilon``; zero if it is not private.

    Call it at the account's cap: the terms grow with epsilon, so what holds there holds at every smaller spend.
    """
    if not mechanism.private:
        return DeltaSlack()
    factor = 1 + math.exp(epsilon) if epsilon < 700 else math.inf
    coordinates = float(mechanism.dimension) * mechanism.steps
    draws = coordinates * mechanism.virtual_workers
    return DeltaSlack(
        sampler=raised(draws * factor * SAMPLER_DISTANCE),
        batch_overflow=raised(factor * mechanism.overflow_probability) if mechanism.overflow_probability else 0.0,
        rounding=raised(draws * factor * ROUNDING_DISTANCE),
        ring_wrap=raised(coordinates * factor * 2 * math.exp(-(TAIL_DEVIATIONS**2) / 2)),
        mask_split=mechanism.mask_split_probability,
    )


def total_slack(mechanisms: Iterable[Mechanism], epsilon: float) -> DeltaSlack:
    """Return the slack of all mechanisms of a run together; see :func:`delta_slack`."""
    terms = [astuple(delta_slack(mechanism, epsilon)) for mechanism in mechanisms]
    return DeltaSlack(*(sum_up(part) for part in zip(*terms, strict=True)))


def effective_noise_multiplier(mechanism: Mechanism, missing_virtual_workers: float) -> float:
    """Return noise over sensitivity for an adversary who knows the noise of some virtual workers; 0 if none is left."""
    return counted_noise(mechanism, mechanism.virtual_workers - missing_virtual_workers)
