"""The noise benchmark's figures."""

from typing import Literal

import pytest

from raycloak.coordinator.bench.noise import bench_noise
from raycloak.metrics.errors import ConfigError


@pytest.mark.parametrize("bits", [32, 64])
def test_figures_are_measured_for_the_asked_sigma(bits: Literal[32, 64]) -> None:
    bench = bench_noise(1_000_000, 2.0**20, bits)
    assert (bench.draws, bench.sigma, bench.ring_bits) == (1_000_000, 2.0**20, bits)
    assert (bench.base_draws, bench.multiplier) == (3, 79)
    assert bench.base_sigma == pytest.approx(168.0006, abs=1e-4)
    assert min(bench.draws_per_second, bench.chacha20_ratio, bench.table_seconds) > 0


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match="bench_draws"):
        bench_noise(0, 2.0**20, 32)


def test_sigma_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="noise_sigma"):
        bench_noise(10, 1.0, 32)
