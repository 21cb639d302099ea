"""The rows of matrix products in Triton: formed to be measured, and formed again to be added."""

import triton
import triton.language as tl

# With more tokens at a time, a thread needs more than its registers.
TILE, STEP = tl.constexpr(64), tl.constexpr(16)


@triton.jit(
    do_not_specialize=["rows", "groups", "tokens", "lookups", "adds"],
    do_not_specialize_on_alignment=["ids_ptr", "weights_ptr", "squares_ptr", "total_ptr"],
)
def row_kernel(
    left_ptr, right_ptr, ids_ptr, weights_ptr, squares_ptr, total_ptr, rows, groups, tokens, lookups, height, width,
    adds, TIED: tl.constexpr,
):  # fmt: skip
    """With ``adds`` 0, write the sum of squares of each row's tile; else add the rows times their weights to the total.

    Both form and square a tile by the same instructions; what they load and store besides is masked. All in which they
    differ must not choose a binary: Triton would compile anew for an integer that is 1, and for a pointer that is not
    aligned to 16 bytes.

    Args:
        left_ptr, right_ptr: [rows, groups, tokens, height] and [rows, groups, tokens + lookups, width], of one type.
        ids_ptr: int32 [rows, lookups], lines of the matrix to which the last tokens of the right side are added.
        weights_ptr: float64 [rows]. squares_ptr: float64 [rows, groups, tiles]. total_ptr: float64.
        TIED: whether there are lookups.
    """
    place = tl.program_id(0)
    across = tl.cdiv(width, TILE)
    tiles = tl.cdiv(height, TILE) * across
    group = place // tiles
    line = place % tiles // across * TILE + tl.arange(0, TILE)
    column = place % across * TILE + tl.arange(0, TILE)
    is_line, is_column = line < height, column < width
    every = tokens + lookups
    added = tl.zeros((TILE, TILE), tl.float64)
    for number in range(rows):
        # In the interpreter the number of a loop is no tensor.
        row = tl.full((), 0, tl.int64) + number
        first = row * groups + group
        left_at, right_at = left_ptr + first * tokens * height, right_ptr + first * every * width
        ids_at = ids_ptr + row * lookups - tokens
        formed = tl.zeros((TILE, TILE), tl.float32)
        for begin in range(0, every, STEP):
            token = begin + tl.arange(0, STEP)
            is_token, is_any = token < tokens, token < every
            far = token.to(tl.int64)
            # The left side is loaded turned.
            here = is_line[:, None] & is_token[None, :]
            left = tl.load(left_at + far[None, :] * height + line[:, None], mask=here, other=0.0)
            if TIED:
                # A lookup is a product with a unit vector, so no time tells where it goes.
                ids = tl.load(ids_at + token, mask=~is_token & is_any, other=-1)
                left = tl.where(line[:, None] == ids[None, :], 1.0, left)
            here = is_any[:, None] & is_column[None, :]
            right = tl.load(right_at + far[:, None] * width + column[None, :], mask=here, other=0.0)
            formed = tl.dot(left, right, formed, input_precision="ieee")
        wide = formed.to(tl.float64)
        # Of both axes at once: one after the other, Triton 3.7.1 fails to compile for sm_100.
        square = tl.sum(wide * wide)
        square_at = squares_ptr + row * groups * tiles + place
        measured = tl.load(square_at, mask=adds != 0, other=0.0)
        tl.store(square_at, square, mask=adds == 0)
        weight = tl.load(weights_ptr + row, mask=adds != 0, other=0.0)
        # What is added has the square that was measured, or no sum is left. A NaN is never equal.
        factor = tl.where(square == measured, weight, float("nan"))
        # Rows that are not finite have the weight zero, and zero times infinity is no number.
        added += tl.where(weight == 0.0, 0.0, wide * factor)
    at = total_ptr + (group.to(tl.int64) * height + line)[:, None] * width + column[None, :]
    is_added = is_line[:, None] & is_column[None, :] & (adds != 0)
    tl.store(at, tl.load(at, mask=is_added, other=0.0) + added, mask=is_added)
