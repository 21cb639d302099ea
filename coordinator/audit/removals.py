"""The move of a clipped sum when one synthetic unit is taken away: the bound that noise is made for, measured.

Canaries that a run trains on have axes of their own. So they show what noise, sampling and clipping do to an example,
and nothing of a model that puts one example into the place of another. The canaries here go through the user's own
layers, in one micro-batch: of many lengths, so that they would be sorted among each other; some drawn, and some in
places that no example was drawn for. All rows of a unit are one example: clipped one by one, they would add up.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.spare_rows import CANDIDATES, spare_rows
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.models import LossFn, load_flat
from raycloak.workers.terms.mechanism import Mechanism

CLIP = 2.0**-30
"""So low that every example with a gradient is clipped: a row in the place of another then counts in full."""

_UNDRAWN = 4
"""One unit in so many is not drawn."""

_REMOVED = 24
"""Units that are taken away, one at a time."""


def largest_move(
    module: nn.Module,
    loss_fn: LossFn,
    form: DatasetForm,
    mechanism: Mechanism,
    parameters: Iterable[NDArray[np.float32]],
    *,
    deterministic: bool,
    vocabulary: int | None,
) -> float:
    """Return the most by which taking one unit away moved the clipped sum, in units of the clipping norm.

    Guarantee: at most 1 where the sensitivity is what the noise is made for. Only public examples are computed.

    Args:
        module: the user's model; it belongs to this function from then on.
        mechanism: of the run; its numbers of units and of rows at once are taken.
        parameters: float32[d] each, to measure at.

    Raises:
        ModelError: as `raycloak.workers.gradients.clipping.GradientEngine` and
            `raycloak.workers.gradients.spare_rows.spare_rows`.
    """
    pin_numerics(deterministic, torch.get_num_threads())
    units, rows, per_unit = mechanism.micro_batch_size, mechanism.micro_batch_rows, mechanism.rows_per_unit
    pool = spare_rows(module.train(), form, deterministic, vocabulary, candidates=max(CANDIDATES, rows))
    size = sum(tensor.numel() for tensor in module.parameters() if tensor.requires_grad)
    terms = {"max_grad_norm": CLIP, "dimension": size, "micro_batches": 1}
    engine = GradientEngine(module, loss_fn, mechanism.model_copy(update=terms), "cpu", deterministic)
    of_rows = np.arange(rows) // per_unit
    chosen, drawn = of_rows % len(pool[0]), of_rows % _UNDRAWN > 0
    largest = 0.0
    for flat in parameters:
        load_flat(module, flat)
        features, labels = (part[chosen] for part in pool)
        whole = torch.cat(engine.clipped_sum(flat, [(features, labels, drawn)])).numpy()
        for unit in np.flatnonzero(np.arange(units) % _UNDRAWN > 0)[:_REMOVED]:
            left, others = drawn.copy(), features.copy()
            left[of_rows == unit] = False
            others[of_rows == unit] = pool[0][(unit + len(pool[0]) // 2) % len(pool[0])]
            moved = np.linalg.norm(whole - torch.cat(engine.clipped_sum(flat, [(others, labels, left)])).numpy())
            largest = max(largest, float(moved) / CLIP)
    return largest
