"""Measures a price of `raycloak-lab scale` beside the engine: ``python -m benchmarks.prices``.

Each case runs in a process of its own: a Llama with random weights on the CPU computes one micro-batch. Measured is the
growth of the peak of resident memory beyond the model, by the second sum of two, so that libraries' workspaces are
there already. The price is of the clipped sum and one micro-batch, counted on shapes without numbers, and cut into a
CPU's blocks here, since that is what computes. It prints one JSON object.
"""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from raycloak_lab.bench.resident_memory import growth, return_freed_blocks

MIB = 2**20
ROWS, TOKENS = 4, 64
# Width, MLP, blocks, heads, heads of keys, vocabulary.
SIZES = {"20 M": (384, 1024, 8, 6, 6, 8_000), "88 M": (768, 2048, 10, 12, 12, 16_000)}
CASES = [(size, lora) for size in SIZES for lora in (False, True)]


def build(size: str, lora: bool, device: str) -> Any:
    """Return a model with gradient checkpointing, with numbers on the CPU and without on ``meta``."""
    import torch
    import transformers

    from raycloak.workers.inputs.hub_files import quiet
    from raycloak.workers.models.compute_mode import ComputeMode
    from raycloak.workers.models.hub_model import LoraSpec, adapted
    from raycloak.workers.models.models import ModelSource, build_model
    from raycloak_lab.scale.large_models import llama

    def made() -> Any:
        *shapes, vocabulary = SIZES[size]
        with quiet(), torch.device(device):
            settings = transformers.AutoConfig.for_model(**llama(*shapes, vocabulary=vocabulary))
            model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
            adapter = LoraSpec(rank=16, alpha=32.0, target_modules="all-linear", bias="none")
            return adapted(model, adapter, "CAUSAL_LM") if lora else model

    return build_model(ModelSource.of(made), Path(), 0, ComputeMode(gradient_checkpointing=True))


def measured(size: str, lora: bool) -> float:
    """Return the MiB that a sum of one micro-batch takes beyond the model and its parameters."""
    import numpy as np

    from raycloak.workers.gradients.clipping import GradientEngine
    from raycloak.workers.gradients.numerics import pin_numerics
    from raycloak.workers.gradients.row_memory import mechanism_of_rows
    from raycloak.workers.models.losses import next_token_cross_entropy
    from raycloak.workers.models.models import read_flat

    pin_numerics()
    module = build(size, lora, "cpu")
    parameters = read_flat(module)
    engine = GradientEngine(module, next_token_cross_entropy, mechanism_of_rows(parameters.size, ROWS))
    ids = np.random.default_rng(0).integers(SIZES[size][-1], size=(ROWS, TOKENS))
    batch = ids, ids, np.ones(ROWS, np.bool_)
    engine.clipped_sum(parameters, [batch])
    return growth(lambda: engine.clipped_sum(parameters, [batch])) / MIB


def priced(size: str, lora: bool) -> float:
    """Return the MiB that `raycloak-lab scale` counts for the same, in a process that ends after it."""
    from raycloak.workers.gradients import parts, vocabulary_loss
    from raycloak.workers.gradients.numerics import pin_numerics
    from raycloak_lab.scale.large_models import on_gpus

    pin_numerics()
    tables: list[dict[str, Any]] = [parts.SUMS, parts.BLOCK, parts._SQUARED, vocabulary_loss.PIECE_BYTES]
    for table in tables:
        table["meta"] = table["cpu"]
    (gpu,) = on_gpus(build(size, lora, "meta"), 1, ROWS, TOKENS)
    return (gpu.sums + gpu.micro_batches) / MIB


def main() -> None:
    found = {}
    for case in CASES:
        # Not forked: memory that this process holds free would hide what a sum takes.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=return_freed_blocks) as alone:
            taken, price = (alone.submit(act, *case).result() for act in (measured, priced))
        name = f"{case[0]}, {'lora' if case[1] else 'full'}"
        found[name] = {"measured MiB": round(taken), "price MiB": round(price), "ratio": round(price / taken, 2)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
