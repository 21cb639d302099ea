"""Computes a lower bound on epsilon from right guesses: one-run auditing, pure statistics.

A run trains with m canaries, each included by a fair secret coin. An observer of the released data guesses r of the
coins, and v guesses are right. If the run is (epsilon, delta) differentially private, a Binomial(r, e^epsilon / (1 +
e^epsilon)) dominates v stochastically, up to a term in delta. This is theorem 5.2 of Steinke, Nasr and Jagielski 2023,
arXiv 2305.08846. So many right guesses refute every small epsilon.
"""

import math

import numpy as np

_RESOLUTION = 2.0**-20  # six digits


def p_value(epsilon: float, delta: float, *, canaries: int, guesses: int, correct: int) -> float:
    """Bound the chance of at least ``correct`` right guesses, if the run is (epsilon, delta) private.

    ``beta + 2 m delta max_i P[v - i <= X < v] / i`` with X ~ Binomial(r, e^eps / (1 + e^eps)), beta = P[X >= v].

    Guarantee: not below the paper's value, and non-decreasing in epsilon. With c = 2 m delta / i <= 1, each term
    ``beta + c P[v - i <= X < v] = (1 - c) beta + c P[X >= v - i]`` grows with epsilon. If c > 1 the larger
    ``c P[X >= v - i]`` is taken, which grows too.

    Args:
        canaries: m, coins that were tossed. guesses: r <= m. correct: v <= r.
    """
    from scipy.stats import binom  # importing it takes a second

    assert 0 <= correct <= guesses <= canaries
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(correct - 1, guesses, accuracy))
    if correct == 0 or delta == 0:
        return min(1.0, beta)
    below = np.arange(1, correct + 1)
    window = np.cumsum(binom.pmf(correct - below, guesses, accuracy))
    factor = 2 * canaries * delta / below
    return min(1.0, float((beta * np.maximum(factor, 1) + factor * window).max()))


def epsilon_lower_bound(*, canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    """Return the largest epsilon, to six digits and rounded down, that so many right guesses refute; 0 if none.

    Guarantee: if the run is (epsilon, delta) private, the result exceeds epsilon with a chance of at most
    ``significance``, because :func:`p_value` does not decrease.

    Args:
        significance: one minus the confidence, in (0, 1).
    """

    def refuted(epsilon: float) -> bool:
        value = p_value(epsilon, delta, canaries=canaries, guesses=guesses, correct=correct)
        return value < significance

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > _RESOLUTION:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
