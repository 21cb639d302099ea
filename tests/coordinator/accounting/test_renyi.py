"""Epsilon, the noise that a target needs, and what delta covers besides."""

import math
import time
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import integrate

from raycloak.coordinator.accounting.calibration import epsilon_against, epsilon_of, solve_noise_multiplier
from raycloak.coordinator.accounting.renyi import (
    ORDERS,
    SLACK_SHARE,
    SMALLEST_NOISE_MULTIPLIER,
    accountant_delta,
    delta_slack,
    effective_noise_multiplier,
    epsilon,
    slack_reserve,
    step_rdp,
    total_slack,
)
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.noise import SAMPLER_DISTANCE

DELTA = 1e-5

# (q, z, steps), epsilon of dp-accounting 0.6.0's RDP and of its PLD, at delta 1e-5.
PINNED = [
    (0.01, 1.0, 1000, 2.101, 1.828),
    (0.01, 0.5, 1000, 15.47, 13.36),
    (0.001, 1.0, 10000, 0.788, 0.476),
    (0.05, 1.0, 500, 8.302, 7.524),
    (0.2, 1.0, 100, 16.08, 14.53),
    (0.2, 2.0, 100, 5.499, 5.023),
    (0.5, 2.0, 50, 10.29, 9.474),
]


def rdp_epsilon(q: float, z: float, steps: int) -> float:
    """Epsilon with all of DELTA given to the accountant."""
    return epsilon(np.asarray(step_rdp(q, z)) * steps, DELTA)


def mechanism(**changes: Any) -> Mechanism:
    """A full-batch mechanism: its accounting needs no series."""
    values: dict[str, Any] = {
        "private": True,
        "num_examples": 800,
        "virtual_workers": 8,
        "sample_rate": 1.0,
        "steps": 100,
        "max_grad_norm": 1.0,
        "noise_multiplier": 10.0,
        "honest_share": 1.0,
        "expected_batch_size": 800.0,
        "dimension": 10_000,
        "ring_bits": 32,
        "gamma_log2": -20,
        "clamp": 100.0,
        "sigma": 10.0 * 2**20 / math.sqrt(8) * 1.001,
        "micro_batch_size": 100,
        "micro_batches": 1,
        "overflow_probability": 1e-16,
    }
    return Mechanism(**values | changes)


@pytest.mark.parametrize(("q", "z", "steps", "rdp", "pld"), PINNED)
def test_epsilon_is_within_two_percent_of_the_pinned_values_and_never_below_pld(
    q: float, z: float, steps: int, rdp: float, pld: float
):
    ours = rdp_epsilon(q, z, steps)
    assert ours == pytest.approx(rdp, rel=0.02)
    assert ours > pld


def test_no_release_is_free_or_lowers_what_others_cost():
    """The library rounds these divergences, of 1e-15, to zero and below at 51 of 165 orders."""
    assert min(step_rdp(1e-6, 300.0)) > 0


@pytest.mark.parametrize(("q", "z", "steps", "rdp", "pld"), PINNED)
def test_epsilon_agrees_with_dp_accounting(q: float, z: float, steps: int, rdp: float, pld: float):
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    accountant = RdpAccountant()
    accountant.compose(event, steps)
    assert rdp_epsilon(q, z, steps) == pytest.approx(accountant.get_epsilon(DELTA), rel=0.02)


@pytest.mark.parametrize("q", [0.01, 0.25, 0.9])
@pytest.mark.parametrize("z", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("order", [1.1, 1.5, 2.0, 2.5, 7.5])
def test_one_steps_rdp_is_the_integral_that_defines_it(q: float, z: float, order: float):
    def density(x: float) -> float:
        ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
        return math.exp(order * ratio - x * x / (2 * z * z)) / (z * math.sqrt(2 * math.pi))

    moment = integrate.quad(density, -40 * z, 40 * z + 2 * order, points=[0, order], limit=500, epsabs=0)[0]
    assert step_rdp(q, z, (order,))[0] == pytest.approx(math.log(moment) / (order - 1), rel=1e-6, abs=1e-12)


def test_the_full_batch_is_the_plain_gaussian():
    from opacus.accountants.analysis.rdp import compute_rdp

    theirs = compute_rdp(q=1.0, noise_multiplier=4.0, steps=1, orders=list(ORDERS))
    assert step_rdp(1.0, 4.0) == pytest.approx(list(theirs), rel=1e-12)


def test_conversion_equals_opacus():
    from opacus.accountants.analysis.rdp import get_privacy_spent

    random = np.random.default_rng(1)
    for exponent in range(-4, 3):
        for delta in (1e-2, 1e-5, 1e-9):
            rdp = np.sort(random.random(len(ORDERS))) * 10.0**exponent
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = get_privacy_spent(orders=list(ORDERS), rdp=rdp, delta=delta)[0]
            assert epsilon(rdp, delta) == pytest.approx(max(theirs, 0), abs=1e-9)


def test_epsilon_takes_less_than_50_microseconds():
    vector = np.asarray(step_rdp(1.0, 5.0))
    epsilon(vector, DELTA)
    times = []
    for steps in range(2000):
        start = time.perf_counter()
        epsilon(vector * steps, DELTA)
        times.append(time.perf_counter() - start)
    assert min(times) < 50e-6


def test_nothing_released_costs_nothing_and_no_noise_costs_everything():
    assert epsilon(np.zeros(len(ORDERS)), DELTA) == 0.0
    assert epsilon(step_rdp(1.0, 1e-3), DELTA) > 1e5


def test_epsilon_is_concave_in_steps_so_it_is_never_summed():
    assert rdp_epsilon(1.0, 10.0, 20) < 2 * rdp_epsilon(1.0, 10.0, 10)


@pytest.mark.parametrize(
    ("target", "q", "steps"),
    [(8.0, 0.25, 200), (1.0, 0.01, 1000), (3.0, 1.0, 10), (0.1, 0.001, 100), (40.0, 0.01, 100), (0.5, 1.0, 1)],
)
def test_solved_noise_meets_the_target_within_a_thousandth_from_below(target: float, q: float, steps: int):
    noise = solve_noise_multiplier(target, DELTA, q, steps)
    assert 0.999 * target <= epsilon_of(q, noise, steps, DELTA) <= target
    assert float(f"{noise:.5e}") == noise


def test_an_epsilon_that_no_noise_reaches_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"epsilon_unreachable.*100 steps.*0\.002"):
        solve_noise_multiplier(0.002, DELTA, 1.0, 100)


def test_a_target_that_needs_no_noise_gets_the_floor():
    assert solve_noise_multiplier(1e6, DELTA, 1.0, 1) == SMALLEST_NOISE_MULTIPLIER


def test_noise_is_solved_where_a_large_delta_leaves_no_epsilon_at_all():
    noise = solve_noise_multiplier(8.0, 0.5, 0.1, 1)
    assert epsilon_of(0.1, 1.0, 1, 0.5) == 0 < epsilon_of(0.1, noise, 1, 0.5) <= 8


def test_the_accountant_leaves_the_reserve():
    assert accountant_delta(DELTA) == pytest.approx(0.99 * DELTA, rel=1e-14, abs=0)
    for delta in (DELTA, 1e-9, 1 / 3, math.nextafter(1, 0), 5e-301):
        assert Fraction(accountant_delta(delta)) + Fraction(slack_reserve(delta)) <= Fraction(delta)
        assert slack_reserve(delta) == pytest.approx(SLACK_SHARE * delta, rel=1e-14, abs=0)
    assert epsilon_of(1.0, 5.0, 10, DELTA) > rdp_epsilon(1.0, 5.0, 10)


def test_slack_terms_are_the_formulas():
    terms = delta_slack(mechanism(), 2.0)
    factor, coordinates = 1 + math.exp(2.0), 10_000 * 100
    assert terms.sampler == pytest.approx(coordinates * 8 * factor * SAMPLER_DISTANCE, rel=1e-9, abs=0)
    assert terms.batch_overflow == pytest.approx(factor * 1e-16, rel=1e-9, abs=0)
    assert terms.rounding == pytest.approx(coordinates * 8 * factor * 2.0**-112, rel=1e-9, abs=0)
    assert terms.ring_wrap == pytest.approx(coordinates * factor * 2 * math.exp(-128), rel=1e-9, abs=0)
    assert terms.mask_split == 0
    parts = (terms.sampler, terms.batch_overflow, terms.rounding, terms.ring_wrap)
    assert sum(map(Fraction, parts)) <= Fraction(terms.total)
    assert terms.total == pytest.approx(sum(parts), rel=1e-14, abs=0)


def test_delta_pays_once_for_masks_that_fall_apart_whatever_epsilon_is():
    paid = [delta_slack(mechanism(mask_split_probability=2.0**-40), cap) for cap in (0.0, 8.0)]
    assert [each.mask_split for each in paid] == [2.0**-40] * 2
    assert paid[0].total == pytest.approx(2.0**-40 + delta_slack(mechanism(), 0.0).total, rel=1e-14, abs=0)
    assert total_slack([mechanism(mask_split_probability=2.0**-40), mechanism()], 8.0).mask_split == 2.0**-40
    # The least delta whose hundredth part has room for it.
    assert slack_reserve(9.2e-11) > 2.0**-40 > slack_reserve(9.0e-11)


def test_slack_grows_without_bound_with_epsilon_and_is_zero_without_privacy():
    totals = [delta_slack(mechanism(), cap).total for cap in (0, 1, 8, 40, 699)]
    assert totals == sorted(totals)
    assert delta_slack(mechanism(), 1e6).total == math.inf
    assert delta_slack(mechanism(overflow_probability=0.0), 1e6).batch_overflow == 0
    assert delta_slack(mechanism(private=False), 1e6).total == 0


def test_all_shares_give_at_least_the_planned_noise_and_missing_ones_less():
    planned = mechanism()
    assert planned.noise_multiplier <= effective_noise_multiplier(planned, 0) < planned.noise_multiplier * 1.01
    halved = effective_noise_multiplier(planned, 4)
    assert halved == pytest.approx(effective_noise_multiplier(planned, 0) / math.sqrt(2), rel=1e-6)
    assert effective_noise_multiplier(planned, 8) == 0


def test_four_squared_ring_units_are_taken_from_the_noise():
    coarse = mechanism(sigma=16.0, gamma_log2=0, noise_multiplier=0.4)
    expected = math.sqrt(8 * 256 - 4) / coarse.sensitivity
    assert effective_noise_multiplier(coarse, 0) == pytest.approx(expected, rel=1e-12)


def test_one_worker_of_two_knows_half_the_noise_and_both_epsilons_are_told_apart():
    outsiders = epsilon_against(mechanism(), 0, DELTA, 100)
    one_worker = epsilon_against(mechanism(), 4, DELTA, 100)
    assert one_worker > 1.3 * outsiders
    assert one_worker == pytest.approx(epsilon_of(1.0, effective_noise_multiplier(mechanism(), 4), 100, DELTA))


def test_who_knows_all_noise_has_no_guarantee():
    assert epsilon_against(mechanism(), 8, DELTA, 100) == math.inf


def test_an_epsilon_whose_slack_delta_cannot_pay_is_not_stated():
    stated = mechanism(noise_multiplier=1.0, sigma=2**20 / math.sqrt(8) * 1.001, steps=1)
    assert math.isfinite(epsilon_against(stated, 0, DELTA, 1))
    assert math.isfinite(epsilon_against(stated, 7, DELTA, 1))
    # At an epsilon of some hundred the sampler's distance from its law no longer fits.
    assert epsilon_against(stated, 7, DELTA, 40) == math.inf
