"""The rows of matrix products on a GPU: one binary forms them to measure and to add them, and never stores them."""

from copy import copy
from functools import cache
from typing import Final

import torch
import triton
from torch import Tensor

from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.device.row_kernel import STEP, TILE, row_kernel

# A pointer that is not aligned to so many bytes would choose another binary.
_ALIGNED: Final = 16
# Between what a sum of float32 products may be off, 2^-24 for each term, and the 2^-11 of shorter products.
_GOLDEN_ERROR: Final = 2.0**-16
# Sums of far fewer than 2^13 squares, in float64.
_GOLDEN_SQUARE_ERROR: Final = 2.0**-40


class FusedRows:
    """A part of per-example gradients: a matrix product per row and lookups in it, formed tile by tile.

    Products are of bfloat16 numbers where one side has them, and else of float32 numbers. They are added up in float32.

    Guarantee: what :meth:`add` adds of a row, before its weight, has the norm that :meth:`squares` gave, or the total
    is NaN. The pass that adds a tile squares the very numbers that it adds, and compares with what was measured. So
    this rests on no promise that a device multiplies twice alike, and on no model of how it rounds.

    Guarantee: no work, shape or address depends on what the rows hold.

    Args:
        left, right: [m, groups, tokens, r] and [m, groups, tokens, c]; the gradient of a row is leftᵀ right, groups one
            below the other.
        lookups: ids int64 [m, n] and values [m, n, c], which are added to the lines of these ids; of one group. No id
            of a row repeats, and one of r or more has values of zero.
    """

    def __init__(self, left: Tensor, right: Tensor, lookups: tuple[Tensor, Tensor] | None = None) -> None:
        (self._count, self._groups, self._tokens, self._height), self._width = left.shape, right.shape[3]
        narrow = torch.bfloat16 in (left.dtype, right.dtype)
        kind = torch.bfloat16 if narrow else torch.float32
        self._tied = lookups is not None
        self._ids = torch.empty(self._count, 0, dtype=torch.int32, device=left.device)
        if lookups is not None:
            require_bound(self._groups == 1, "only one group has lookups")
            ids, values = lookups
            self._ids = ids.int().contiguous()
            right = torch.cat([right.to(kind), values[:, None].to(kind)], 2)
        self._left, self._right = _laid_out(left.to(kind)), _laid_out(right.to(kind))
        tiles = triton.cdiv(self._height, TILE.value) * triton.cdiv(self._width, TILE.value)
        self._programs = self._groups * tiles
        self._measured: Tensor | None = None

    @classmethod
    def proven(cls, left: Tensor, right: Tensor, lookups: tuple[Tensor, Tensor] | None = None) -> "FusedRows":
        """Return rows whose binary formed public rows as a CPU does, in this process.

        Raises:
            ProtocolError: ``not_reproducible`` if it did not.
        """
        rows = cls(left, right, lookups)
        extents = _golden_extent(rows._height), _golden_extent(rows._width)
        _prove(rows._left.dtype, left.device, *extents, rows._tied)
        return rows

    def squares(self) -> Tensor:
        """Return the squared norms of the rows, float64 [m], from the exact squares of their float32 numbers."""
        return self._tile_squares().sum(1)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add every row times its weight to ``total``; one of weight zero adds exactly zero, whatever it holds.

        Args:
            weights: float64 [m], on the device.
            total: float64 [groups * r * c], contiguous; changed in place.
        """
        self._launch(weights, self._tile_squares(), total, adds=1)

    def rows(self) -> Tensor:
        """Return all rows, float32 [m, groups * r * c]: for checks and small parts."""
        size, device = self._groups * self._height * self._width, self._left.device
        found, weight = torch.empty(self._count, size, device=device), torch.ones(1, dtype=torch.float64, device=device)
        for row, target in enumerate(found):
            total = torch.zeros(size, dtype=torch.float64, device=device)
            self._alone(row).add(weight, total)
            target.copy_(total)
        return found

    def _alone(self, row: int) -> "FusedRows":
        """Return one of the rows, which the same binary forms."""
        one, here = copy(self), slice(row, row + 1)
        one._left, one._right, one._ids = _laid_out(self._left[here]), _laid_out(self._right[here]), self._ids[here]
        one._count, one._measured = 1, None
        return one

    def _tile_squares(self) -> Tensor:
        """Return the sums of squares of each row's tiles, float64 [m, programs]; they are measured once."""
        if self._measured is None:
            measured = torch.empty(self._count, self._programs, dtype=torch.float64, device=self._left.device)
            self._launch(measured, measured, measured, adds=0)
            self._measured = measured
        return self._measured

    def _launch(self, weights: Tensor, squares: Tensor, total: Tensor, adds: int) -> None:
        # A kernel is launched on the current device, wherever its operands are.
        with torch.cuda.device_of(self._left):  # type: ignore[no-untyped-call]
            row_kernel[(self._programs,)](
                self._left, self._right, self._ids, weights, squares, total, self._count, self._groups, self._tokens,
                self._ids.shape[1], self._height, self._width, adds, TIED=self._tied, num_warps=8,
            )  # fmt: skip


def _laid_out(values: Tensor) -> Tensor:
    """Return values as the kernel reads them: row by row, and from an aligned address."""
    values = values.contiguous()
    return values if values.data_ptr() % _ALIGNED == 0 else values.clone()


def _golden_extent(extent: int) -> int:
    """Return a small extent for which Triton takes the binary that it takes for ``extent``: it looks for 1 and 16."""
    return 1 if extent == 1 else TILE.value + (16 if extent % 16 == 0 else 3)


@cache
def _prove(kind: torch.dtype, device: torch.device, height: int, width: int, tied: bool) -> None:
    """Compare public rows with exact ones, as measured and as added; and see that of wrong ones no sum is left.

    Raises:
        ProtocolError: ``not_reproducible``.
    """
    draw = torch.Generator("cpu").manual_seed(0)
    # More tokens than one step has.
    count, groups, tokens = 3, 1 if tied else 2, STEP.value + 5
    left, right, values = (
        torch.randn(count, *shape, generator=draw, device="cpu").to(kind)
        for shape in ((groups, tokens, height), (groups, tokens, width), (tokens, width))
    )
    exact, bound = left.double().mT @ right.double(), left.double().abs().mT @ right.double().abs()
    lookups = None
    if tied:
        ids = torch.arange(count * tokens, device="cpu").view(count, tokens) % (height + tokens)
        values[ids >= height] = 0.0
        table = torch.zeros(count, height + tokens, width, dtype=torch.float64, device="cpu")
        table.scatter_(1, ids[:, :, None].expand(-1, -1, width), values.double())
        exact, bound = exact + table[:, None, :height], bound + table[:, None, :height].abs()
        lookups = ids.to(device), values.to(device)
    exact, bound = (each.flatten(1)[:2].to(device) for each in (exact, bound))
    left[2, 0, 3, 0] = torch.inf
    rows = FusedRows(left.to(device), right.to(device), lookups)
    found, squares = rows.rows()[:2].double(), rows.squares()
    weights, total = torch.tensor([0.5, 0.25, 0.0], dtype=torch.float64, device=device), torch.ones_like(found[0])
    rows.add(weights, total)
    alike = (
        bool(((found - exact).abs() <= _GOLDEN_ERROR * bound).all()),
        bool(((found.square().sum(1) / squares[:2] - 1).abs() <= _GOLDEN_SQUARE_ERROR).all()),
        # Products with these weights are exact.
        torch.equal(total, 1 + (0.5 * found[0] + 0.25 * found[1])),
        not squares[2].isfinite(),
    )
    # From here on, other numbers are added than were measured.
    rows._left[0] *= 2
    rows.add(weights, total)
    if not (all(alike) and total.isnan().all()):
        raise ProtocolError("not_reproducible", "this worker's GPU forms other rows of a product than its CPU")
