"""A Triton kernel that forms the rows of a matrix product, to measure or to add them (`rows.py`)."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["adds"], do_not_specialize_on_alignment=["weights_ptr", "total_ptr", "squares_ptr"])
def row_kernel(
    left_ptr, right_ptr, weights_ptr, total_ptr, squares_ptr, rows, tokens, height, width, tiles, adds,
    TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With ``adds`` 0, write the sum of squares of each row's tile; else add the rows times their weights to the total.

    Everything in which the two differ must not choose a binary: Triton would compile anew for an integer that is 1, and
    for a pointer that is not aligned to 16 bytes.
    """
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
