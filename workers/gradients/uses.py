"""The uses of one parameter, and the form that its gradient then takes.

Guarantee: the form is a function of shapes, so two computations of one shape take the same path whatever they hold.
"""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from raycloak.workers.gradients.parts import (
    MAX_GRAM_TOKENS,
    MAX_GRAM_WIDTH,
    AbsentPart,
    DensePart,
    GramPart,
    LookupPart,
    Lookups,
    OuterPart,
    Part,
    Products,
    RowsPart,
    merged,
)

# So many elements are held for all rows together without a second thought: 4 MiB.
_SMALL = 2**20


@dataclass(frozen=True, slots=True)
class RowUse:
    """A use whose gradient is known for each row: float32 [m, *shape]."""

    rows: Tensor


@dataclass(frozen=True, slots=True)
class ProductUse:
    """A use in a matrix product."""

    products: Products


@dataclass(frozen=True, slots=True)
class LookupUse:
    """A use as a table: ``values`` [m, tokens, width] at ``ids`` [m, tokens]."""

    ids: Tensor
    values: Tensor


Use = RowUse | ProductUse | LookupUse


def settled(use: Use) -> Use:
    """Return a product as its rows where these take no more memory than its two sides; any other use as it is.

    A checkpointed model saves memory by it: the sides of a product live no longer than the layer's backward pass.
    """
    if isinstance(use, ProductUse):
        _, groups, tokens, height, width = use.products.shape
        if (groups, tokens) != (1, 1) and height * width <= tokens * (height + width):
            return RowUse(use.products.all_rows())
    return use


def part_of(uses: list[Use], count: int, shape: tuple[int, ...], device: torch.device, gram: bool = True) -> Part:
    """Return the part of a parameter of this shape from all its uses by ``count`` rows.

    Args:
        gram: whether a :class:`GramPart` may be taken.
    """
    if not uses:
        return AbsentPart(count, torch.Size(shape).numel(), device)
    products = [use.products for use in uses if isinstance(use, ProductUse)]
    lookups = [use for use in uses if isinstance(use, LookupUse)]
    rows = [use.rows for use in uses if isinstance(use, RowUse)]
    if not rows and not products:
        return LookupPart(_joined(lookups), shape[0])
    if not rows and not lookups and len(products) == 1 and products[0].shape[1:3] == (1, 1):
        left, right = (side.reshape(count, -1) for side in (products[0].left, products[0].right))
        return OuterPart(left, right)
    if rows or all(_fits(each) for each in products):
        return DensePart(dense_rows(uses, count, shape, device))
    found = [_joined(lookups)] if lookups else []
    return GramPart(products, found) if _gram_pays(products, found) else RowsPart(products, found)


def dense_rows(uses: list[Use], count: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the gradient of each row, float32 [m, size]; uses are added in their order."""
    found = [_dense(use, count, shape) for use in uses]
    return reduce(torch.add, found) if found else torch.zeros(count, torch.Size(shape).numel(), device=device)


def _dense(use: Use, count: int, shape: tuple[int, ...]) -> Tensor:
    match use:
        case RowUse(rows):
            return rows.reshape(count, -1)
        case ProductUse(products):
            return products.all_rows()
        case LookupUse(ids, values):
            return LookupPart(merged(ids, values), shape[0]).rows()


def _fits(products: Products) -> bool:
    """Return whether the rows take no more memory than the two sides that they come from, or little."""
    count, groups, tokens, height, width = products.shape
    return height * width <= tokens * (height + width) or count * groups * height * width <= _SMALL


def _gram_pays(products: list[Products], lookups: list[Lookups]) -> bool:
    """Return whether Gram matrices take fewer multiplications than forming the rows once more, and are proved."""
    _, groups, _, height, width = products[0].shape
    tokens = sum(each.shape[2] for each in products)
    every = tokens + sum(each.ids.shape[1] for each in lookups)
    proved = groups == 1 and every <= MAX_GRAM_TOKENS and max(height, width) <= MAX_GRAM_WIDTH
    return proved and tokens**2 * height + every**2 * width <= tokens * height * width


def _joined(uses: list[LookupUse]) -> Lookups:
    return merged(torch.cat([use.ids for use in uses], 1), torch.cat([use.values for use in uses], 1))
