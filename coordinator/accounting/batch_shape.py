"""The fixed physical shape of a step: how many rows hold a Poisson draw, and how surely.

The shape is public and the same in every step, so that timing shows nothing of the draw.
"""

import math
from collections.abc import Callable

ROW_MULTIPLE = 4
"""Micro-batches shrink to a multiple of this. Kernels take other paths for fewer rows, and give other bits."""


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


def least_within(budget: float, slice_size: int, sample_rate: float, draws: int) -> int:
    """Return the least capacity, at least 1, at which :func:`overflow_bound` is at most ``budget``."""
    return least(lambda capacity: overflow_bound(slice_size, sample_rate, draws, capacity) <= budget, 1, slice_size)


def least(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least whole number from ``low`` to ``high`` that ``fits``; assumes that ``high`` and all above do."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def physical_shape(capacity: int, largest: int) -> tuple[int, int]:
    """Return rows m and count M of the micro-batches: the fewest of at most ``largest`` rows that hold ``capacity``.

    Guarantee: ``m * M >= capacity`` and ``m <= largest``.
    """
    batches = -(-capacity // largest)
    rows = -(-capacity // (batches * ROW_MULTIPLE)) * ROW_MULTIPLE
    return min(rows, largest), batches
