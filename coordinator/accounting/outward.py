"""Rounding outward: a sum of epsilons or deltas is never stated below its exact value, a share of delta never above.

Floats round to the nearest number. One last bit is no privacy lost; but what is stated is a bound, and a bound that is
not one is wrong however little.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
N = TypeVar("N", float, Vector)

_SPARE = 2.0**-48
"""More than the rounding of eight operations, each within 2^-53, or of a function of the C library within a last bit
or two."""


def sum_up(values: Iterable[float]) -> float:
    """Return the least float that is not below the exact sum of ``values``."""
    added = list(values)
    total = math.fsum(added)
    if math.isfinite(total) and Fraction(total) < sum(map(Fraction, added)):
        return math.nextafter(total, math.inf)
    return total


def weighted_sum_up(parts: Sequence[tuple[int, Vector]], size: int) -> Vector:
    """Return vectors of ``size`` numbers that are not negative, each so many times, added up and rounded up."""
    counted = [(count, values) for count, values in parts if count]
    if not counted:
        return np.zeros(size)
    # A product with 1, and a sum of one, are exact.
    products = [values if count == 1 else np.nextafter(count * values, np.inf) for count, values in counted]
    total: Vector = products[0]
    for each in products[1:]:
        total = np.nextafter(total + each, np.inf)
    return total


def raised(value: N, size: N | None = None) -> N:
    """Return ``value``, of at most eight rounded operations, raised by more than their errors.

    Args:
        size: the sum of the magnitudes that were added, where they have both signs; else ``value`` itself.
    """
    return value + (value if size is None else size) * _SPARE


def lowered(value: float) -> float:
    """Return a positive ``value``, of at most eight rounded operations, lowered by more than their errors."""
    return value * (1 - _SPARE)
