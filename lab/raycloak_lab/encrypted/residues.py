"""Exact products and sums modulo the set's primes, in NumPy, for what SEAL's interface cannot reach.

SEAL computes everything on ciphertexts. These few lines give seeds to the ciphertexts that a client releases, and
spread noise of 98 bits over primes of 60.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from raycloak_lab.encrypted.parameters import SET_F

Residues: TypeAlias = NDArray[np.uint64]
"""Numbers modulo the primes of a level, shape [..., primes, N]."""

_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_PRIMES = np.array(SET_F.primes, np.uint64)[:, None]


def level_primes(primes: int) -> NDArray[np.uint64]:
    """Return the first ``primes`` primes as a column, shape [primes, 1]."""
    return _PRIMES[:primes]


class Factor:
    """A fixed factor modulo each prime, with the quotients that make a product cheap (Shoup's method).

    Guarantee: products are exact; a test compares them with Python's integers.

    Args:
        values: uint64, shape [primes, n] with n dividing N's shape by broadcasting, each below its prime.
    """

    def __init__(self, values: Residues) -> None:
        self._values = values
        primes = [int(prime) for prime in level_primes(len(values))[:, 0]]
        quotients = [[(int(value) << 64) // prime for value in row] for row, prime in zip(values, primes, strict=True)]
        self._quotients = np.array(quotients, np.uint64)

    def __repr__(self) -> str:
        return "<Factor>"

    def times(self, values: Residues) -> Residues:
        """Return the products modulo each prime, for any uint64 of shape [primes of a level, N]."""
        level = len(values)
        primes = level_primes(level)
        product = values * self._values[:level] - _high_word(values, self._quotients[:level]) * primes
        # The quotient is rounded down twice, so the rest is at most one prime too large.
        return np.asarray(np.where(product >= primes, product - primes, product))


def _high_word(x: Residues, y: Residues) -> Residues:
    """Return the upper 64 bits of the products."""
    x_low, x_high, y_low, y_high = x & _LOW, x >> _HALF, y & _LOW, y >> _HALF
    middle = x_high * y_low + (x_low * y_low >> _HALF)
    other = x_low * y_high + (middle & _LOW)
    return np.asarray(x_high * y_high + (middle >> _HALF) + (other >> _HALF))


def lifted(values: NDArray[np.int64], primes: int) -> Residues:
    """Return signed integers, shape [N], modulo the first ``primes`` primes, shape [primes, N]."""
    return np.asarray(np.mod(values, level_primes(primes).astype(np.int64)), np.uint64)


def added(x: Residues, y: Residues) -> Residues:
    """Return the sums modulo each prime of residues of one level."""
    total = x + y
    primes = level_primes(len(total))
    return np.asarray(np.where(total >= primes, total - primes, total))


def subtracted(x: Residues, y: Residues) -> Residues:
    """Return the differences modulo each prime of residues of one level."""
    return np.asarray(np.where(x >= y, x - y, x + level_primes(len(x)) - y))
