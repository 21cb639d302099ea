"""The formulas of `raycloak-lab scale`, at rates that make them easy to follow."""

from dataclasses import replace

import pytest

from raycloak.metrics.errors import ConfigError
from raycloak_lab.scale.simulation import (
    Line,
    Rates,
    RefusedSize,
    Scale,
    ScaleConfig,
    WordRates,
    mask_degree,
    parse_scale,
    simulate,
)
from raycloak_lab.scale.tables import ScaleTables

NOTHING = Line(0.0, 0.0)
WORD = WordRates(vector=Line(5e-9, 2e-9), mask=1e-9, tag=0.5e-9, averaged=Line(1e-9, 0.1e-9))
RATES = Rates(
    words={32: WORD, 64: WORD},
    receive=1e-9,
    update=3e-9,
    gradient=0.0,
    worker=NOTHING,
    aggregator=NOTHING,
    orchestrator=NOTHING,
    driver=NOTHING,
    ray_wall=Line(1e-3, 1e-4),
    ledger_wall=5e-3,
    start_wall=2.0,
    imports=3.0,
    process_bytes=0.0,
    admission=0.1,
    appraisal=0.01,
)


def predicted(**fields: object) -> Scale:
    config = ScaleConfig.model_validate({"workers": [8], "parameters": [10**8], "aggregators": [1, 4]} | fields)
    (found,) = simulate(config, RATES)
    assert isinstance(found, Scale)
    return found


def test_a_size_is_predicted_by_the_formulas_of_the_documentation():
    found, size = predicted(), 10**8
    assert (found.ring_bits, found.mask_degree, found.up_bytes, found.down_bytes) == (32, 7, 4 * size, 4 * size)
    # The copy and the sum, whose pieces become words: each of eight workers hosts one virtual worker.
    assert found.worker_bytes == 12 * size
    noise = 5e-9 + found.base_draws * 2e-9
    assert found.worker_seconds == pytest.approx(size * (1e-9 + noise + 7 * 1e-9 + 0.5e-9))
    one, four = found.aggregators
    assert one.seconds == pytest.approx(size * (8 * 0.5e-9 + 1.8e-9 + 3e-9))
    # The vectors, the average, and parameters and momentum three times.
    assert one.bytes == (8 * 4 + 4 + 3 * 8) * size
    assert one.store_bytes == 2 * size * (8 * 4 + 8)
    assert four.seconds == pytest.approx(one.seconds / 4)
    assert one.gather_seconds == pytest.approx(8 * 4 * size / 1.25e9)
    # A worker's own link is as slow as four aggregators' links together.
    assert four.gather_seconds == pytest.approx(8 * size / 1.25e9)
    assert found.control_seconds == pytest.approx(1e-3 + 9e-4 + 5e-3)
    assert found.start_seconds == pytest.approx(2.0 + 3.0 + 0.8 + 0.08)
    assert found.ledger_steps_per_second == 200


def test_the_fewest_aggregators_that_fit_are_shown_and_what_does_not_fit_is_named():
    assert predicted().ranks == 1
    assert predicted(node_memory_gb=16).ranks == 4
    beyond = predicted(node_memory_gb=1)
    assert beyond.first_limit == "aggregator's store"
    assert beyond.uses["aggregator's store"] > 1


def test_hosting_several_and_state_take_memory():
    assert predicted(workers=[2]).worker_bytes == 16 * 10**8
    assert predicted(optimizer="adam").aggregators[0].bytes == (8 * 4 + 4 + 3 * 12) * 10**8


def test_masks_are_those_of_the_mask_graph_above_32_workers():
    assert mask_degree(32, 1 / 3) == 31
    assert mask_degree(1024, 1 / 3) == 50
    assert mask_degree(64, 0.97) == 63


def test_a_size_that_no_plan_exists_for_is_refused_by_name():
    config = ScaleConfig(workers=[1024], parameters=[10**6], examples_per_worker=2**56)
    (found,) = simulate(config, RATES)
    assert isinstance(found, RefusedSize)


@pytest.mark.parametrize(
    ("given", "told"),
    [("worker=[8]", "worker: there is no such field"), ("workers=[]", "workers"), ("network_gbit_per_s=0", "network")],
)
def test_assumptions_are_checked(given, told):
    with pytest.raises(ConfigError, match=told) as error:
        parse_scale([given])
    assert "docs/scale.md" in error.value.remedy


def test_the_table_fits_120_columns_and_shows_every_size():
    import io

    from rich.console import Console

    from raycloak_lab.scale.calibration import Check

    found = simulate(ScaleConfig(), replace(RATES, process_bytes=5e8))
    out = io.StringIO()
    Console(file=out, width=120).print(ScaleTables(ScaleConfig(), found, Check(2, 3 * 10**7, 2.0, 2.5, 0.8)))
    text = out.getvalue()
    assert "predicted 2.00 s (0.80)" in text
    assert "…" not in text
    assert text.count("10.0 B") + text.count("10 B") == 3
