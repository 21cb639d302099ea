"""A worker's GPU in the prediction: by rates that somebody states, and by no others."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from raycloak.metrics.errors import ConfigError
from raycloak_lab.scale.calibration import Check
from raycloak_lab.scale.devices import CARDS, DeviceConfig, device_scale
from raycloak_lab.scale.simulation import ScaleConfig, parse_scale, planned, simulate
from raycloak_lab.scale.tables import ScaleTables
from tests.lab.scale.test_simulation import RATES, predicted

MECHANISM = planned(ScaleConfig(), 8, 10**8).model_copy(update={"micro_batches": 3, "micro_batch_size": 16})
STATED = {"memory_gb": 40, "copy_gb_per_s": 1000, "tflop_per_s": 100, "tokens_per_example": 512}


def test_a_gpu_is_predicted_by_the_formulas_of_the_documentation():
    size = MECHANISM.dimension
    found = device_scale(DeviceConfig(**STATED), MECHANISM, 1)
    assert (found.memory_bytes, found.limit_bytes) == (16 * size, 40e9)
    assert found.words_seconds == pytest.approx((24 + 8) * size / 1e12)
    assert found.model_seconds == pytest.approx(3 * 16 * 512 * 6 * size / 1e14)
    twice = device_scale(DeviceConfig(**STATED, frozen_parameters=8 * 10**9), MECHANISM, 2)
    assert twice.memory_bytes == 20 * size + 16e9
    assert twice.words_seconds == pytest.approx((48 + 12 + 8) * size / 1e12)
    assert twice.model_seconds == pytest.approx(2 * 3 * 16 * 512 * (6 * size + 4 * 8e9) / 1e14)
    assert found.sources == ("memory gb: stated", "copy gb per s: stated", "tflop per s: stated")


def test_a_rate_is_stated_the_cards_or_unknown():
    unknown = device_scale(DeviceConfig(), MECHANISM, 1)
    assert (unknown.limit_bytes, unknown.words_seconds, unknown.model_seconds, unknown.sources) == (None,) * 3 + ((),)
    # Its rate of products says nothing without the tokens of an example.
    card = device_scale(DeviceConfig(card="NVIDIA H200"), MECHANISM, 1)
    assert card.limit_bytes == 141e9
    assert (card.words_seconds, card.model_seconds) == (pytest.approx(32 * 1e8 / 4.8e12), None)
    assert card.sources == ("NVIDIA H200: NVIDIA H200 Tensor Core GPU, data sheet",)
    mine = device_scale(DeviceConfig(card="NVIDIA H200", copy_gb_per_s=2000), MECHANISM, 1)
    assert mine.words_seconds == pytest.approx(32 * 1e8 / 2e12)
    assert mine.sources == ("copy gb per s: stated", *card.sources)
    assert all(each.source for each in CARDS.values())


def test_a_gpu_that_is_too_small_is_the_first_limit():
    found = predicted(device={"memory_gb": 1})
    assert (found.first_limit, found.uses["device"]) == ("device", 1.6)
    assert "device" not in predicted(device={"copy_gb_per_s": 1}).uses
    assert predicted().device is None


@pytest.mark.parametrize("wrong", ["device.card=H900", "device.copy_gb_per_s=0", "device.speed=1"])
def test_a_device_that_nobody_knows_is_refused(wrong):
    with pytest.raises(ConfigError, match="device"):
        parse_scale([wrong])


def test_the_tables_of_a_gpu_fit_120_columns_and_say_what_is_not_known():
    out = io.StringIO()
    for config in (ScaleConfig(device=DeviceConfig(card="NVIDIA H200")), ScaleConfig(device=DeviceConfig())):
        found = simulate(config, replace(RATES, process_bytes=5e8))
        Console(file=out, width=120).print(ScaleTables(config, found, Check(2, 3 * 10**7, 2.0, 2.5, 0.8)))
    text = out.getvalue()
    assert "…" not in text
    assert "141 GB" in text
    assert "data sheet" in text
    assert "1.6 GB of not known" in text
