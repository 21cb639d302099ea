"""The statistics of an audit: hand-computed values, brute force, and the coverage that is promised."""

import math
from fractions import Fraction

import pytest

from raycloak.coordinator.audit.bound import epsilon_lower_bound, p_value


def brute_force(epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """Return the formula of the paper, in exact arithmetic on the float accuracy."""
    accuracy = Fraction(1 / (1 + math.exp(-epsilon)))
    chance = [math.comb(guesses, k) * accuracy**k * (1 - accuracy) ** (guesses - k) for k in range(guesses + 1)]
    beta = sum(chance[correct:], Fraction(0))
    windows = [sum(chance[correct - i : correct], Fraction(0)) / i for i in range(1, correct + 1)]
    return float(beta + 2 * canaries * Fraction(delta) * max(windows, default=Fraction(0)))


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("delta", [0.0, 1e-9, 1e-5, 1e-3])
@pytest.mark.parametrize(("guesses", "correct"), [(1, 1), (12, 0), (12, 7), (40, 31), (40, 40)])
def test_the_p_value_is_the_papers_in_exact_arithmetic(epsilon, delta, guesses, correct):
    """Up to 2 m delta = 1, that is, wherever the paper's value grows with epsilon by itself."""
    exact = min(1.0, brute_force(epsilon, delta, 200, guesses, correct))
    found = p_value(epsilon, delta, canaries=200, guesses=guesses, correct=correct)
    assert found == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("delta", [1e-3, 0.05, 0.5])
def test_beyond_that_it_is_larger_and_still_grows_with_epsilon(delta):
    terms = {"canaries": 300, "guesses": 30, "correct": 24}
    values = [p_value(e / 20, delta, **terms) for e in range(80)]
    assert values == sorted(values)
    assert all(values[e] >= min(1, brute_force(e / 20, delta, *terms.values())) - 1e-12 for e in range(0, 80, 10))


@pytest.mark.parametrize(("guesses", "epsilon"), [(100, 3.49), (500, 5.11), (1000, 5.81)])
def test_all_guesses_right_at_95_percent(guesses, epsilon):
    """By hand: the accuracy a of which a^r = 0.05, and epsilon = log(a / (1 - a))."""
    accuracy = 0.05 ** (1 / guesses)
    by_hand = math.log(accuracy / (1 - accuracy))
    found = epsilon_lower_bound(canaries=guesses, guesses=guesses, correct=guesses, delta=0.0, significance=0.05)
    assert found == pytest.approx(by_hand, abs=1e-5)
    assert found <= by_hand
    assert found == pytest.approx(epsilon, abs=0.005)


def test_a_bound_is_refuted_itself_and_a_millionth_more_is_not():
    terms = {"canaries": 1000, "guesses": 400, "correct": 320}
    found = epsilon_lower_bound(**terms, delta=1e-7, significance=0.01)
    assert p_value(found, 1e-7, **terms) < 0.01 <= p_value(found + 1e-5, 1e-7, **terms)


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("significance", [0.05, 1e-3])
def test_the_bound_exceeds_the_truth_with_at_most_the_chance_stated(epsilon, significance):
    """Against randomized response, the worst case of the theorem: summed over all outcomes, no sampling."""
    guesses, accuracy = 150, 1 / (1 + math.exp(-epsilon))
    wrong = 0.0
    for correct in range(guesses + 1):
        bound = epsilon_lower_bound(
            canaries=guesses, guesses=guesses, correct=correct, delta=0.0, significance=significance
        )
        if bound > epsilon:
            wrong += math.comb(guesses, correct) * accuracy**correct * (1 - accuracy) ** (guesses - correct)
    assert wrong <= significance


def test_more_right_guesses_never_lower_the_bound_and_delta_never_raises_it():
    bounds = [
        epsilon_lower_bound(canaries=300, guesses=100, correct=v, delta=1e-6, significance=0.05) for v in range(101)
    ]
    assert bounds == sorted(bounds)
    assert bounds[50] == 0
    free = epsilon_lower_bound(canaries=300, guesses=100, correct=90, delta=0.0, significance=0.05)
    assert bounds[90] < free
