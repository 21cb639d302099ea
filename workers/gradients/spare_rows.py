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
from raycloak.workers.models.models import device_of
from raycloak.workers.models.text_model import heads_apart

CANDIDATES = 24
"""Enough that neighbours in a micro-batch differ, and few enough to hold."""

_TOGETHER = 4
"""Rows that are computed together: as many as the smallest micro-batch has, so all memory is there for them."""


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
        module: was passed by `raycloak.workers.gradients.model_checks.check_trainable`, with the other arguments.
        candidates: how many are drawn.

    Returns:
        features [n, ...] and labels [n] or [n, k], n <= candidates.

    Raises:
        ModelError: ``model_input`` if there is none.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings(), named_operations(deterministic):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(1)
        probes = Probes(form, vocabulary or 2, odd_ids(module, vocabulary or 2), device_of(module))
        fillings = [filling.filled.items() for filling in probes.fillings(1)]
        tried = [(fill, example) for filled in fillings for fill, example in filled if math.isfinite(fill)]
        taken = _are_finite(module, torch.cat([example for _, example in tried]))
        examples = probes.varied(
            candidates, [fill for (fill, _), is_taken in zip(tried, taken, strict=True) if is_taken]
        )
        kept = [row for row, is_finite in enumerate(_are_finite(module, examples.features)) if is_finite]
    if not kept:
        raise ModelError(
            "model_input",
            "the model gives no finite output for any synthetic example.",
            "Let it give one for features between 0 and 1, or for any ids of the vocabulary.",
        )
    return examples.features.cpu()[kept].numpy(), examples.labels.cpu()[kept].numpy()


def _are_finite(module: nn.Module, features: Tensor, together: int = _TOGETHER) -> list[bool]:
    """Return for each row of features [n, ...] whether the module gives it a finite output."""
    found = list[bool]()
    for rows in torch.split(features, together):
        try:
            # Where hidden states are finite, logits are, which are much larger.
            with heads_apart():
                output: Tensor = module(rows)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # User code may raise anything; an odd value may be none for it.
            found += [False] if together == 1 else _are_finite(module, rows, 1)
        else:
            found += output.isfinite().reshape(len(rows), -1).all(1).tolist()
    return found
