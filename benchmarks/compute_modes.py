"""Measures what `precision` and `gradient_checkpointing` cost and save on the CPU: seconds and memory of a micro-batch.

    python benchmarks/compute_modes.py avx2
    python benchmarks/compute_modes.py default

Every mode takes its turn in each round; a figure is the median of the rounds, as a ratio to plain float32 of the same
round. The clock is processor time. Memory is the peak of a process of its own beyond what it had with the model built.
Weights and texts are random.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

from raycloak import worker_environment

ROWS, ROUNDS = 8, 3
MODELS = ("llama lora", "gpt2 whole", "perceptron")
MODES = {
    "float32": ("float32", False),
    "bf16": ("bf16", False),
    "checkpointing": ("float32", True),
    "bf16, checkpointing": ("bf16", True),
}


def work(name: str, mode: str) -> Any:
    """Return a function that computes one clipped sum of a micro-batch."""
    import numpy as np
    import torch

    from raycloak.workers.gradients.clipping import GradientEngine
    from raycloak.workers.gradients.numerics import pin_numerics
    from raycloak.workers.gradients.row_memory import mechanism_of_rows
    from raycloak.workers.models.compute_mode import ComputeMode
    from raycloak.workers.models.losses import cross_entropy, next_token_cross_entropy
    from raycloak.workers.models.models import read_flat

    pin_numerics()
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    if name == "perceptron":
        module: Any = torch.nn.Sequential(
            torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
            torch.nn.Linear(1024, 10),
        )  # fmt: skip
        rows, loss = 256, cross_entropy
        features, labels = draw.random((rows, 784), np.float32), draw.integers(10, size=rows)
    else:
        module, rows, loss = text_model(name), ROWS, next_token_cross_entropy
        features = labels = draw.integers(4000, size=(rows, 128))
    ComputeMode(*MODES[mode]).apply(module)
    parameters = read_flat(module)
    engine = GradientEngine(module, loss, mechanism_of_rows(parameters.size, rows))
    batch = (features, labels, np.ones(rows, np.bool_))
    return lambda: engine.clipped_sum(parameters, [batch])


def text_model(name: str) -> Any:
    """Return a decoder of a few million parameters, whole or with adapters."""
    import peft
    import transformers

    from raycloak.workers.models.text_model import TextModel

    if name == "gpt2 whole":
        config = transformers.GPT2Config(
            vocab_size=4000, n_embd=256, n_layer=4, n_head=4, n_positions=256, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        return TextModel(transformers.GPT2LMHeadModel(config).train())
    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    return TextModel(peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=targets)).train())


def modes_of(name: str) -> list[str]:
    """Return the modes that the model can be computed in."""
    return [mode for mode in MODES if name != "perceptron" or "checkpointing" not in mode]


def peak_mib(name: str, mode: str) -> float:
    """Return the memory of one micro-batch, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "peak", name, mode], capture_output=True, encoding="utf-8", check=True
    )
    return float(done.stdout.split()[-1])


def measure(name: str) -> dict[str, Any]:
    """Return ratios of seconds and MiB per mode."""
    works = {mode: work(name, mode) for mode in modes_of(name)}
    seconds: dict[str, list[float]] = {mode: [] for mode in works}
    for turn in range(ROUNDS + 1):
        for mode, compute in works.items():
            start = time.process_time()
            compute()
            if turn:
                seconds[mode].append(time.process_time() - start)
    ratios = {
        mode: statistics.median(plain / each for plain, each in zip(seconds["float32"], taken, strict=True))
        for mode, taken in seconds.items()
    }
    return {
        mode: {
            "speed": round(ratios[mode], 3),
            "seconds": round(statistics.median(seconds[mode]), 3),
            "mib": peak_mib(name, mode),
        }
        for mode in works
    }


def main() -> None:
    """Measure all, or in a process of its own one peak."""
    warnings.simplefilter("ignore")
    if sys.argv[1] == "peak":
        _, _, name, mode = sys.argv
        compute = work(name, mode)
        # Linux takes 5 for: forget the peak so far.
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as peaks:
            peaks.write("5")
        before = resident("VmRSS")
        compute()
        print((resident("VmHWM") - before) // 1024)
    elif "MEASURED" not in os.environ:
        # The variables must be there before torch is.
        environment = {**os.environ, **worker_environment(sys.argv[1]), "MEASURED": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    else:
        for name in sys.argv[2:] or MODELS:
            print(json.dumps({"cpu_capability": sys.argv[1], "model": name, **measure(name)}), flush=True)


def resident(field: str) -> int:
    """Return a figure of this process in KiB."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


if __name__ == "__main__":
    main()
