"""Tight epsilon of a fixed plan, and the noise that is solved with it."""

import math

import mpmath as mp
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from raycloak.coordinator.accounting import pld, tilted_sums
from raycloak.coordinator.accounting.accountants import AccountLimits, Quote, Spend, accountant_of, largest_part
from raycloak.coordinator.accounting.calibration import epsilon_of, solve_noise_multiplier
from raycloak.coordinator.accounting.pld import STATED_ERROR
from raycloak.coordinator.accounting.releases import Release, merged
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta, composed_rdp
from raycloak.metrics.errors import ConfigError

DELTA = 1e-5
PLD = accountant_of("pld")


def gaussian_delta(z: float, epsilon: float) -> float:
    """Delta of one plain Gaussian (Balle and Wang), written down anew."""
    return float(norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z))


def one_step_delta(q: float, z: float, epsilon: float) -> float:
    """Delta of one subsampled Gaussian: amplification of the closed form, exact for removing an example."""
    if epsilon <= 0:
        return 1.0
    return q * gaussian_delta(z, math.log1p(math.expm1(epsilon) / q))


@pytest.mark.parametrize(("z", "steps"), [(1.0, 1), (5.0, 100), (0.5, 10), (40.0, 10_000)])
def test_full_batches_cost_what_the_closed_form_says(z: float, steps: int):
    epsilon = pld.epsilon((Release(1.0, z, steps),), DELTA)
    assert gaussian_delta(z / math.sqrt(steps), epsilon) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("q", [1e-3, 0.05, 0.5])
@pytest.mark.parametrize("z", [0.5, 1.0, 5.0])
def test_one_step_is_never_below_the_exact_value_and_at_most_the_stated_error_above(q: float, z: float):
    epsilon = pld.epsilon((Release(q, z, 1),), DELTA)
    assert one_step_delta(q, z, epsilon) <= DELTA
    assert one_step_delta(q, z, epsilon / (1 + STATED_ERROR)) > DELTA


# (q, z, steps), and epsilon of dp-accounting 0.6.0 on grids of 2^-14 to 2^-19, fine enough for four digits.
TIGHT = [
    (0.01, 1.0, 1000, 1.8282),
    (0.2, 2.0, 100, 5.0232),
    (1e-3, 1.0, 10_000, 0.47577),
    (0.01, 0.5, 10_000, 43.368),
    (0.05, 5.0, 100, 0.35649),
]


@pytest.mark.parametrize(("q", "z", "steps", "tight"), TIGHT)
def test_epsilon_is_not_below_the_tight_value_and_at_most_one_percent_above(q: float, z: float, steps: int, tight):
    ours = pld.epsilon((Release(q, z, steps),), DELTA)
    assert tight * (1 - 1e-4) < ours < tight * (1 + STATED_ERROR)


def test_a_plan_of_several_mechanisms_costs_what_its_parts_cost_together():
    sampled, counts = Release(0.05, 1.0, 100), Release(1.0, 20.0, 4)
    both = pld.epsilon((sampled, counts), DELTA)
    alone = pld.epsilon((sampled,), DELTA)
    assert alone < both < alone + pld.epsilon((counts,), DELTA)
    assert both < accountant_of("rdp").curve([(sampled, counts)], DELTA)[0]
    split = (Release(0.05, 1.0, 40), counts, Release(0.05, 1.0, 60))
    assert merged(split) == merged((sampled, counts))
    assert pld.epsilon(split, DELTA) == both


def losses(*releases: Release) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the privacy losses of removing an example, on a coarse grid, and their probabilities."""
    interval, size, lowest = 2.0**-6, 2**15, 0
    transformed = np.ones(size // 2 + 1, dtype=np.complex128)
    for each in releases:
        law, _ = pld._laws(Release(each.sample_rate, each.noise_multiplier, 1), 0, 10.0)
        places, logs = tilted_sums._spread(law, interval)
        transformed *= np.fft.rfft(np.bincount(places - places.min(), np.exp(logs), size)) ** each.count
        lowest += int(places.min()) * each.count
    found = np.fft.irfft(transformed, size)
    kept = np.abs(found) > 1e-15
    return ((lowest + np.arange(size)) * interval)[kept], found[kept]


def test_who_chooses_between_two_mechanisms_hides_more_delta_than_either():
    """Why a pld account with several mechanisms pays for a whole plan or for none of it (proof 005, theorem 3)."""
    seen, chance = losses(Release(0.01, 0.6, 300))
    over = seen[:, None] - 7.443

    def hidden(rest: Release) -> NDArray[np.float64]:
        loss, weight = losses(rest)
        return np.maximum(0.0, -np.expm1(-np.maximum(over + loss, 0.0))) @ weight

    sampled, full = hidden(Release(0.01, 0.6, 700)), hidden(Release(1.0, 12.0, 230))
    assert 0.9e-5 < chance @ full < chance @ sampled < 1.2e-5
    assert chance @ np.maximum(sampled, full) > 1.35 * (chance @ sampled), "whoever looks takes what hides more"


def test_plain_gaussians_are_merged_into_one():
    (one,) = merged((Release(1.0, 3.0, 5), Release(1.0, 4.0, 8)))
    assert one.noise_multiplier == pytest.approx((5 / 9 + 8 / 16) ** -0.5, rel=1e-12)
    assert one.count == 1


def test_a_curve_never_decreases_and_is_nowhere_below_the_settled_value():
    points = tuple((Release(0.01, 1.0, steps),) for steps in (1, 10, 100, 500, 1000))
    curve = pld.curve(points, DELTA)
    assert list(curve) == sorted(curve)
    for value, point in zip(curve, points, strict=True):
        settled = pld.epsilon(point, DELTA)
        assert settled * (1 - STATED_ERROR) < value < settled * 1.05
    assert curve[-1] == pld.epsilon(points[-1], DELTA)


@pytest.mark.parametrize(("count", "delta"), [(10**12, 1e-5), (10, 2.0**-500)])
def test_a_delta_at_which_rounding_errors_matter_is_refused(count: int, delta: float):
    with pytest.raises(ConfigError, match=f"delta_too_small.* {count} composed steps"):
        pld.epsilon((Release(0.01, 1.0, count),), delta)


def test_nothing_released_costs_nothing():
    assert pld.epsilon((), DELTA) == 0.0
    assert pld.curve((), DELTA) == ()
    assert pld.curve(((), ()), DELTA) == (0.0, 0.0)
    assert merged(()) == ()


@pytest.mark.parametrize(
    ("target", "q", "steps"),
    [(8.0, 0.25, 200), (1.0, 0.01, 1000), (0.5, 1.0, 1), (0.1, 0.01, 100)],
)
def test_noise_solved_with_pld_meets_the_target_from_below_and_is_less_than_rdp_needs(target: float, q: float, steps):
    noise = solve_noise_multiplier(target, DELTA, q, steps, "pld")
    assert 0.997 * target <= epsilon_of(q, noise, steps, DELTA, "pld") <= target
    assert float(f"{noise:.5e}") == noise
    assert noise < solve_noise_multiplier(target, DELTA, q, steps)


def test_noise_is_solved_beside_what_else_the_plan_releases():
    counts = Release(1.0, 10.0, 4)
    noise = solve_noise_multiplier(2.0, DELTA, 0.05, 100, "pld", others=(counts,))
    together = pld.epsilon((Release(0.05, noise, 100), counts), accountant_delta(DELTA))
    assert 0.997 * 2.0 <= together <= 2.0
    assert noise > solve_noise_multiplier(2.0, DELTA, 0.05, 100, "pld")


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_others_that_spend_the_target_alone_leave_no_noise_that_is_enough(accountant):
    with pytest.raises(ConfigError, match="epsilon_unreachable"):
        solve_noise_multiplier(2.0, DELTA, 0.05, 100, accountant, others=(Release(1.0, 0.5, 1),))


def test_a_target_that_needs_no_noise_gets_the_floor():
    assert solve_noise_multiplier(1e6, DELTA, 1.0, 1, "pld") == 2.0**-6


# --- quotes


def terms(cap: float) -> AccountLimits:
    return AccountLimits(cap, DELTA, ORDERS)


def spend(counts: tuple[int, ...], plan: tuple[Release, ...], quote: Quote) -> Spend:
    parts = [Release(r.sample_rate, r.noise_multiplier, n) for r, n in zip(plan, counts, strict=True) if n]
    return Spend(composed_rdp(parts), counts, tuple(parts), quote)


def test_a_quote_covers_the_plan_and_is_never_below_what_a_part_costs():
    plan = (Release(0.05, 1.0, 100), Release(1.0, 50.0, 3))
    quote = PLD.quote(plan, terms(10.0))
    assert quote.counts[-1] == (100, 3)
    assert quote.epsilon[-1] == pld.epsilon(plan, DELTA)
    for counts in [(1, 1), (50, 2), (50, 1), (99, 3), (100, 0)]:
        parts = tuple(Release(r.sample_rate, r.noise_multiplier, n) for r, n in zip(plan, counts, strict=True) if n)
        assert quote.at(counts) >= pld.epsilon(parts, DELTA) * (1 - STATED_ERROR)
    assert quote.at((0, 0)) == 0.0
    assert quote.at((101, 0)) == math.inf


def test_a_quote_has_a_point_at_the_largest_part_that_the_cap_allows_and_reaches_to_the_plans_end():
    plan = (Release(0.05, 1.0, 200),)
    cap = pld.epsilon((Release(0.05, 1.0, 77),), DELTA)
    quote = PLD.quote(plan, terms(cap))
    assert quote.within(cap) == (77,) == (largest_part(PLD, plan, cap, DELTA),)
    assert quote.counts[-1] == (200,)
    assert list(quote.epsilon) == sorted(quote.epsilon)
    assert (
        PLD.spent([spend((77,), plan, quote)], terms(cap)) <= cap < PLD.spent([spend((78,), plan, quote)], terms(cap))
    )


def test_a_cap_that_allows_nothing_has_no_point_within_it():
    quote = PLD.quote((Release(1.0, 1.0, 5),), terms(1.0))
    assert quote.within(1.0) == ()
    assert quote.at((1,)) > 1.0
    assert Quote().at((1,)) == math.inf


def test_a_partial_run_is_charged_the_next_point_or_what_renyi_says_if_that_is_less():
    plan = (Release(0.05, 1.0, 160),)
    quote = PLD.quote(plan, terms(10.0))
    for steps in (1, 11, 87, 160):
        spent = PLD.spent([spend((steps,), plan, quote)], terms(10.0))
        renyi = accountant_of("rdp").curve([(Release(0.05, 1.0, steps),)], DELTA)[0]
        assert spent == min(renyi, quote.at((steps,)))
        assert spent >= pld.epsilon((Release(0.05, 1.0, steps),), DELTA) * (1 - STATED_ERROR)


def test_the_share_of_an_account_that_is_spent_is_linear_in_steps():
    plan = (Release(0.05, 1.0, 160),)
    quote = PLD.quote(plan, terms(10.0))
    assert [PLD.ratio([spend((n,), plan, quote)], terms(10.0)) for n in (0, 40, 160)] == [0.0, 0.25, 1.0]
    assert PLD.ratio([spend((1,), plan, Quote())], terms(0.1)) == math.inf
    assert PLD.ratio([], terms(1.0)) == 0.0


# --- rounding


def test_the_closed_form_of_full_batches_is_never_low():
    """Against 60 digits: at the stated epsilon, delta is at most what was asked for."""
    random = np.random.default_rng(7)
    with mp.workdps(60):
        for _ in range(300):
            z, delta = 2 ** random.uniform(-6, 10), 10 ** random.uniform(-150, -1)
            stated = mp.mpf(pld.epsilon((Release(1.0, z, 1),), delta))
            over = mp.mpf(z) * stated
            lost = mp.ncdf(1 / (2 * mp.mpf(z)) - over) - mp.exp(stated) * mp.ncdf(-1 / (2 * mp.mpf(z)) - over)
            assert lost <= delta
