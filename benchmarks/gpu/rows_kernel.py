"""A candidate for `RowsPart` on a GPU: rows of a matrix product, measured and added by one binary and never stored.

Guarantee: a row that is added has the bits that were measured, in whatever precision `tl.dot` multiplies: both passes
run the same machine code over the same tiles, and the pass is a number that the code is given. So everything in which
the two launches differ must not choose a binary: Triton would compile anew for an integer that is 1, and for a pointer
that is not aligned to 16 bytes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

import benchmarks.gpu.interpreter  # noqa: F401 - before a kernel is run


@triton.jit(do_not_specialize=["adds"], do_not_specialize_on_alignment=["weights_ptr", "total_ptr", "squares_ptr"])
def _rows_kernel(
    left_ptr, right_ptr, weights_ptr, total_ptr, squares_ptr, rows, tokens, height, width, tiles, adds,
    TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    across = tl.cdiv(width, TILE)
    line = tile // across * TILE + tl.arange(0, TILE)
    column = tile % across * TILE + tl.arange(0, TILE)
    is_line, is_column = line < height, column < width
    added = tl.zeros((TILE, TILE), tl.float64)
    for number in range(rows):
        row = tl.full((), 0, tl.int64) + number
        formed = tl.zeros((TILE, TILE), tl.float32)
        for begin in range(0, tokens, STEP):
            token = begin + tl.arange(0, STEP)
            is_token = token < tokens
            # The left side is loaded turned.
            left_at = left_ptr + (row * tokens + token)[None, :] * height + line[:, None]
            right_at = right_ptr + (row * tokens + token)[:, None] * width + column[None, :]
            left = tl.load(left_at, mask=is_line[:, None] & is_token[None, :], other=0.0)
            right = tl.load(right_at, mask=is_token[:, None] & is_column[None, :], other=0.0)
            formed = tl.dot(left, right, formed, input_precision=PRECISION)
        wide = formed.to(tl.float64)
        if adds == 0:
            tl.store(squares_ptr + row * tiles + tile, tl.sum(tl.sum(wide * wide, 1), 0))
        else:
            weight = tl.load(weights_ptr + row)
            # Only rows of weight zero are not finite, and zero times infinity is no number.
            added += tl.where(weight == 0.0, 0.0, wide * weight)
    if adds != 0:
        at = total_ptr + line.to(tl.int64)[:, None] * width + column[None, :]
        is_here = is_line[:, None] & is_column[None, :]
        tl.store(at, tl.load(at, mask=is_here, other=0.0) + added, mask=is_here)


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
        _rows_kernel[(self._tiles(),)](
            self.left, self.right, weights, total, squares, rows, tokens, height, width, self._tiles(), adds,
            TILE=_TILE, STEP=32, PRECISION=self.precision, num_warps=8,
        )  # fmt: skip


_TILE = 64


def binaries() -> int:
    """Return how many binaries of the kernel this process has; the interpreter compiles none."""
    caches = getattr(_rows_kernel, "device_caches", {})
    return sum(len(each[0]) for each in caches.values())
