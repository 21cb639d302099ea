"""Exact laws of small runs with correlated noise, in rational numbers, and of the pairs that should dominate them.

One coordinate, one virtual worker, one unit in each part, and noise of three values. Every coin and every draw of noise
is enumerated; mixes are computed by the code under test.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache

import numpy as np

from raycloak.workers.vectors.ring import mix_into

NOISE = {-1: Fraction(1, 4), 0: Fraction(1, 2), 1: Fraction(1, 4)}
"""Log-concave, so a smaller shift of it is dominated by a larger one, as with a Gaussian."""

Law = dict[tuple[int, ...], Fraction]
Pair = list[tuple[Fraction, Fraction]]
"""Masses of each outcome with the unit and without it."""


def mixed(sums: np.ndarray, coefficients: Sequence[int]) -> np.ndarray:
    """Return mixes of int64 sums [newest first, case]."""
    out = np.empty(sums.shape[1], np.uint64)
    mix_into(list(np.ascontiguousarray(sums).view(np.uint64)), coefficients, out)
    return out.view(np.int64)


@cache
def _mix(sums: tuple[int, ...], coefficients: tuple[int, ...]) -> int:
    return int(mixed(np.array(sums, np.int64)[:, None], coefficients)[0])


def moves(coefficients: tuple[int, ...], delta: int) -> Iterator[set[int]]:
    """Yield by how much a sum that differs by ``delta`` can move each of the mixes that it is in."""
    contexts = np.array(list(itertools.product(range(-4, 5), repeat=len(coefficients)))).T
    for place in range(len(coefficients)):
        moved = contexts.copy()
        moved[place] += delta
        yield set((mixed(moved, coefficients) - mixed(contexts, coefficients)).tolist())


def run_law(steps: int, epoch_steps: int, coefficients: tuple[int, ...], coin: Fraction, own: int) -> Law:
    """Return the law of all outputs of a run whose every contribution is chosen by the outputs before it.

    Args:
        coin: the chance that the unit of a step's part is drawn.
        own: 1 with the unit of the first part, 0 with a contribution of zero in its place.
    """
    bands = len(coefficients)
    paths: dict[tuple[tuple[int, ...], tuple[int, ...]], Fraction] = {((), ()): Fraction(1)}
    for step in range(steps):
        following: defaultdict[tuple[tuple[int, ...], tuple[int, ...]], Fraction] = defaultdict(Fraction)
        reach = min(bands - 1, step % epoch_steps)
        for (seen, sums), chance in paths.items():
            # What a unit contributes is decided by what was released, and so is public.
            sign = 1 if sum(seen) % 3 else -1
            contribution = sign * (own if step % bands == 0 else 1)
            for drawn, weight in ((0, 1 - coin), (contribution, coin)):
                now = (drawn, *sums[:reach])
                exact = _mix(now, coefficients)
                for noise, share in NOISE.items():
                    following[(*seen, exact + noise), now[: bands - 1]] += chance * weight * share
        paths = following
    law: defaultdict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for (seen, _), chance in paths.items():
        law[seen] += chance
    return law


def paired(first: Law, second: Law) -> Pair:
    return [(first.get(each, Fraction()), second.get(each, Fraction())) for each in first.keys() | second.keys()]


def leg_pair(shifts: Sequence[int], coin: Fraction) -> Pair:
    """Return the pair of a leg whose outputs are moved by all these shifts, or by none, as one coin decides."""
    masses: defaultdict[tuple[int, ...], list[Fraction]] = defaultdict(lambda: [Fraction(), Fraction()])
    for noises in itertools.product(NOISE, repeat=len(shifts)):
        mass = math.prod((NOISE[each] for each in noises), start=Fraction(1))
        moved = tuple(each + shift for each, shift in zip(noises, shifts, strict=True))
        masses[noises][0] += (1 - coin) * mass
        masses[noises][1] += mass
        masses[moved][0] += coin * mass
    return merged((p, q) for p, q in masses.values())


def merged(outcomes: Iterator[tuple[Fraction, Fraction]]) -> Pair:
    """Return the same pair with outcomes of one likelihood ratio taken together."""
    found: defaultdict[Fraction | None, list[Fraction]] = defaultdict(lambda: [Fraction(), Fraction()])
    for p, q in outcomes:
        ratio = found[p / q if q else None]
        ratio[0] += p
        ratio[1] += q
    return [(p, q) for p, q in found.values()]


def composed(pair: Pair, count: int) -> Pair:
    """Return the pair of so many independent outcomes of a pair."""
    total: Pair = [(Fraction(1), Fraction(1))]
    for _ in range(count):
        total = merged((a * c, b * d) for (a, b), (c, d) in itertools.product(total, pair))
    return total


def hockey_sticks(pair: Pair, scales: Sequence[Fraction]) -> list[Fraction]:
    """Return the larger hockey-stick divergence of both directions at each scale."""
    return [
        max(
            sum((max(p - scale * q, Fraction()) for p, q in pair), Fraction()),
            sum((max(q - scale * p, Fraction()) for p, q in pair), Fraction()),
        )
        for scale in scales
    ]
