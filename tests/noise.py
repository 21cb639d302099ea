"""Draws of the noise sampler, read as integers."""

import numpy as np

from raycloak.attestation.core.keys import Secret
from raycloak.workers.vectors.noise import NoiseSampler


def draws(sigma: float, key: Secret, start: int, count: int) -> np.ndarray:
    """Return draws [start, start + count) of ``key``, int64: what is added to zeros of the wide ring."""
    vector = np.zeros(count, np.uint64)
    NoiseSampler(sigma, 64).add_to(vector, key, start=start)
    return vector.view(np.int64)
