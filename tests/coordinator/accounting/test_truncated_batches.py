"""Truncated batches against enumerations of the real mechanism, which share no formula with the accountants.

A slice of a few examples is enumerated whole: every set of drawn ids, every set that stays. Sums are one-dimensional
with contributions of -1, 0 or 1, so each output is a known mixture of Gaussians, which is integrated numerically.
"""

import itertools
import math
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from scipy.stats import binom, chisquare

from raycloak.attestation.core.keys import Secret
from raycloak.coordinator.accounting import pld, renyi
from raycloak.coordinator.accounting.calibration import epsilon_against
from raycloak.coordinator.accounting.releases import Cut, Release, cut_at, merged, release_of, uncut
from raycloak.workers.vectors.sampling import draw_ids
from tests.coordinator.accounting.test_renyi import mechanism

DELTA = 1e-5
INTERVAL = 2.0**-12
EPSILONS = (0.0, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0)
CASES = [(0.5, 1, 1.0), (0.3, 2, 1.5), (0.8, 3, 1.0)]
"""Sampling rate, capacity and noise for a slice of five."""

OTHERS = [(-1, -1, -1, -1), (0, 0, 0, 0), (1, 1, 1, 1), (-1, 1, -1, 1), (-1, -1, 0, 1)]
"""Contributions of the four other examples."""

_GRID = np.arange(-22.0, 22.0, 1 / 512)


@cache
def outputs(q: float, capacity: int, z: float, own: float, others: tuple[int, ...]) -> np.ndarray:
    """Density of the sum with noise, on the grid, by enumerating what is drawn and what stays; the example is id 0."""
    values = (own, *others)
    weights: defaultdict[float, float] = defaultdict(float)
    for drawn in itertools.chain.from_iterable(itertools.combinations(range(5), k) for k in range(6)):
        chance = q ** len(drawn) * (1 - q) ** (5 - len(drawn))
        kept = list(itertools.combinations(drawn, min(capacity, len(drawn))))
        for each in kept:
            weights[sum(values[i] for i in each)] += chance / len(kept)
    assert sum(weights.values()) == pytest.approx(1)
    shapes = (w * np.exp(-((_GRID - mean) ** 2) / (2 * z * z)) for mean, w in weights.items())
    return sum(shapes, np.zeros_like(_GRID)) / (z * math.sqrt(2 * math.pi))


def hockey_stick(first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum() / 512)


def pairs(q: float, capacity: int, z: float):
    """Both directions of neighbouring datasets: one has the example, in the other it contributes nothing."""
    for others, own in itertools.product(OTHERS, (-1.0, 1.0)):
        with_it, without = (outputs(q, capacity, z, each, others) for each in (own, 0.0))
        yield with_it, without
        yield without, with_it


def deltas(release: Release) -> list[float]:
    """Return the delta that the accountant charges for one release, at each of `EPSILONS`: of the worse direction."""
    laws = pld._laws(release, 0, 10.0)
    return [
        max(float(np.maximum(0, -np.expm1(e - law.losses)) @ np.exp(law.log_masses)) + law.beyond for law in laws)
        for e in EPSILONS
    ]


def charged(q: float, z: float, capacity: int, sizes: tuple[int, ...] = (5,), count: int = 1) -> Release:
    return Release(q, z, count, Cut(sizes, capacity))


@pytest.mark.parametrize(("q", "capacity", "z"), CASES)
def test_the_charge_of_a_cut_batch_is_never_below_the_enumerated_mechanism(q: float, capacity: int, z: float):
    allowed = deltas(charged(q, z, capacity))
    for first, second in pairs(q, capacity, z):
        for epsilon, delta in zip(EPSILONS, allowed, strict=True):
            assert delta >= hockey_stick(first, second, epsilon) - 1e-9


def test_poisson_is_below_the_enumerated_mechanism_so_the_cut_is_not_free():
    """The example displaces one that pulls the other way, so the sum moves by two."""
    q, capacity, z = 0.3, 1, 1.0
    worst = max(hockey_stick(*pair, 3.0) for pair in pairs(q, capacity, z))
    assert worst > 3 * deltas(Release(q, z, 1))[EPSILONS.index(3.0)]


@pytest.mark.parametrize(("q", "capacity", "z"), CASES)
def test_the_law_of_a_cut_batch_is_the_mixture_of_the_proof(q: float, capacity: int, z: float):
    """Integrated here: no cut possible, a Poisson Gaussian; else a pair of sensitivity 2 at the chance of staying."""
    chance = sum(math.comb(4, k) * q**k * (1 - q) ** (4 - k) for k in range(capacity, 5))
    stays = sum(math.comb(4, k) * q**k * (1 - q) ** (4 - k) * q * capacity / (k + 1) for k in range(capacity, 5))

    def normal(mean: float) -> np.ndarray:
        return np.exp(-((_GRID - mean) ** 2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi))

    inside, p = (1 - q) * normal(0) + q * normal(1), stays / chance
    ends = [(1 - p) * normal(0) + p * normal(mean) for mean in (-2, 2)]
    for epsilon, found in zip(EPSILONS, deltas(charged(q, z, capacity)), strict=True):
        displaced = chance * hockey_stick(*ends, epsilon)
        ways = [(1 - chance) * hockey_stick(*pair, epsilon) for pair in ((inside, normal(0)), (normal(0), inside))]
        expected = displaced + max(ways)
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-7)


def test_composed_cut_batches_cost_no_less_than_the_composed_enumeration():
    """Losses of the enumerated worst pair, rounded down and convolved: a lower bound by other arithmetic."""
    q, capacity, z, steps, width = 0.3, 1, 1.0, 4, 1 / 128
    bound = pld.epsilon((charged(q, z, capacity, count=steps),), DELTA)
    poisson = pld.epsilon((Release(q, z, steps),), DELTA)
    lower = 0.0
    for first, second in pairs(q, capacity, z):
        losses = np.floor(np.log(first / second) / width).astype(int)
        low = losses.min()
        one = np.bincount(losses - low, weights=first / 512)
        total = one
        for _ in range(steps - 1):
            total = np.convolve(total, one)
        at = (np.arange(len(total)) + steps * low) * width
        epsilons = np.arange(0.0, 30.0, 0.05)
        deltas = [float((total * np.maximum(0, -np.expm1(e - at))).sum()) for e in epsilons]
        lower = max(lower, float(epsilons[np.argmax(np.array(deltas) <= DELTA)]) - 0.05)
    assert poisson < lower <= bound


@pytest.mark.parametrize(("q", "capacity", "z"), CASES)
@pytest.mark.parametrize("order", [1.5, 2.0, 4.0, 8.0])
def test_the_renyi_charge_is_never_below_the_enumerated_mechanism(q: float, capacity: int, z: float, order: float):
    bound = float(renyi.release_rdp(charged(q, z, capacity), (order,))[0])
    for first, second in pairs(q, capacity, z):
        with np.errstate(divide="ignore", invalid="ignore"):
            moment = np.nansum(second * (first / second) ** order) / 512
        assert math.log(moment) / (order - 1) <= bound * (1 + 1e-6)


def test_the_renyi_charge_of_a_cut_exceeds_poisson_s():
    cut, without = (renyi.release_rdp(each, (4.0,))[0] for each in (charged(0.3, 1.0, 1), Release(0.3, 1.0, 1)))
    assert cut > 1.1 * without
    assert renyi.release_rdp(charged(0.03, 2.0, 400, (7500,)), (4.0,))[0] == pytest.approx(
        renyi.release_rdp(Release(0.03, 2.0, 1), (4.0,))[0]
    )


def test_the_chances_of_a_cut_are_those_that_the_sampler_has():
    """Simulated with the keyed draws of a worker: id 3 of twelve, six stay."""
    q, capacity, runs = 0.5, 6, 20_000
    ids = np.arange(12)
    cuts, stays, kept = 0, 0, np.zeros(12)
    for run in range(runs):
        key = Secret(run.to_bytes(32, "big"))
        drawn, stayed = (draw_ids(key, ids, q, each) for each in (12, capacity))
        possible = (drawn != 3).sum() >= capacity
        cuts += possible
        stays += bool(possible and 3 in stayed)
        if drawn.size == capacity + 1:
            kept[stayed] += 1
    ((cut, stay),) = Cut((12,), capacity).chances(q)
    for found, expected in ((cuts, cut), (stays, stay)):
        assert abs(found - runs * expected) < 5 * math.sqrt(runs * expected)
    # Every id is drawn and stays equally often, so what stays does not depend on the id.
    assert chisquare(kept).pvalue > 1e-4


@pytest.mark.parametrize(("n", "q", "capacity"), [(5, 0.5, 2), (180, 0.25, 60), (7500, 0.03, 260)])
def test_the_chances_of_a_cut_count_the_other_ids_of_the_slice(n: int, q: float, capacity: int):
    counts = np.arange(capacity, n)
    law = binom.pmf(counts, n - 1, q)
    ((cut, stays),) = Cut((n,), capacity).chances(q)
    assert cut == pytest.approx(law.sum(), rel=1e-9)
    assert stays == pytest.approx((law * q * capacity / (counts + 1)).sum(), rel=1e-9)


def test_the_charge_is_that_of_the_library_s_event_under_zero_out():
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    release = charged(0.05, 1.2, 24, (300,), count=50)
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL, INTERVAL)
    accountant.compose(dp_accounting.TruncatedSubsampledGaussianDpEvent(300, 0.05, 24, 1.2), 50)
    assert pld.on_grid(merged([release]), DELTA, INTERVAL) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-4)


def test_both_sizes_of_a_slice_are_charged():
    """1437 examples of 8 virtual workers: slices of 179 and of 180."""
    cut = cut_at(1437, 8, 60)
    assert cut == Cut((179, 180), 60)
    together, *each = (
        pld.on_grid((charged(0.25, 2.3, 60, sizes, count=200),), DELTA, 2.0**-8)
        for sizes in ((179, 180), (179,), (180,))
    )
    assert together == max(each)
    assert min(each) < together


def test_a_capacity_that_holds_every_slice_cuts_nothing():
    assert cut_at(1437, 8, 180) is None
    assert cut_at(1437, 8, 179) == Cut((179, 180), 179)
    assert cut_at(1440, 8, 179) == Cut((180,), 179)


def test_a_larger_capacity_costs_less_down_to_poisson():
    costs = [pld.cut_excess((charged(0.25, 2.3, capacity, (180,), count=200),), DELTA) for capacity in (55, 60, 70, 90)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 1.1
    assert costs[-1] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("capacity", [600, 1200, 2000, 7400, 7498])
def test_a_cut_that_is_too_rare_to_matter_costs_as_much_as_none(capacity: int):
    release = charged(1e-3, 1.0, capacity, (7499, 7500), count=100)
    assert pld.cut_excess((release,), DELTA) == pytest.approx(1, abs=1e-6)


def test_measurements_beside_a_cut_gradient_keep_their_cost():
    gradient, counts = charged(0.25, 2.3, 60, (180,), count=200), Release(1.0, 20.0, 1)
    alone, both = pld.epsilon((gradient,), DELTA), pld.epsilon((gradient, counts), DELTA)
    without = pld.epsilon(uncut((gradient, counts)), DELTA)
    assert both > alone
    assert both > without


def test_one_place_decides_what_pays_for_a_cut():
    shape = {"num_examples": 800, "sample_rate": 0.25, "micro_batch_size": 40}
    by_epsilon, by_delta = (mechanism(**shape, overflow_probability=share) for share in (0.0, 1e-6))
    assert release_of(by_epsilon, 3) == Release(0.25, 10.0, 3, Cut((100,), 40))
    assert release_of(by_delta, 3) == Release(0.25, 10.0, 3)


def test_where_delta_cannot_pay_for_the_cut_at_an_epsilon_above_the_cap_the_accountant_does():
    shape = {"num_examples": 800, "sample_rate": 0.25, "micro_batch_size": 60, "overflow_probability": 1e-12}
    noise = {"noise_multiplier": 2.0, "sigma": 2.0 * 2**20 / math.sqrt(8) * 1.001}
    stated = mechanism(**shape, **noise)
    assert renyi.total_slack([stated], 10).total < renyi.SLACK_SHARE * DELTA
    fits = epsilon_against(stated, 0, DELTA, 100)
    beyond = epsilon_against(stated, 7, DELTA, 100)
    assert renyi.total_slack([stated], beyond).total > renyi.SLACK_SHARE * DELTA
    alone = Release(0.25, renyi.effective_noise_multiplier(stated, 7), 100)
    assert fits < renyi.epsilon(renyi.composed_rdp([alone]), DELTA) < beyond < math.inf
