"""Measures how fast noise is drawn on one core."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ConfigError
from raycloak.workers.vectors.noise import NoiseSampler, base_table, decompose
from raycloak.workers.vectors.ring import RingVector
from raycloak.workers.vectors.streams import KeyStream

RUNS = 7


@dataclass(frozen=True)
class NoiseBench:
    """One measurement of :class:`raycloak.workers.vectors.noise.NoiseSampler`, in one thread.

    Attributes:
        draws: draws per run, each added to one ring word.
        sigma, ring_bits: deviation and ring of the draws.
        base_draws, multiplier, base_sigma: the composition of a draw.
        runs: number of runs; figures are medians.
        draws_per_second: draws over the time of `add_to`.
        chacha20_ratio: time of the bare index keystream over the time of `add_to`.
        table_seconds: time to build the table, paid once per sigma and process.
    """

    draws: int
    sigma: float
    ring_bits: int
    base_draws: int
    multiplier: int
    base_sigma: float
    runs: int
    draws_per_second: float
    chacha20_ratio: float
    table_seconds: float


def bench_noise(draws: int, sigma: float, bits: Literal[32, 64]) -> NoiseBench:
    """Measure ``draws`` draws of deviation ``sigma`` added to a vector of the ``bits``-bit ring.

    Raises:
        ConfigError: ``bench_draws`` if draws < 1; ``noise_sigma``.
    """
    if draws < 1:
        raise ConfigError("bench_draws", f"{draws} draws cannot be measured.", "Ask for at least one.")
    decomposition = decompose(sigma)
    # Building the table is measured too.
    base_table.cache_clear()
    table_seconds = _seconds(lambda: base_table(decomposition.base_variance))
    sampler = NoiseSampler(sigma, bits)
    vector: RingVector = np.zeros(draws, np.uint32) if bits == 32 else np.zeros(draws, np.uint64)
    key = Secret(bytes(32))
    sampler.add_to(vector[:1], key)
    noise = median(_seconds(lambda: sampler.add_to(vector, key)) for _ in range(RUNS))
    bare = median(_seconds(lambda: _bare_keystream(draws * decomposition.draws, key)) for _ in range(RUNS))
    return NoiseBench(
        draws=draws,
        sigma=sigma,
        ring_bits=bits,
        base_draws=decomposition.draws,
        multiplier=decomposition.multiplier,
        base_sigma=decomposition.base_sigma,
        runs=RUNS,
        draws_per_second=draws / noise,
        chacha20_ratio=bare / noise,
        table_seconds=table_seconds,
    )


def _bare_keystream(words: int, key: Secret) -> None:
    """Generate as many index-stream words as the draws take, through one cache-sized buffer."""
    stream = KeyStream(key)
    buffer = np.empty(min(words, 1 << 15), np.uint16)
    for start in range(0, words, buffer.size):
        stream.into(buffer[: words - start])


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
