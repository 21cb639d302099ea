"""Measures the memory of a worker's devices by device: ``python -m benchmarks.stages``, for docs/models.md.

A Llama of 88 million parameters in float32, all of them trained, lies over 1, 2 and 4 devices, which are tags on the
host's memory. Memory is the peak of the bytes of all tensors that are alive at once on a device: parameters, sums,
activations and rows. Weights and ids are random, and the sums are compared. It prints one JSON object with the
conditions.
"""

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np
import torch
import transformers

from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.placement import place
from raycloak.workers.gradients.row_memory import mechanism_of_rows
from raycloak.workers.models.losses import next_token_cross_entropy
from raycloak.workers.models.models import read_flat
from raycloak.workers.models.text_model import as_text_model
from raycloak_lab.scale.large_models import LiveBytes
from raycloak_lab.scale.tagged_devices import devices, tagged

ROWS, TOKENS, BATCHES = 4, 32, 6
COUNTS = (1, 2, 4)


def measure(count: int) -> dict[str, Any]:
    """Return the peak of each device in MiB, seconds, and a digest of the sum over ``count`` devices."""
    pin_numerics()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        attn_implementation="eager",
    )  # fmt: skip
    module = as_text_model(transformers.LlamaForCausalLM(config))[0]
    parameters = read_flat(module)
    mechanism = mechanism_of_rows(parameters.size, ROWS).model_copy(update={"micro_batches": BATCHES})
    ids = np.random.default_rng(0).integers(8000, size=(BATCHES, ROWS, TOKENS))
    began = time.monotonic()
    with tagged(), LiveBytes() as live:
        place(module, devices(count))
        engine = GradientEngine(module, next_token_cross_entropy, mechanism, devices(1)[0])
        pieces = engine.clipped_sum(parameters, [(each, each, np.ones(ROWS, np.bool_)) for each in ids])
        found = hashlib.sha256()
        for each in pieces:
            found.update(each.cpu().numpy())
    return {
        "devices": count,
        "peak_mib": [round(live.peaks[home] / 2**20) for home in devices(count)],
        "in_flight": engine._in_flight,
        "seconds": round(time.monotonic() - began),
        "parameters": parameters.size,
        "sum": found.hexdigest(),
    }


def main() -> None:
    found = [measure(count) for count in COUNTS]
    conditions = {"rows": ROWS, "tokens": TOKENS, "micro_batches": BATCHES, "torch": torch.__version__}
    print(json.dumps({"conditions": conditions, "devices": found}, indent=1))
    if len({each["sum"] for each in found}) > 1:
        sys.exit("the sums differ")


if __name__ == "__main__":
    main()
