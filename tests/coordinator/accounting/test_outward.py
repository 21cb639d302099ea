"""What is stated of epsilon and delta is never on the wrong side of its exact value, by whatever little."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.coordinator.accounting.outward import lowered, raised, sum_up, weighted_sum_up
from raycloak.coordinator.accounting.releases import Release, merged
from raycloak.coordinator.accounting.renyi import ORDERS, composed_rdp, epsilon, filter_epsilon, release_rdp

numbers = st.floats(0, 1e6, allow_subnormal=False)


@given(st.lists(numbers, max_size=20))
def test_a_sum_is_the_least_float_that_is_not_below_the_exact_one(values: list[float]):
    total, exact = sum_up(values), sum(map(Fraction, values))
    assert Fraction(total) >= exact
    assert total == 0 or Fraction(math.nextafter(total, 0)) < exact


def test_sums_that_floats_round_down_are_rounded_up():
    assert sum_up([1.0, 2.0**-54]) == 1.0 + 2.0**-52
    assert sum_up([0.25, 0.5]) == 0.75
    assert sum_up([]) == 0
    assert sum_up([math.inf, 1.0]) == math.inf


@given(st.lists(st.tuples(st.integers(0, 10**6), st.lists(numbers, min_size=3, max_size=3)), max_size=6))
def test_a_weighted_sum_is_not_below_the_exact_one(parts: list[tuple[int, list[float]]]):
    found = weighted_sum_up([(count, np.array(values)) for count, values in parts], 3)
    for place in range(3):
        exact = sum(count * Fraction(values[place]) for count, values in parts)
        assert exact <= Fraction(float(found[place])) <= exact * (1 + Fraction(2) ** -48) + Fraction(2) ** -1060


@given(st.floats(1e-300, 1e300))
def test_what_is_raised_is_above_and_what_is_lowered_below(value: float):
    assert lowered(value) < value < raised(value) < lowered(value) * (1 + 2.0**-45)


def exact_epsilon(rdp: Fraction, delta: float, order: float) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        alpha, small = Decimal(order), Decimal(delta)
        conversion = (1 - 1 / alpha).ln() - (small.ln() + alpha.ln()) / (alpha - 1)
        return Decimal(rdp.numerator) / Decimal(rdp.denominator) + conversion


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 0.3])
def test_epsilon_of_a_plan_is_not_below_the_exact_sum_of_its_releases_and_the_conversion(delta: float):
    plan = (Release(1.0, 2.6, 21), Release(1.0, 7.3, 3), Release(1.0, 11.1, 1))
    for order in (1.1, 1.7, 4.3, 9.0, 64.0, 1024.0):
        found = epsilon(composed_rdp(plan, (order,)), delta, (order,))
        rdp = sum(each.count * Fraction(float(release_rdp(each, (order,))[0])) for each in plan)
        exact = exact_epsilon(rdp, delta, order)
        assert Decimal(found) >= max(exact, Decimal(0))
        assert found == pytest.approx(max(float(exact), 0.0), rel=1e-10, abs=1e-10)


def test_orders_that_share_delta_have_no_more_of_it_than_there_is():
    rdp = composed_rdp((Release(1.0, 2.6, 16),), ORDERS)
    shared = [
        float(exact_epsilon(Fraction(float(value)), 1e-5, order)) for value, order in zip(rdp, ORDERS, strict=True)
    ]
    assert filter_epsilon(rdp, 1e-5, ORDERS) > min(shared)
    assert len(ORDERS) * Fraction(lowered(1e-5 / len(ORDERS))) < Fraction(1e-5)


def test_full_batches_that_become_one_gaussian_are_given_no_more_noise_than_they_have():
    (one,) = merged([Release(1.0, 2.6, 20), Release(1.0, 7.3, 4), Release(1.0, 0.3, 1)])
    exact = Fraction(20) / Fraction(2.6) ** 2 + Fraction(4) / Fraction(7.3) ** 2 + 1 / Fraction(0.3) ** 2
    assert 1 / Fraction(one.noise_multiplier) ** 2 >= exact
    assert one.noise_multiplier == pytest.approx(float(exact) ** -0.5, rel=1e-13)
