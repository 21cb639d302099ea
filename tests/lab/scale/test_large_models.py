"""Large models by their shapes: the counts are those of the engine with numbers, and no weights are needed."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from raycloak.coordinator.config.sections import LoraConfig
from raycloak.metrics.errors import ConfigError, ModelError
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.placement import bytes_over
from raycloak.workers.inputs.hub_files import quiet
from raycloak.workers.models.compute_mode import ComputeMode
from raycloak.workers.models.hub_model import LoraSpec, adapted
from raycloak.workers.models.models import ModelSource, build_model
from raycloak_lab.scale import large_models
from raycloak_lab.scale.large_models import KNOWN, GpuBytes, LargeModel, LargeModelConfig, count_model, on_gpus

SHAPES = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS, TOKENS = 3, 24


def tiny(device: str, lora: bool) -> nn.Module:
    """Return a small Llama, with numbers on the CPU and without on ``meta``."""

    def build() -> nn.Module:
        settings = transformers.AutoConfig.for_model(**SHAPES)
        with quiet(), torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(settings)
            adapter = LoraSpec(rank=4, alpha=8.0, target_modules="all-linear", bias="none")
            return adapted(model, adapter, "CAUSAL_LM") if lora else model

    return build_model(ModelSource.of(build), "", 0, ComputeMode(gradient_checkpointing=lora))


@pytest.mark.parametrize(("count", "lora"), [(1, False), (2, True), (4, False)])
def test_shapes_without_numbers_have_the_bytes_of_the_engine_with_numbers(count: int, lora: bool) -> None:
    pin_numerics()
    bare, numbers = (on_gpus(tiny(memory, lora), count, ROWS, TOKENS, memory) for memory in ("meta", "cpu"))
    assert bare == numbers
    assert [each.frozen + each.parameters + each.sums for each in bare] == bytes_over(tiny("meta", lora), count)
    assert all(each.micro_batches > 0 for each in bare)


def test_every_micro_batch_under_way_is_counted_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    three = on_gpus(tiny("meta", lora=True), 2, ROWS, TOKENS)
    monkeypatch.setattr(large_models, "in_flight", lambda count: 1)
    alone = on_gpus(tiny("meta", lora=True), 2, ROWS, TOKENS)
    # At the least, a micro-batch keeps the hidden states that enter a GPU's two blocks.
    kept = 2 * ROWS * TOKENS * 64 * 4
    assert all(many.micro_batches >= one.micro_batches + 2 * kept for many, one in zip(three, alone, strict=True))


def test_a_model_is_counted_from_its_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES | {"dtype": "bfloat16"}), encoding="utf-8")
    adapter = LoraConfig(rank=4, target_modules=["q_proj"])
    config = LargeModelConfig(config=str(tmp_path / "config.json"), lora=adapter, gpus=[1, 2], tokens=8)
    found = count_model(config)
    # Four blocks with an adapter of rank 4 on a matrix of 64 by 64.
    assert (found.trained, found.tokens, found.recomputed) == (4 * 2 * 4 * 64, 8, True)
    assert list(found.by_gpus) == [1, 2]
    assert sum(each.trained for each in found.by_gpus[2]) == found.trained
    # The base in bfloat16, and float32 angles.
    assert 2 * found.frozen < found.by_gpus[1][0].frozen < 2 * found.frozen + 1000
    assert found.by_gpus[1][0].parameters == 4 * found.trained


@pytest.mark.parametrize(("name", "billions"), [("llama-3.2-1b", 1.2358), ("llama-2-70b", 68.9767)])
def test_known_shapes_have_the_parameters_of_the_models(name: str, billions: float) -> None:
    settings = transformers.AutoConfig.for_model(**KNOWN[name])
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(settings)
    assert sum(each.numel() for each in module.parameters()) / 1e9 == pytest.approx(billions, abs=1e-4)


def test_shapes_that_nobody_has_and_too_many_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.config: 'llama-9' has no shapes"):
        count_model(LargeModelConfig(config="llama-9"))
    with pytest.raises(ModelError, match="unsplittable_model"):
        on_gpus(tiny("meta", lora=True), 8, ROWS, TOKENS)


def counted(trained: int = 10**8, frozen: int = 10**9) -> LargeModel:
    """Return made-up counts on one GPU and on two, of which the second is fuller."""
    one = GpuBytes(trained, 2 * frozen, 4 * trained, 8 * trained, micro_batches=3 * 10**9)
    halves = [GpuBytes(trained // 2, frozen, 2 * trained, 4 * trained, micro_batches=more) for more in (1, 2 * 10**9)]
    return LargeModel(trained, frozen, tokens=512, recomputed=True, by_gpus={1: (one,), 2: tuple(halves)})
