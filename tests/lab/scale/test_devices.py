"""A worker's GPU in the prediction: by rates that somebody states, and by no others."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from raycloak.metrics.errors import ConfigError
from raycloak_lab.scale.calibration import Check
from raycloak_lab.scale.devices import CARDS, DeviceConfig, DeviceScale, device_scales
from raycloak_lab.scale.large_models import LargeModelConfig
from raycloak_lab.scale.simulation import Scale, ScaleConfig, parse_scale, planned, simulate
from raycloak_lab.scale.tables import ScaleTables
from tests.lab.scale.test_large_models import counted
from tests.lab.scale.test_simulation import RATES, predicted

MECHANISM = planned(ScaleConfig(), 8, 10**8).model_copy(update={"micro_batches": 3, "micro_batch_size": 16})
STATED = {"memory_gb": 40, "copy_gb_per_s": 1000, "tflop_per_s": 100}
MODEL = counted()


def one(config: DeviceConfig, hosted: int = 1) -> DeviceScale:
    (found,) = device_scales(config, MECHANISM, hosted, None)
    return found


def test_gpus_are_predicted_by_the_formulas_of_the_documentation():
    size = MECHANISM.dimension
    found = one(DeviceConfig(**STATED))
    assert (found.memory_bytes, found.words_bytes, found.limit_bytes) == (16 * size, 4 * size, 40e9)
    assert found.words_seconds == pytest.approx((24 + 8) * size / 1e12)
    twice = one(DeviceConfig(**STATED), 2)
    assert twice.memory_bytes == 20 * size
    assert twice.words_seconds == pytest.approx((48 + 12 + 8) * size / 1e12)
    assert found.sources == ("memory gb: stated", "copy gb per s: stated", "tflop per s: stated")


def test_a_model_is_on_the_fullest_gpu_of_each_number():
    one, two = device_scales(DeviceConfig(**STATED), MECHANISM, 1, MODEL)
    # Its rows take more than words, which come when they are gone.
    assert (one.gpus, one.memory_bytes) == (1, 2e9 + 1.2e9 + 3e9)
    assert (two.gpus, two.memory_bytes) == (2, 1e9 + 0.6e9 + 2e9)
    operations = 3 * 16 * 512 * (8 * 1e8 + 6 * 1e9)
    assert (one.model_seconds, two.model_seconds) == (
        pytest.approx(operations / 1e14),
        pytest.approx(operations / 2e14),
    )
    assert two.words_seconds == pytest.approx((24 + 8) * 5e7 / 1e12)


def test_a_rate_is_stated_the_cards_or_unknown():
    unknown = one(DeviceConfig())
    assert (unknown.limit_bytes, unknown.words_seconds, unknown.model_seconds, unknown.sources) == (None,) * 3 + ((),)
    # Its rate of products says nothing without a model.
    card = one(DeviceConfig(card="NVIDIA H200"))
    assert card.limit_bytes == 141e9
    assert (card.words_seconds, card.model_seconds) == (pytest.approx(32 * 1e8 / 4.8e12), None)
    assert card.sources == ("NVIDIA H200: NVIDIA H200 Tensor Core GPU, data sheet",)
    mine = one(DeviceConfig(card="NVIDIA H200", copy_gb_per_s=2000))
    assert mine.words_seconds == pytest.approx(32 * 1e8 / 2e12)
    assert mine.sources == ("copy gb per s: stated", *card.sources)
    assert all(each.source for each in CARDS.values())


def test_a_gpu_that_is_too_small_is_the_first_limit():
    found = predicted(device={"memory_gb": 1})
    assert (found.first_limit, found.uses["GPU"]) == ("GPU", 1.6)
    assert "GPU" not in predicted(device={"copy_gb_per_s": 1}).uses
    assert predicted().devices == ()
    # Released parameters and what is sent stay on the host.
    assert found.worker_bytes == 8 * 10**8
    config = ScaleConfig(workers=[8], device=DeviceConfig(memory_gb=4), model=LargeModelConfig(config="llama-2-7b"))
    (large,) = simulate(config, RATES, MODEL)
    assert isinstance(large, Scale)
    # Two hold it, one does not.
    assert large.parameters == MODEL.trained
    assert large.uses["GPU"] == pytest.approx(3.6 / 4)
    assert (large.first_limit, large.uses["aggregator's store"] < large.uses["GPU"]) == ("GPU", True)


@pytest.mark.parametrize("wrong", ["device.card=H900", "device.copy_gb_per_s=0", "device.speed=1"])
def test_a_device_that_nobody_knows_is_refused(wrong):
    with pytest.raises(ConfigError, match="device"):
        parse_scale([wrong])


def test_the_tables_of_gpus_fit_120_columns_and_say_what_is_not_known():
    out = io.StringIO()
    rates = replace(RATES, process_bytes=5e8)
    for config, model in (
        (ScaleConfig(device=DeviceConfig(card="NVIDIA H200")), None),
        (ScaleConfig(device=DeviceConfig()), None),
        (ScaleConfig(model=LargeModelConfig(config="llama-3.1-8b")), counted(8 * 10**9, 0)),
    ):
        found = simulate(config, rates, model)
        Console(file=out, width=120).print(ScaleTables(config, found, Check(2, 3 * 10**7, 2.0, 2.5, 0.8)))
    text = out.getvalue()
    assert "…" not in text
    assert "141 GB" in text
    assert "data sheet" in text
    assert "1.6 GB of not known" in text
    assert "What breaks first" in text
    assert "worker's deadline" in text
