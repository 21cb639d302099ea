"""A filter holds at one order, or shares delta over several, against releases that are chosen as others are seen.

An adversary makes one release with two outcomes, and lets its outcome pick the second, which the filter must admit.
Both are two-point mechanisms, so the true delta is a sum of four terms.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from raycloak.coordinator.accounting import renyi
from raycloak.coordinator.accounting.accountants import AccountLimits, Quote, Spend, accountant_of
from raycloak.coordinator.accounting.calibration import composed_epsilon, solve_noise_multiplier
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta, composed_rdp, least_share_order

CAP, DELTA = 8.0, 1e-5
RENYI = accountant_of("rdp")


def test_an_adaptive_adversary_passes_the_smallest_over_many_orders_and_twice_delta():
    """Why the filter needs its rule: the best of many orders bounds no releases that follow from others."""

    def smallest(spends: Sequence[Spend], limits: AccountLimits) -> float:
        return renyi.epsilon(np.sum([spend.rdp for spend in spends], axis=0), limits.delta, limits.orders)

    assert 1.98 < _true_delta(smallest, ORDERS) / DELTA < 2.0


@pytest.mark.parametrize("orders", [ORDERS, (3.0, 20.0), (3.0,), (6.0,), (20.0,)])
def test_no_adaptive_adversary_gets_more_delta_than_the_filter_claims(orders: tuple[float, ...]):
    true = _true_delta(RENYI.spent, orders)
    assert true <= DELTA
    # The bound is nearly met at one order, so a looser rule would fail here.
    assert len(orders) > 1 or true > 0.98 * DELTA


def test_the_conversion_is_the_best_bound_that_one_order_gives():
    """Section 1 of proof 004: (1 - e^-x)+ <= c e^((a-1) x), with equality at e^x = a / (a-1)."""
    x = np.linspace(-5, 20, 100_001)
    for order in (1.1, 2.0, 3.0, 20.0, 256.0, 1024.0):
        constant = (1 - 1 / order) ** order / (order - 1)
        bound = constant * np.exp((order - 1) * np.minimum(x, 700 / order))
        assert np.all(np.maximum(-np.expm1(-x), 0) <= bound * (1 + 1e-12))
        touching = math.log(order / (order - 1))
        assert -math.expm1(-touching) == pytest.approx(constant * math.exp((order - 1) * touching), rel=1e-9)
        # What is added to RDP makes delta of it.
        (added,) = -np.asarray(renyi.filter_caps(0.0, DELTA, (order,)))
        assert constant * math.exp(-(order - 1) * added) == pytest.approx(DELTA, rel=1e-9)


def test_several_orders_cost_more_than_the_best_and_less_than_their_union_bound():
    """Epsilon of q 0.01, z 1, 1000 steps: 2.10 for the plan, 2.41 with 8 orders, 2.84 with all of them."""
    plan = [Release(0.01, 1.0, 1000)]
    eight = (4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 48.0)
    for orders, expected in ((None, 2.101), (eight, 2.41), (ORDERS, 2.84)):
        assert RENYI.curve([tuple(plan)], DELTA, orders)[0] == pytest.approx(expected, abs=0.01)
    best = least_share_order(composed_rdp(plan), 2.102, DELTA, ORDERS)
    assert RENYI.curve([tuple(plan)], DELTA, (best,))[0] == pytest.approx(2.101, abs=0.001)


@pytest.mark.parametrize(
    ("q", "steps", "target"), [(0.01, 1000, 2.0), (0.1, 50, 8.0), (1.0, 20, 1.0), (0.001, 300, 0.3)]
)
def test_noise_that_is_solved_for_a_cap_fits_a_new_account_of_that_cap(q: float, steps: int, target: float):
    noise = solve_noise_multiplier(target, DELTA, q, steps)
    plan = (Release(q, noise, steps),)
    orders = RENYI.fixed_orders(plan, AccountLimits(target, accountant_delta(DELTA), ORDERS))
    assert len(orders) == 1
    spent = composed_epsilon(plan, DELTA, "rdp", orders)
    assert composed_epsilon(plan, DELTA) <= spent <= target
    assert spent >= 0.999 * target


def test_the_order_that_is_fixed_takes_the_least_share_of_the_cap():
    rdp = composed_rdp([Release(0.01, 1.0, 1000)])
    for cap in (2.2, 4.0, 8.0, 40.0):
        order = least_share_order(rdp, cap, DELTA, ORDERS)
        shares = renyi.order_shares(rdp, cap, DELTA, ORDERS)
        assert shares[ORDERS.index(order)] == shares.min() < 1
    # No order admits anything at this cap, so the one with the smallest epsilon says by how much.
    least = least_share_order(rdp, 0.0, DELTA, ORDERS)
    assert renyi.epsilon(rdp, DELTA) == renyi.filter_epsilon(rdp[[ORDERS.index(least)]], DELTA, (least,))


Admits = Callable[[Sequence[tuple[float, float]]], bool]


def _true_delta(spent: Callable[[Sequence[Spend], AccountLimits], float], orders: tuple[float, ...]) -> float:
    """Return the largest delta at CAP that an adversary of this kind reaches under a filter."""
    limits = AccountLimits(CAP, DELTA, orders)

    def admits(made: Sequence[tuple[float, float]]) -> bool:
        spends = [Spend(_rdp(*each, orders), (1,), (Release(1.0, 1.0, 1),), Quote()) for each in made]
        return spent(spends, limits) <= CAP

    return max(_after(admits, *first) for first in ((0.003, 0.3), (0.003, 0.6), (0.01, 0.6)))


def _after(admits: Admits, p: float, loss: float) -> float:
    """Return the delta if the first release has this loss with probability ``p``, and its outcome picks the second."""
    total, q = 0.0, p * math.exp(-loss)
    for with_it, without in ((p, q), (1 - p, 1 - q)):
        seen = math.log(with_it / without)
        # Losses that end a little above the cap, the more likely the better.
        ends = [(_most_likely(admits, (p, loss), end - seen), end) for end in CAP + np.arange(0.02, 1.5, 0.02)]
        total += with_it * max(likely * -math.expm1(CAP - end) for likely, end in ends)
    return total


def _most_likely(admits: Admits, first: tuple[float, float], loss: float) -> float:
    """Return the largest probability with which the filter admits a second release of this loss; 0 for none."""
    low, high = -40.0, math.log1p(-1e-6)
    if not admits([first, (math.exp(low), loss)]):
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if admits([first, (math.exp(middle), loss)]) else (low, middle)
    return math.exp(low)


def _rdp(p: float, loss: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the RDP of a release with one outcome of this loss and probability ``p``, and one other."""
    a, q = np.asarray(orders), p * math.exp(-loss)
    rare = a * math.log(p) + (1 - a) * math.log(q)
    usual = a * math.log1p(-p) + (1 - a) * math.log1p(-q)
    return np.asarray(np.logaddexp(rare, usual) / (a - 1))
