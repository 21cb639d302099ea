"""`bench/mask.py`: what it reports is measured, and what the product promises of it holds."""

import json

import pytest
from typer.testing import CliRunner

from raycloak.metrics.errors import ConfigError
from raycloak_lab.bench.mask import bench_mask
from raycloak_lab.cli.app import app


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


@pytest.fixture
def bench(capfd):
    """Run the command in this process; returns (exit code, stdout)."""

    def run(*arguments):
        done = CliRunner().invoke(app, ["bench", "mask", *arguments], standalone_mode=False)
        return done.return_value if done.exception is None else done.exit_code, capfd.readouterr().out

    return run


def test_the_command_prints_its_figures(bench):
    code, out = bench("--params", "1000", "--workers", "3", "--json")
    assert (code, json.loads(out)["bytes_per_parameter"]) == (0, 4.0)
    assert "chacha20 ratio" in bench("--params", "1000", "--workers", "3")[1]


@pytest.mark.parametrize(("wrong", "name"), [("--bits=48", "ring_bits"), ("--params=-1", "bench_input")])
def test_the_command_refuses_what_it_cannot_measure(bench, wrong, name):
    code, out = bench(wrong, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, name)
