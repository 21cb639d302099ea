"""A candidate for `RowsPart` on a GPU: rows of a matrix product, measured and added by one binary and never stored.

Guarantee: a row that is added has the bits that were measured, in whatever precision `tl.dot` multiplies: both passes
run the same machine code over the same tiles, and the pass is a number that the code is given.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from benchmarks.gpu.row_kernel import row_kernel

_TILE = 64


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The rows leftᵀ right, one for each example.

    Attributes:
        left, right: float32 [m, tokens, r] and [m, tokens, c], contiguous.
        precision: of the products; the sum over the tokens is in float32.
    """

    left: Tensor
    right: Tensor
    precision: Literal["ieee", "tf32"] = "ieee"

    def squares(self) -> Tensor:
        """Return the squared norms, float64 [m]."""
        squares = torch.empty(len(self.left), self._tiles(), dtype=torch.float64, device=self.left.device)
        self._launch(squares, squares, squares, adds=0)
        return squares.sum(1)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add the rows times ``weights``, float64 [m], to ``total``, float64 [r * c]."""
        self._launch(weights, total, total, adds=1)

    def _tiles(self) -> int:
        height, width = self.left.shape[2], self.right.shape[2]
        tiles: int = triton.cdiv(height, _TILE) * triton.cdiv(width, _TILE)
        return tiles

    def _launch(self, weights: Tensor, total: Tensor, squares: Tensor, adds: int) -> None:
        (rows, tokens, height), width = self.left.shape, self.right.shape[2]
        row_kernel[(self._tiles(),)](
            self.left, self.right, weights, total, squares, rows, tokens, height, width, self._tiles(), adds,
            TILE=_TILE, STEP=32, PRECISION=self.precision, num_warps=8,
        )  # fmt: skip


def binaries() -> int:
    """Return how many binaries of the kernel this process has; the interpreter compiles none."""
    caches = getattr(row_kernel, "device_caches", {})
    return sum(len(each[0]) for each in caches.values())
