"""Measures a loss of tokens from hidden states beside one from logits: ``python -m benchmarks.vocabulary``.

A decoder of one block and a whole head computes one micro-batch. The head is frozen, under a trained block; or trained;
or tied to the embedding and trained with it. Both forms take their turn in each round, on twins of one model. The clock
is processor time on one thread, and the figure the median of the rounds. Memory is the peak of the bytes of all tensors
that are alive at once beside the model: activations, rows and the sum itself, which is float64. Weights and ids are
random. It prints one JSON object with the conditions.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from raycloak import worker_environment

ROWS = 4
SIZES = {"gpt2": (50257, 768), "llama": (128256, 1024)}
"""Vocabulary and width: those of the small GPT-2, and Llama 3's vocabulary at half the width of its smallest model."""
HEADS = ("frozen", "trained", "tied")


def model(name: str, head: str, tokens: int) -> Any:
    """Return a decoder of one block behind its text model."""
    import torch
    import transformers

    from raycloak.workers.models.text_model import as_text_model

    vocabulary, width = SIZES[name]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=1, n_head=8, n_positions=tokens, bos_token_id=1, eos_token_id=1,
        tie_word_embeddings=head == "tied",
    )  # fmt: skip
    inner = transformers.GPT2LMHeadModel(config)
    for each, tensor in inner.named_parameters():
        tensor.requires_grad_(".h." in each or head == "tied" or (head == "trained" and "lm_head" in each))
    return as_text_model(inner)[0]


def measure(name: str, head: str, tokens: int, rounds: int) -> dict[str, float]:
    """Return processor seconds and MiB of a micro-batch by form, for one size and head."""
    import numpy as np

    from raycloak.workers.gradients.clipping import GradientEngine
    from raycloak.workers.gradients.numerics import pin_numerics
    from raycloak.workers.gradients.row_memory import mechanism_of_rows, peak_bytes
    from raycloak.workers.models.losses import next_token_cross_entropy
    from raycloak.workers.models.models import read_flat, twin_of

    pin_numerics()
    module = model(name, head, tokens)
    parameters = read_flat(module)
    ids = np.random.default_rng(0).integers(SIZES[name][0], size=(ROWS, tokens))
    batch = ids, ids, np.ones(ROWS, np.bool_)

    def engine(ends_in_head: bool) -> tuple[Callable[[], object], Any]:
        own = twin_of(module)
        # Without a head of its own to the loss, a text model gives logits.
        own._ends_in_head = ends_in_head
        found = GradientEngine(own, next_token_cross_entropy, mechanism_of_rows(parameters.size, ROWS))
        return lambda: found.clipped_sum(parameters, [batch]), own

    forms = {"hidden": engine(True), "logits": engine(False)}
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for turn in range(rounds + 1):
        for form, (compute, _) in forms.items():
            start = time.process_time()
            compute()
            # The first round warms caches.
            if turn:
                seconds[form].append(time.process_time() - start)
    found = {f"{form}_s": round(statistics.median(taken), 3) for form, taken in seconds.items()}
    peaks = {form: peak_bytes(compute, own.parameters()) for form, (compute, own) in forms.items()}
    return found | {f"{form}_mib": round(peak / 2**20) for form, peak in peaks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    given = parser.parse_args()
    cases = {
        f"{name} {head}": measure(name, head, given.tokens, given.rounds) for name in given.sizes for head in HEADS
    }
    from raycloak.workers.gradients.numerics import current_numerics

    numerics = current_numerics("cpu")
    conditions = {"rows": ROWS, "tokens": given.tokens, "rounds": given.rounds, "sizes": SIZES}
    conditions |= {
        "threads": numerics.threads,
        "torch": numerics.torch,
        "device": numerics.device,
        "cpu_capability": numerics.cpu_capability,
        "engine": numerics.engine,
    }
    print(json.dumps({"conditions": conditions, "cases": cases}, indent=1))


if __name__ == "__main__":
    if "MEASURED" not in os.environ:
        # The variables must be there before torch is.
        environment = {**os.environ, **worker_environment("default"), "MEASURED": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.vocabulary", *sys.argv[1:]], environment)
    main()
