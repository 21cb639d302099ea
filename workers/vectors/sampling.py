"""Poisson sampling of a virtual worker's units from a keyed stream, and the places of the drawn ones.

It is a pure function of a key and public numbers, so that tests can compare it with the law that it promises.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.vectors.streams import KeyStream

# At most 2^-64 of probability is lost to rounding q down; a wider draw would cost keystream for nothing.
DRAW_BITS = 64


def inclusion_threshold(sample_rate: float) -> int:
    """Return floor(q * 2^64), exactly; an example is in the batch iff its 64-bit draw is below it.

    Raises:
        ConfigError: ``sample_rate`` if q is not in [0, 1].
    """
    if not 0 <= sample_rate <= 1:
        raise ConfigError("sample_rate", f"a sampling rate of {sample_rate} is not a probability.", "Use 0 < q <= 1.")
    return int(Fraction(float(sample_rate)) * 2**DRAW_BITS)


def draw_ids(key: Secret, ids: NDArray[np.int64], sample_rate: float, capacity: int) -> NDArray[np.int64]:
    """Return the units of one virtual worker that take part in one step, ascending.

    Guarantee: true Poisson sampling. With an ideal keystream each id is included independently with probability
    floor(q * 2^64) / 2^64, never above q and less than 2^-64 below it. If more than ``capacity`` are drawn, the rest is
    cut: the units with the smallest draws stay, whatever their content.

    Args:
        key: sampling key of one (virtual worker, step, parameters).
        ids: all units of the virtual worker, ascending, shape [n]; the j-th takes the j-th 64-bit draw.
        sample_rate: q in [0, 1].
        capacity: most examples a step can hold, at least 0.

    Returns:
        int64, shape [m] with m <= min(n, capacity).

    Raises:
        ConfigError: ``sample_rate``.
    """
    require_bound(ids.ndim == 1 and ids.dtype == np.int64, "each example has one draw")
    require_bound(capacity >= 0, "a step holds no fewer than 0 examples")
    threshold = inclusion_threshold(sample_rate)
    draws = uniform_words(key, ids.size)
    # 2^64 itself is no uint64: at q = 1 there is nothing to compare.
    drawn = np.arange(ids.size) if threshold == 2**DRAW_BITS else np.flatnonzero(draws < np.uint64(threshold))
    if drawn.size > capacity:
        order = np.argsort(draws[drawn], kind="stable")
        drawn = np.sort(drawn[order[:capacity]])
    return ids[drawn]


def unit_places(key: Secret, units: int, micro_batches: int) -> NDArray[np.int64]:
    """Return the place of each drawn unit among all units of a step, in the order of the draw.

    The units fill the micro-batches evenly, each at a keyed place. So what is left over is spread over all of them:
    every micro-batch has a place without a unit if there are as many such places as micro-batches.

    Args:
        key: place key of one (virtual worker, step, parameters).
        units: of one micro-batch, m.
        micro_batches: M.

    Returns:
        int64 [M * m], a permutation; place p is unit ``p % m`` of micro-batch ``p // m``.
    """
    slots = np.argsort(uniform_words(key, micro_batches, units), axis=1, kind="stable")
    return (slots + units * np.arange(micro_batches)[:, None]).T.ravel()


def uniform_words(key: Secret, *shape: int) -> NDArray[np.uint64]:
    """Return the first 64-bit words of a key's stream, in an array of this shape."""
    words = np.empty(shape, "<u8")
    KeyStream(key).into(words)
    return words
