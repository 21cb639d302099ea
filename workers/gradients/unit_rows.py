"""Units of k rows side by side: from what m * k rows did and gave to what m units did and gave.

A unit's gradient is the sum of its rows', whose losses were weighed. So a product or a table by T tokens of each row is
one by k * T tokens of a unit, and nothing is formed for it.
"""

from functools import reduce

import torch
from torch import Tensor

from raycloak.workers.gradients.parts import LookupUse, Products, Use
from raycloak.workers.gradients.vocabulary_loss import HeadUse


def row_weights(present: Tensor, rows_per_unit: int) -> Tensor:
    """Return what a row counts in the mean over its unit's present rows: 0, or one over their number; float32 [m * k].

    Args:
        present: bool [m * k].
    """
    there = present.view(-1, rows_per_unit)
    return (there / there.sum(1, keepdim=True).clamp(min=1)).flatten()


def summed(rows: Tensor, rows_per_unit: int) -> Tensor:
    """Return the sum of each unit's rows [m * k, ...], in their order and type."""
    # One after the other: a reduction by torch adds up in an order that its shape decides.
    return reduce(torch.add, rows.view(-1, rows_per_unit, *rows.shape[1:]).unbind(1))


def means(rows: Tensor, present: Tensor, rows_per_unit: int) -> Tensor:
    """Return the mean over each unit's present rows, float32 [m, n] of rows [m * k, n]; zeros where none is."""
    # Zero times what an absent row may have is not always zero.
    kept = torch.where(present[:, None], rows, 0.0)
    return summed(kept * row_weights(present, rows_per_unit)[:, None], rows_per_unit)


def grouped(use: Use | HeadUse, rows_per_unit: int) -> Use | HeadUse:
    """Return a use by m * k rows as one by m units."""
    if rows_per_unit == 1:
        return use

    def joined(tokens: Tensor) -> Tensor:
        """Return [m, k * T, ...] of [m * k, T, ...]; a copy only where a row's tokens do not follow the last one's."""
        return tokens.reshape(-1, rows_per_unit * tokens.shape[1], *tokens.shape[2:])

    match use:
        case Tensor():
            return summed(use, rows_per_unit)
        case Products(left, right, order):
            # Tokens of one group come together, and groups stay groups.
            left, right = (joined(side.transpose(1, 2)).transpose(1, 2) for side in (left, right))
            return Products(left, right, order)
        case LookupUse(ids, values):
            return LookupUse(joined(ids), joined(values))
        case HeadUse(head, hidden, known, factors):
            return HeadUse(head, joined(hidden), joined(known), joined(factors))
