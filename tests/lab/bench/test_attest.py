"""The load command of the evidence service, at a size that only shows that it measures."""

import pytest

from raycloak.metrics.errors import ConfigError
from raycloak_lab.bench.attest import bench_attest


def test_every_worker_is_attested_beside_connections_of_each_kind():
    result = bench_attest(connections=4, concurrency=2, held=60)
    assert (result.evidence, result.attestations, result.refused) == ("SIMULATED", 4, 0)
    # The service closes them after a while, and the holder opens them again.
    assert 0 < result.held_slow <= 20
    assert result.held_idle + result.held_half_open <= 40
    assert 0 < result.p50_ms <= result.p99_ms <= result.max_ms
    assert min(result.per_second, result.service_cpu_ms, result.worker_cpu_ms) > 0
    assert min(result.transport_service_cpu_ms, result.transport_worker_cpu_ms) > 0
    assert result.transport_per_second > 0


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_a_bench_of_nothing_is_refused(sizes):
    with pytest.raises(ConfigError, match="bench_input"):
        bench_attest(*sizes)
