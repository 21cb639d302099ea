"""Section on a worker's step by phases, beside non-private training: GPT-2 small in full, and a Llama under LoRA."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu.golden import key
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found
from raycloak.workers.device.step_clock import StepUsage
from raycloak.workers.device.words import words_on
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.row_memory import mechanism_of_rows
from raycloak.workers.models.compute_mode import ComputeMode, Precision
from raycloak.workers.models.models import read_flat
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.threads import ONE_THREAD
from raycloak_lab.bench.gpu_use import GpuUse, gpu_use
from raycloak_lab.bench.gradient_cases import next_token

MASKS = 3
"""Peers of a worker among four."""
_LLAMA = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""The sizes of Llama 3.2's model of 1.2 billion parameters."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and the one micro-batch of its step."""

    model: Literal["gpt2", "llama-lora"]
    precision: Precision
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.model} {self.precision} {self.rows}x{self.tokens}"


SHAPES = (
    Shape("gpt2", "bf16", 8, 1024), Shape("gpt2", "float32", 4, 256), Shape("llama-lora", "bf16", 8, 512),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one virtual worker, as a worker makes it, after one that is not counted.

    Attributes:
        trained: number of trained parameters, d.
        usage: seconds by phase, and the most memory of a GPU.
        step_s: of all phases. sum_s: of the clipped sum, the first three.
        plain_s: of a forward and backward pass without taps; the median of three.
        step_vs_nonprivate, sum_vs_nonprivate: ``plain_s`` over both.
        use: launches, synchronisations and kernels of another step. busy_share: seconds of kernels over ``step_s``.
    """

    trained: int
    usage: StepUsage
    step_s: float
    sum_s: float
    plain_s: float
    step_vs_nonprivate: float
    sum_vs_nonprivate: float
    use: GpuUse | None = None
    busy_share: float | None = None


class _NextToken(nn.Module):
    """The logits [n, T - 1, V] of ids [n, T]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits[:, :-1]


def step(place: Place, shape: Shape, settings: Mapping[str, int] | None = None) -> Found:
    """Measure one shape.

    Args:
        settings: of the model's configuration, instead of those of `SHAPES`.
    """
    pin_numerics()
    module, vocabulary = _model(place, shape, settings)
    parameters = read_flat(module)
    ComputeMode(precision=shape.precision).apply(module)
    ids = np.random.default_rng(0).integers(vocabulary, size=(shape.rows, shape.tokens))
    batch = ids, ids[:, 1:], np.ones(shape.rows, np.bool_)
    mechanism = mechanism_of_rows(parameters.size, shape.rows)
    inputs, labels = (torch.tensor(each, device=place.device) for each in batch[:2])
    words, whole = words_on([place.device], ONE_THREAD), VectorRange(index=0, offset=0, length=parameters.size)
    engine = GradientEngine(module, next_token, mechanism, place.device, clock=words.clock)
    masks = [(key(f"mask {number}"), 1) for number in range(MASKS)]

    def plain() -> None:
        module.zero_grad(set_to_none=True)
        next_token(module(inputs), labels).sum().backward()  # type: ignore[no-untyped-call]

    def made() -> StepUsage:
        words.clock.start()
        total = engine.clipped_sum(parameters, [batch])
        words.clock.begin("words")
        vector = words.encoded(total, mechanism, key("noise"))
        words.leaves(vector, engine.sizes)
        words.clock.begin("masks")
        words.masked(vector, whole, masks)
        return words.clock.stop()

    made()
    usage = made()
    use = gpu_use(made, place.device)
    plain_s = place.median_s(plain, 3)
    sum_s, step_s = usage.copy_seconds + usage.model_seconds + usage.sums_seconds, sum(usage.seconds().values())
    found = Step(
        trained=parameters.size,
        usage=usage,
        step_s=step_s,
        sum_s=sum_s,
        plain_s=plain_s,
        step_vs_nonprivate=plain_s / step_s,
        sum_vs_nonprivate=plain_s / sum_s,
        use=use,
        busy_share=use.busy_seconds / step_s if use else None,
    )
    return Found({"step": found})


def _model(place: Place, shape: Shape, settings: Mapping[str, int] | None) -> tuple[nn.Module, int]:
    """Return a model of random weights, made on the device, and the number of its ids."""
    package: Any = import_module("transformers")
    if shape.model == "gpt2":
        config = package.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **settings or {})
        made = package.GPT2LMHeadModel
    else:
        config = package.LlamaConfig(use_cache=False, tie_word_embeddings=True, **settings or _LLAMA)
        made = package.LlamaForCausalLM
    config._attn_implementation = "eager"
    with torch.random.fork_rng(), torch.device(place.device), warnings.catch_warnings():
        # transformers and peft warn of their own code.
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = made(config)
        if shape.model == "llama-lora":
            peft: Any = import_module("peft")
            lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            model = peft.get_peft_model(model, lora)
    return _NextToken(model).train(), config.vocab_size
