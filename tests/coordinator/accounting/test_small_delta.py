"""Epsilon by tilted laws at any delta: never below the true value, against other mathematics than its own."""

from collections.abc import Sequence
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest

from raycloak.coordinator.accounting import loss_laws, pld
from raycloak.coordinator.accounting.accountants import accountant_of
from raycloak.coordinator.accounting.loss_laws import TERM_ERROR, LossLaw, displacing_gaussian, sampled_gaussian
from raycloak.coordinator.accounting.releases import Cut, Release, merged
from raycloak.coordinator.accounting.renyi import accountant_delta
from raycloak.coordinator.accounting.tilted_sums import _Grid, _Window
from tests.coordinator.accounting.exact_delta import _outcomes, exact_delta, lower_epsilon

LARGE = Release(1100 / 90e6, 0.53, 2500)
"""The training of 90 million examples in batches of 1,100."""


def test_a_large_data_set_costs_its_true_epsilon_at_a_small_delta():
    delta = accountant_delta(1e-9)
    found = pld.epsilon((LARGE,), delta)
    assert lower_epsilon(LARGE, delta, often=3e-3, interval=2.0**-13, largest=24.0) <= found < 0.797
    assert found > 0.7956
    assert accountant_of("rdp").curve([(LARGE,)], delta)[0] == pytest.approx(3.26, abs=0.01)


@pytest.mark.parametrize(
    ("release", "delta", "often", "interval", "largest", "excess"),
    [
        (Release(1e-7, 0.5, 100_000), 1e-11, 3e-3, 2.0**-14, 24.0, 1.01),
        (Release(0.00107, 1.25, 17), 1.5e-13, 2e-3, 2.0**-17, 3.0, 1.002),
        (Release(0.00334, 0.537, 2), 4e-12, 1e-2, 2.0**-15, 20.0, 1.001),
    ],
)
def test_an_example_that_is_rarely_drawn_costs_hardly_more_than_its_lower_bound(
    release: Release, delta: float, often: float, interval: float, largest: float, excess: float
):
    bound = lower_epsilon(release, delta, often, interval, largest)
    assert bound <= pld.epsilon((release,), delta) <= excess * bound


PLANS = {
    "usual": ((Release(0.01, 1.0, 1000),), 1e-5),
    "many steps": ((Release(1e-3, 1.0, 10_000),), 1e-5),
    "little noise": ((Release(0.01, 0.5, 10_000),), 1e-8),
    "large batches": ((Release(0.2, 2.0, 100),), 1e-12),
    "nearly full batches": ((Release(0.9, 4.0, 50),), 1e-30),
    "tiny delta": ((Release(0.05, 3.0, 500),), 1e-60),
    "much noise": ((Release(0.05, 5.0, 100),), 1e-9),
    "large delta": ((Release(0.02, 1.0, 2000),), 1e-3),
    "measurements": ((Release(0.05, 1.0, 100), Release(1.0, 20.0, 4)), 1e-11),
    "three mechanisms": ((Release(0.03, 0.8, 300), Release(0.1, 2.0, 50), Release(1.0, 15.0, 1)), 1e-12),
    "cut draws": ((Release(256 / 7500, 2.0, 400, Cut((7500,), 290)),), 1e-5),
    "often cut draws": ((Release(0.3, 3.0, 200, Cut((180,), 54)),), 1e-15),
    "cut draws and measurements": ((Release(0.1, 1.5, 300, Cut((500,), 70)), Release(1.0, 30.0, 2)), 1e-10),
}


@pytest.mark.parametrize("name", PLANS)
def test_epsilon_is_never_below_the_true_one_and_hardly_above_it(name: str):
    plan, delta = PLANS[name]
    found = pld.epsilon(plan, delta)
    true = [exact_delta(plan, found, removed) for removed in (True, False)]
    assert max(true) <= delta
    less = [exact_delta(plan, found / 1.002, removed) for removed in (True, False)]
    assert max(less) > delta


@pytest.mark.parametrize("removed", [True, False])
def test_the_moments_behind_the_reference_are_right_to_twelve_digits(removed: bool):
    q, z, order = 0.03, 0.7, mp.mpc(3.5, 11)
    law = _outcomes(Release(q, z, 1), removed, 12.0)
    found = complex(np.exp(law.logs + complex(order) * law.losses).sum())
    with mp.workdps(30):
        ratio = lambda t: 1 - q + q * mp.exp(t / z - 1 / (2 * mp.mpf(z) ** 2))  # noqa: E731
        power = order + 1 if removed else -order
        exact = mp.quad(lambda t: mp.npdf(t) * ratio(t) ** power, [-14, -5, 0, 3, 6, 9, 14, 24])
    assert abs(found - complex(exact)) < 1e-12 * abs(complex(exact))


def closed_form(q: float, z: float, epsilon: float) -> mp.mpf:
    """Delta of one sampled Gaussian that removes an example, by amplification of the closed form, to 60 digits."""
    inner = mp.log1p(mp.expm1(epsilon) / q)
    half, over = 1 / (2 * mp.mpf(z)), inner * z
    return q * (mp.ncdf(half - over) - mp.exp(inner) * mp.ncdf(-half - over))


@pytest.mark.parametrize("q", [1e-6, 0.01, 0.6])
@pytest.mark.parametrize("z", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("share", [1e-2, 1e-9, 1e-40, 1e-110])
def test_one_release_costs_no_less_than_the_closed_form_at_any_delta(q: float, z: float, share: float):
    """A delta is a share of the sampling rate here: above that, nothing would be left."""
    delta = share * q
    found = pld.epsilon((Release(q, z, 1),), delta)
    with mp.workdps(60):
        assert closed_form(q, z, found) <= delta
        assert closed_form(q, z, found / 1.002) > delta or found < 1e-6


def test_a_smaller_delta_never_makes_epsilon_leap():
    """Where an error does not shrink with delta, it shows as a leap in these."""
    plan = (Release(0.02, 0.9, 800), Release(1.0, 25.0, 2))
    found = [pld.epsilon(plan, 10.0**-digits) for digits in range(3, 120, 3)]
    steps = np.diff(found)
    assert (steps > 0).all()
    assert (steps[1:] < steps[:-1] * 1.05).all()
    by_renyi = accountant_of("rdp").curve([plan], 1e-60)[0]
    assert found[19] < by_renyi < 1.1 * found[19]


@pytest.mark.parametrize(("count", "delta"), [(10**6, 1e-9), (10**7, 1e-6)])
def test_many_steps_cost_less_than_renyi_says(count: int, delta: float):
    plan = (Release(1e-4, 1.0, count),)
    by_renyi = accountant_of("rdp").curve([plan], delta)[0]
    assert 0.5 * by_renyi < pld.epsilon(plan, delta) < by_renyi


# --- one release


def exact_masses(shift: float, stays: float, opposite: bool, nodes: Sequence[mp.mpf]) -> tuple[mp.mpf, mp.mpf]:
    """Return the masses of the middle of three nodes under both mixtures, from what the two cells beside it hold."""

    def held(low: mp.mpf, high: mp.mpf) -> tuple[mp.mpf, mp.mpf]:
        still, up, down = (mp.ncdf(high - by) - mp.ncdf(low - by) for by in (0, shift, -shift))
        return (1 - stays) * still + stays * up, (1 - stays) * still + stays * down if opposite else still

    def ratio(at: mp.mpf) -> mp.mpf:
        up, down = (1 - stays + stays * mp.exp(by * shift * at - shift**2 / 2) for by in (1, -1))
        return up / (down if opposite else 1)

    (first_low, second_low), (first_high, second_high) = held(*nodes[:2]), held(*nodes[1:])
    low, middle, high = (ratio(at) for at in nodes)
    second = (first_low - low * second_low) / (middle - low) + (high * second_high - first_high) / (high - middle)
    return middle * second, second


@pytest.mark.parametrize(
    ("noise", "stays", "opposite"),
    [
        (1.0, 0.01, False),
        (0.3, 1e-6, False),
        (40.0, 0.5, False),
        (1.0, 1.0, False),
        (1.5, 0.02, True),
        (0.4, 0.3, True),
    ],
)
def test_a_laws_probabilities_are_right_in_all_digits_however_small_they_are(
    noise: float, stays: float, opposite: bool
):
    forth, back = (displacing_gaussian if opposite else sampled_gaussian)(noise, stays, 20.0)
    nodes = loss_laws._nodes((2 if opposite else 1) / noise, stays, 20.0, opposite)
    smallest = 0.0
    with mp.workdps(150):
        shift = (2 if opposite else 1) / mp.mpf(noise)
        for place in range(1, len(nodes) - 1, len(nodes) // 23):
            three = [mp.mpf(float(each)) for each in nodes[place - 1 : place + 2]]
            masses = exact_masses(shift, mp.mpf(stays), opposite, three)
            for law, mass in zip((forth, back), masses, strict=True):
                assert abs(mp.mpf(law.log_masses[place]) - mp.log(mass)) <= TERM_ERROR * law.terms
                smallest = min(smallest, float(law.log_masses[place]))
            loss = mp.log(masses[0] / masses[1])
            assert 0 <= forth.losses[place] - loss <= 2 * TERM_ERROR * forth.terms
            assert 0 <= back.losses[place] + loss <= 2 * TERM_ERROR * back.terms
    assert smallest < -150, "masses of 10^-65 are among them"


def delta_of(law: LossLaw, epsilon: float) -> float:
    """Return delta of one release with that law."""
    return float(np.maximum(0, -np.expm1(epsilon - law.losses)) @ np.exp(law.log_masses)) + law.beyond


@pytest.mark.parametrize(("q", "z"), [(0.01, 1.0), (0.3, 0.5), (1e-4, 2.0)])
def test_a_law_dominates_the_real_one_and_hardly_more(q: float, z: float):
    forth, _ = sampled_gaussian(z, q, 12.0)
    for epsilon in (0.001, 0.01, 0.1, 0.5, 1.0):
        with mp.workdps(40):
            exact = float(closed_form(q, z, epsilon))
        assert exact <= delta_of(forth, epsilon) <= 1.002 * exact + 1e-30


def test_the_chances_of_a_cut_are_right_to_ten_digits():
    for size, q, capacity in [(5, 0.3, 2), (7500, 0.034, 290), (7500, 0.034, 700), (90_000, 1e-3, 200)]:
        ((cut, stays),) = Cut((size,), capacity).chances(q)
        with mp.workdps(40):
            exact = mp.betainc(capacity, size - capacity, 0, q, regularized=True)
            kept = mp.betainc(capacity + 1, size - capacity, 0, q, regularized=True) * capacity / size
        assert abs(cut / exact - 1) < pld.CHANCE_ERROR
        assert abs(stays / kept - 1) < pld.CHANCE_ERROR


# --- the sum of many


def grid_of(plan: tuple[Release, ...], delta: float, interval: float) -> _Grid:
    return _Grid.of(next(iter(pld._compositions(merged(plan), delta))), delta, interval)


def test_a_badly_chosen_window_only_loosens_epsilon():
    """Whatever is wrapped into a window, and whatever the tilt: the true delta is never above the one asked for."""
    plan, delta = PLANS["usual"]
    grid = grid_of(plan, delta, 2.0**-9)
    true = pld.epsilon(plan, delta) / 1.002
    random, found = np.random.default_rng(3), []
    for _ in range(200):
        bottom, width, tilt = random.uniform(0, 2.5), 2.0 ** random.uniform(-6, 4), 2.0 ** random.uniform(-4, 5)
        window = _Window(bottom, bottom + width, tilt, tilt * 2.0 ** random.uniform(0, 2))
        found.append(grid.epsilon(grid.tail(window)).epsilon)
    assert min(found) >= true
    assert max(found) > 2 * true, "some windows are bad"
    assert min(found) < 1.01 * true, "and some are good"


@pytest.mark.parametrize("name", ["usual", "many steps", "tiny delta", "three mechanisms"])
def test_transforms_err_far_less_than_is_allowed_for(name: str):
    """The same laws are composed in extended precision, and the distance is compared with the bound."""
    plan, delta = PLANS[name]
    grid = grid_of(plan, delta, 2.0**-8)
    window = grid.anywhere()
    size, exact = grid.points(window), np.ones(1, dtype=np.clongdouble)
    for (law, _), (_, _, count) in zip(grid.folded(window, size), grid.nodes, strict=True):
        exact = exact * np.fft.rfft(law.astype(np.longdouble)) ** count
    masses, error = grid.convolved(window)
    distance = float(np.sqrt(np.square(masses - np.fft.irfft(exact, size)).sum()))
    assert 0 < distance < error / 10
    assert error < 1e-9


def test_what_an_untilted_transform_would_lose_is_more_than_a_small_delta():
    """Why laws are tilted: without a tilt the same transforms err by more than a tenth of delta."""
    delta = accountant_delta(1e-9) * 1e-6
    grid = grid_of((LARGE,), delta, 2.0**-8)
    flat = _Window(0.0, grid.anywhere().top, 1e-6, grid.anywhere().far_tilt)
    _, error = grid.convolved(flat)
    assert error > 0.1 * delta
    assert grid.epsilon(grid.tail(grid.anywhere())).stray < 0.1


# --- sums told apart by a limit of losses

RARE = (Release(1e-3, 1.0, 100), Release(1e-2, 2.0, 10))


@pytest.mark.parametrize(
    ("q", "z", "count", "delta"),
    [(1e-7, 1.0, 1000, 1e-16), (1e-5, 1.0, 100_000, 1e-12), (1e-5, 1.0, 1, 1e-32), (1e-3, 0.3, 1000, 1e-20)],
)
def test_a_small_delta_is_computed_where_an_example_is_rarely_drawn(q: float, z: float, count: int, delta: float):
    found = pld.epsilon((Release(q, z, count),), delta)
    by_renyi = accountant_of("rdp").curve([(Release(q, z, count),)], delta)[0]
    with mp.workdps(60):
        assert closed_form(q, z, found) <= delta, "many releases cost no less than one"
    assert found < by_renyi


def test_any_limit_between_small_and_large_losses_only_loosens_epsilon():
    plan, delta = PLANS["usual"]
    grid = grid_of(plan, delta, 2.0**-9)
    true = pld.epsilon(plan, delta) / 1.002
    found = [grid.apart(true * 2.0**-halved, true).epsilon for halved in range(-3, 8)]
    assert min(found) >= true
    assert min(found) < 1.02 * true


def test_a_sum_told_apart_errs_far_less_than_is_allowed_for():
    """The same laws are composed in extended precision, and the distance is compared with the bound."""
    delta = 1e-15
    grid = grid_of(RARE, delta, 2.0**-9)
    limit, window = 0.02, replace(grid.anywhere(), tilt=8.0)
    size = grid.points(window)
    masses, error, _ = grid.convolved_apart(window, limit)
    both, without = np.ones(1, dtype=np.clongdouble), np.ones(1, dtype=np.clongdouble)
    for (often, rare), (_, _, count) in zip(grid.folded(window, size, limit), grid.nodes, strict=True):
        first, second = (np.fft.rfft(each.astype(np.longdouble)) for each in (often, rare))
        both, without = both * (first + second) ** count, without * first**count
    distance = float(np.sqrt(np.square(masses - np.fft.irfft(both - without, size)).sum()))
    assert 0 < distance < error / 10
    assert error < 1e-8 * np.abs(masses).sum()
