"""An example of a client's pays for the releases it takes part in, k at most: `docs/proofs/009-participations.md`."""

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy.stats import norm

from raycloak.coordinator.accounting import pld, renyi
from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.releases import Release, release_of
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta, composed_rdp
from raycloak.coordinator.planning.cross_check import cross_check
from tests.coordinator.ledger.ledger_cases import mechanism

DELTA = 1e-5
CURVE = (0.0, 0.2, 0.5, 1.0, 1.6)
"""Epsilons at which the small case is compared."""

SKIP, WEAK, STRONG = ((0.5, 0.5), (0.5, 0.5)), ((0.6, 0.4), (0.45, 0.55)), ((0.7, 0.3), (0.3, 0.7))
"""What a release can do: laws of its two outcomes with the example and without it. STRONG dominates the others."""


def gaussian_delta(epsilon: float, noise: float, count: int) -> float:
    """Return delta of ``count`` Gaussians of noise multiplier ``noise``, by Balle and Wang (arXiv 1805.06530)."""
    mu = math.sqrt(count) / noise
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(("count", "paid"), [(1, 1), (3, 3), (4, 3), (20, 3)])
def test_the_charge_of_each_release_beyond_the_bound_is_zero(count: int, paid: int):
    one = mechanism(max_participations=3)
    assert release_of(one, count) == Release(1.0, one.noise_multiplier, paid)
    assert release_of(mechanism(), count).count == count


@pytest.mark.parametrize(("noise", "bound"), [(4.0, 4), (1.5, 1), (28.0, 200)])
def test_five_accountants_agree_on_it_with_the_closed_form(noise: float, bound: int):
    """RDP and PLD of min(n, k) releases; PLD is the exact value, and RDP is above it by its conversion alone."""
    sigma = noise * 2**20 / math.sqrt(8) * 1.001
    release = release_of(mechanism(noise_multiplier=noise, max_participations=bound, steps=200, sigma=sigma), 200)
    found = cross_check((release,), accountant_delta(DELTA))
    assert found.disagreement() is None
    tight = found.epsilon["raycloak_pld"]
    assert found.epsilon["dp_accounting_pld"] == pytest.approx(tight, rel=1e-9)
    assert gaussian_delta(tight, noise, bound) == pytest.approx(accountant_delta(DELTA), rel=1e-2)
    assert tight == pld.epsilon((Release(1.0, noise, bound),), accountant_delta(DELTA))
    assert tight < found.epsilon["opacus_rdp"] < 1.2 * tight


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_no_choice_of_who_takes_part_learns_more_than_the_bound_allows(bound: int):
    """Every schedule of three releases that may look at all outcomes so far, 2,187 of them, by plain enumeration."""
    allowed = [law for law, most in _all_laws() if most <= bound]
    beyond = [law for law, most in _all_laws() if most > bound]
    assert len(allowed) + len(beyond) == 3**7
    assert (not beyond) == (bound == 3)
    claimed = _hockey_sticks(_product(bound))
    worst = np.max([_hockey_sticks(law) for law in allowed], axis=0)
    np.testing.assert_allclose(worst, claimed, atol=1e-12)
    if beyond:
        assert np.any(np.max([_hockey_sticks(law) for law in beyond], axis=0) > claimed + 0.01)


@cache
def _all_laws() -> list[tuple[np.ndarray, int]]:
    return [_law(schedule) for schedule in _schedules(3)]


def _schedules(steps: int) -> Iterator[dict[tuple[int, ...], tuple[tuple[float, float], tuple[float, float]]]]:
    """Yield every map of the outcomes so far to what the next release does."""
    histories = [outcomes for done in range(steps) for outcomes in product((0, 1), repeat=done)]
    for chosen in product((SKIP, WEAK, STRONG), repeat=len(histories)):
        yield dict(zip(histories, chosen, strict=True))


def _law(schedule: dict[tuple[int, ...], tuple[tuple[float, float], tuple[float, float]]]) -> tuple[np.ndarray, int]:
    """Return the two laws of all outcomes, [2, 8], and the most participations on any path."""
    steps = max(map(len, schedule)) + 1
    law, most = np.ones((2, 2**steps)), 0
    for place, outcomes in enumerate(product((0, 1), repeat=steps)):
        made = [schedule[outcomes[:done]] for done in range(steps)]
        most = max(most, sum(each is not SKIP for each in made))
        for each, outcome in zip(made, outcomes, strict=True):
            law[:, place] *= each[0][outcome], each[1][outcome]
    return law, most


def _product(count: int) -> np.ndarray:
    return _law({outcomes: STRONG for done in range(count) for outcomes in product((0, 1), repeat=done)})[0]


def _hockey_sticks(law: np.ndarray) -> np.ndarray:
    """Return delta at each epsilon of CURVE, in the worse direction."""
    return np.array([max(np.maximum(law[a] - math.exp(e) * law[1 - a], 0).sum() for a in (0, 1)) for e in CURVE])


@pytest.mark.parametrize(("steps", "bound"), [(12, 3), (12, 1), (6, 6)])
def test_the_best_adaptive_choice_among_gaussian_releases_meets_the_claim_and_does_not_pass_it(steps: int, bound: int):
    """Dynamic programming on the exact loss: before each release the adversary sends the example, or keeps it back."""
    noise = 2.0
    claimed = pld.epsilon((release_of(mechanism(noise_multiplier=noise, max_participations=bound), steps),), DELTA)
    reached = _best_delta(claimed, noise, steps, bound)
    assert DELTA / 1.02 < reached < 1.02 * DELTA
    if bound < steps:
        assert _best_delta(claimed, noise, steps, bound + 1) > 3 * DELTA


def _best_delta(epsilon: float, noise: float, steps: int, bound: int) -> float:
    """Return the most delta at ``epsilon`` over all adaptive choices of at most ``bound`` of ``steps`` releases.

    The loss is a Gaussian walk on a grid of a twentieth of a step's deviation; see `test_claim.py`.
    """
    drift, deviation = 1 / (2 * noise**2), 1 / noise
    spacing = deviation / 20
    loss = np.arange(-10 * math.sqrt(bound) * deviation, 12 * math.sqrt(bound) * deviation + bound * drift, spacing)
    moves = np.arange(-180, 181) * spacing
    weights = np.diff(norm.cdf(np.append(moves - spacing / 2, moves[-1] + spacing / 2) / deviation))
    end = np.maximum(0.0, -np.expm1(np.minimum(epsilon - loss, 0.0)))

    @cache
    def value(done: int, left: int) -> np.ndarray:
        if done == steps:
            return end
        back = value(done + 1, left)
        if not left:
            return back
        sent = np.interp(loss + drift, loss, np.convolve(value(done + 1, left - 1), weights, "same"))
        return np.maximum(back, sent)

    return float(np.interp(0.0, loss, value(0, bound)))


def test_a_filter_charges_at_its_order_what_one_example_can_have_lost():
    """Two runs of sent data and one of a dataset on one account: the bound of each run counts for itself."""
    limits = AccountLimits(8.0, accountant_delta(DELTA), ORDERS)
    sent, other = mechanism(max_participations=3), mechanism(max_participations=5)
    plan = (release_of(sent, 20), release_of(other, 20), release_of(mechanism(), 2))
    orders = accountant_of("rdp").fixed_orders(plan, limits)
    one = renyi.step_rdp(1.0, sent.noise_multiplier, orders)[0]
    assert composed_rdp(plan, orders) == pytest.approx([(3 + 5 + 2) * one])
