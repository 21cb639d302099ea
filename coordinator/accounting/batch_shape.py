"""The fixed physical shape of a step: how many rows hold a Poisson draw, and how surely.

The shape is public and the same in every step, so that timing shows nothing of the draw.
"""

import math

ROW_MULTIPLE = 8
"""Micro-batches shrink to a multiple of this, so that kernels keep full vectors."""


def overflow_bound(slice_size: int, sample_rate: float, draws: int, capacity: int) -> float:
    """Return an upper bound on the chance that any of ``draws`` Binomial(slice_size, q) draws exceeds ``capacity``.

    Guarantee: the Chernoff bound ``draws * exp(-n KL((capacity + 1) / n || q))``, and 0 where none can exceed it.
    """
    exponent = _tail_exponent(slice_size, sample_rate, capacity)
    return 0.0 if exponent == math.inf else min(1.0, draws * math.exp(-exponent) * (1 + 1e-9))


def _tail_exponent(n: int, q: float, capacity: int) -> float:
    """Return minus the logarithm of the Chernoff bound on P[Binomial(n, q) > capacity]."""
    if capacity >= n:
        return math.inf
    share = (capacity + 1) / n
    if share <= q:
        return 0.0
    rest = (1 - share) * math.log((1 - share) / (1 - q)) if share < 1 else 0.0
    return n * (share * math.log(share / q) + rest)


def physical_shape(slice_size: int, sample_rate: float, draws: int, budget: float, largest: int) -> tuple[int, int]:
    """Return rows m and count M of the micro-batches: the fewest of at most ``largest`` rows within the budget.

    Guarantee: ``overflow_bound(slice_size, sample_rate, draws, m * M) <= budget`` and ``m <= largest``.
    """
    low, high = 1, slice_size
    while low < high:
        middle = (low + high) // 2
        if overflow_bound(slice_size, sample_rate, draws, middle) <= budget:
            high = middle
        else:
            low = middle + 1
    batches = -(-low // largest)
    rows = -(-low // (batches * ROW_MULTIPLE)) * ROW_MULTIPLE
    return min(rows, largest), batches
