"""`coordinator/bench/mask.py`: what it reports is measured, and what the product promises of it holds."""

import pytest

from raycloak.coordinator.bench.mask import bench_mask
from raycloak.metrics.errors import ConfigError


@pytest.mark.parametrize(("bits", "dtype"), [(32, "float32"), (32, "float64"), (64, "float32")])
def test_payload_is_one_ring_word_per_parameter_and_framing_below_one_kibibyte(bits, dtype):
    result = bench_mask(100_003, 3, bits=bits, dtype=dtype, repeats=1)
    assert result.bytes_per_parameter == bits / 8
    assert result.framing_bytes < 1024
    assert min(result.encode_seconds, result.mask_seconds, result.tag_seconds, result.keystream_seconds) > 0


@pytest.mark.parametrize("arguments", [(0, 8), (10, 1), (10, 2, 32, "float32", 0), (10, 8, 32, "float32", 1, 2)])
def test_a_bench_of_nothing_is_refused(arguments):
    with pytest.raises(ConfigError, match="bench_input"):
        bench_mask(*arguments)


def test_a_sparse_graph_is_compared_with_32_workers_of_which_all_pairs_mask():
    result = bench_mask(1000, 128, repeats=1, colluding_workers=12)
    assert result.neighbours == 14
    assert result.cost_vs_32_workers is not None
    assert bench_mask(1000, 32, repeats=1).neighbours == 31
