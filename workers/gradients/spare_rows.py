"""Synthetic examples for the rows of a micro-batch that no example was drawn for.

They are of different lengths and sizes, as a model may sort or pack by either: a row that moves then meets one that
stays. They come from public facts alone.
"""

import math
import warnings

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError, is_out_of_memory
from raycloak.workers.gradients.gradient_parts import named_operations
from raycloak.workers.gradients.probes import Probes, odd_ids
from raycloak.workers.inputs.datasets import Batch, DatasetForm

CANDIDATES = 24
"""Enough that neighbours in a micro-batch differ, and few enough to hold."""


def spare_rows(
    module: nn.Module,
    form: DatasetForm,
    deterministic: bool = True,
    vocabulary: int | None = None,
    *,
    candidates: int = CANDIDATES,
) -> Batch:
    """Return the synthetic examples that ``module`` gives a finite output for, at least one.

    Args:
        module: was passed by `raycloak.workers.gradients.model_checks.check_trainable`, with the other arguments; on
            the CPU.
        candidates: how many are drawn.

    Returns:
        features [n, ...] and labels [n] or [n, k], n <= candidates.

    Raises:
        ModelError: ``model_input`` if there is none.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings(), named_operations(deterministic):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(1)
        probes = Probes(form, vocabulary or 2, odd_ids(module))
        fillings = [filling.filled.items() for filling in probes.fillings(1)]
        tried = [(fill, example) for filled in fillings for fill, example in filled if math.isfinite(fill)]
        fills = [fill for fill, example in tried if _is_finite(module, example)]
        examples = probes.varied(candidates, fills)
        kept = [row for row in range(candidates) if _is_finite(module, examples.features[row : row + 1])]
    if not kept:
        raise ModelError(
            "model_input",
            "the model gives no finite output for any synthetic example.",
            "Let it give one for features between 0 and 1, or for any ids of the vocabulary.",
        )
    return examples.features[kept].numpy(), examples.labels[kept].numpy()


def _is_finite(module: nn.Module, features: Tensor) -> bool:
    try:
        output: Tensor = module(features)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # User code may raise anything; an odd value may be none for it.
        return False
    return bool(output.isfinite().all())
