"""Section on a step of GPT-2 small: the seconds of its phases, launches, synchronisations and memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.row_memory import mechanism_of_rows
from raycloak.workers.models.compute_mode import ComputeMode, Precision
from raycloak.workers.models.models import load_flat, read_flat
from raycloak.workers.vectors.ring import RingSpec, encode_into
from raycloak_lab.bench.gpu_use import GpuUse, gpu_use
from raycloak_lab.bench.gradient_cases import next_token


@dataclass(frozen=True, slots=True)
class Shape:
    """One micro-batch of one micro-batch a step."""

    precision: Precision
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.precision} {self.rows}x{self.tokens}"


SHAPES = (Shape("bf16", 8, 256), Shape("float32", 4, 256), Shape("bf16", 8, 1024))


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step and of its parts; the rest is None where there is no GPU.

    Attributes:
        first_s, second_s: of the clipped sum, after one that is not counted. load_s: of the parameters' way into the
            model. to_host_s: of a float64 total to the host. encode_s: of its words, on the host. plain_s: of a forward
            and backward pass without taps.
        use: launches, synchronisations and kernels of a sum.
    """

    first_s: float
    second_s: float
    load_s: float
    to_host_s: float
    encode_s: float
    plain_s: float
    peak_bytes: int | None = None
    use: GpuUse | None = None


class _NextToken(nn.Module):
    """The logits [n, T - 1, V] of ids [n, T]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits[:, :-1]


def large_step(place: Place, shape: Shape, settings: Mapping[str, int] | None = None) -> Found:
    """Measure one shape.

    Args:
        settings: of the model, instead of GPT-2 small's.
    """
    pin_numerics()
    settings = settings or {}
    module = _model(settings)
    parameters = read_flat(module)
    ComputeMode(precision=shape.precision).apply(module)
    vocabulary = settings.get("vocab_size", 50_257)
    ids = np.random.default_rng(0).integers(vocabulary, size=(shape.rows, shape.tokens))
    batch = ids, ids[:, 1:], np.ones(shape.rows, np.bool_)
    engine = GradientEngine(module, next_token, mechanism_of_rows(parameters.size, shape.rows), place.device)
    inputs, labels = (torch.tensor(each, device=place.device) for each in batch[:2])

    def plain() -> None:
        module.zero_grad(set_to_none=True)
        next_token(module(inputs), labels).sum().backward()  # type: ignore[no-untyped-call]

    def clipped() -> None:
        engine.clipped_sum(parameters, [batch])

    clipped()
    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats(place.device)
    first_s, second_s = place.seconds(clipped), place.seconds(clipped)
    peak_bytes = torch.cuda.max_memory_allocated(place.device) if place.on_gpu else None
    use = gpu_use(clipped, place.device)
    plain()
    plain_s = place.seconds(plain)
    module.zero_grad(set_to_none=True)
    total = torch.zeros(parameters.size, dtype=torch.float64, device=place.device)
    on_host = total.cpu().numpy()
    words = np.empty(parameters.size, np.uint32)
    step = Step(
        first_s=first_s,
        second_s=second_s,
        load_s=place.seconds(lambda: load_flat(module, parameters)),
        to_host_s=place.seconds(total.cpu),
        encode_s=_clock(lambda: encode_into(on_host, RingSpec(32, -16, 4096.0), words)),
        plain_s=plain_s,
        peak_bytes=peak_bytes,
        use=use,
    )
    return Found({"step": step})


def _model(settings: Mapping[str, int]) -> nn.Module:
    package: Any = import_module("transformers")
    config = package.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **settings)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return _NextToken(package.GPT2LMHeadModel(config)).train()


def _clock(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
