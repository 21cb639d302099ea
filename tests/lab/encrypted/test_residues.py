"""Exact modular arithmetic, against Python's integers."""

import numpy as np

from raycloak_lab.encrypted.parameters import SET_F
from raycloak_lab.encrypted.residues import Factor, added, lifted, subtracted

RNG = np.random.default_rng(3)
PRIMES = SET_F.primes


def residues(size=50):
    """Return random residues, and the extreme ones."""
    rows = [np.append(RNG.integers(0, prime, size, np.uint64), [0, 1, prime - 2, prime - 1]) for prime in PRIMES]
    return np.array(rows, np.uint64)


def exact(function, x, y):
    """Return the same by Python's integers."""
    return [
        [function(int(a), int(b)) % prime for a, b in zip(*row, strict=True)]
        for prime, *row in zip(PRIMES, x, y, strict=True)
    ]


def test_products_sums_and_differences_are_exact():
    for _ in range(20):
        x, y = residues(), RNG.permuted(residues(), axis=1)
        assert Factor(y).times(x).tolist() == exact(lambda a, b: a * b, x, y)
        assert added(x, y).tolist() == exact(lambda a, b: a + b, x, y)
        assert subtracted(x, y).tolist() == exact(lambda a, b: a - b, x, y)


def test_a_product_takes_any_word():
    words = np.full((3, 4), 2**64 - 1, np.uint64)
    factor = np.array([[prime - 1] * 4 for prime in PRIMES], np.uint64)
    assert Factor(factor).times(words).tolist() == exact(lambda a, b: a * b, words, factor)


def test_signed_integers_are_lifted_to_each_prime():
    values = np.array([0, 1, -1, 2**45, -(2**45)])
    assert lifted(values, 2).tolist() == [[int(value) % prime for value in values] for prime in PRIMES[:2]]
