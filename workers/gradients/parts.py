"""The parts of per-example gradients: the gradient of one parameter for all rows, in the form that is cheapest.

    DensePart    float32 [m, size], held as it is
    OuterPart    one product per row: g = l rᵀ, never formed
    OutersPart   one product for each row of a unit, never formed
    RowsPart     a matrix product per row, formed twice; on a GPU FusedRows (`raycloak.workers.device.rows`)
    GramPart     the same, with its norm from Gram matrices
    LookupPart   some rows of a table
    AbsentPart   zero: the parameter was not used

Shapes and types alone decide which form a parameter gets (:func:`part_of`). Work and shapes never depend on what the
rows hold. The proofs are in docs/proofs/006-clipped-gradients.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.device.compiler import take_triton

ROW_BLOCK = 64
"""A CPU adds so many rows of a micro-batch in float32 before float64 takes over. The clip pays for it: 0.05 % of C."""
ROUNDING, UNDERFLOW = 1.01 * 2.0**-24, 1.01 * 2.0**-126
"""A rounding of float32, and a number that it may lose, with 1 % for terms of higher order: the proof needs both."""
MAX_GRAM_TOKENS, MAX_GRAM_WIDTH = 2**12, 2**16
"""The proof holds for so many tokens and for sides of this length."""
MOST_OUTERS = 64
"""Products of a unit that are added up without being formed: the proof holds for so many."""
SUMS = {"cpu": torch.float32, "cuda": torch.float64, "meta": torch.float64}
"""The type in which weighted rows are added up. On a CPU it reads half the memory; a GPU's float64 is as fast. Here and
below, shapes without numbers are counted as a GPU's."""
BLOCK = {"cpu": 2**17, "cuda": 2**24, "meta": 2**24}
"""So many elements at a time: small enough for the cache of a CPU, large enough to fill a GPU."""
# A part of no more elements is measured and weighed together with others like it: 0.25 MB.
_SIDE_BY_SIDE = 2**16
# So many elements are squared at a time: wide, they take half a megabyte of a CPU's second cache.
_SQUARED = {"cpu": 2**16, "cuda": 2**24, "meta": 2**24}
# The smallest float32 number.
_SMALLEST = 2.0**-149
# Below it no float32 sum of a row overflows.
_LARGEST_SPREAD = 2.0**126
# Elements of Gram matrices at once, for as many rows as fit.
_GRAM_BLOCK = 2**21
# So many elements are held for all rows together without a second thought: 4 MiB.
_SMALL = 2**20
# So many products are added in float32 before float64 takes over. Twice as many double the charge of a wide side; half
# as many are slower.
_DOT = 2**8


class Part(Protocol):
    """The gradients of one parameter for all rows."""

    def squares(self) -> Tensor:
        """Return a number per row whose root is the row's norm, float64 [m].

        Guarantee: the norm of what :meth:`add` adds of a row, before its weight and in exact arithmetic, is at most the
        root in exact arithmetic, but for a factor of 1 + 2^-19 for the rounding of these sums. A row with an element
        that is not finite has a square that is not finite.
        """
        ...

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add every row times its weight to ``total``; a row of weight zero adds exactly zero, whatever it holds.

        Guarantee: on a CPU what a block of `ROW_BLOCK` rows adds depends on these rows and weights alone.

        Args:
            weights: float64 [m], of which each is a float32 number, not negative and finite.
            total: float64 [size], contiguous; changed in place.
        """
        ...

    def rows(self) -> Tensor:
        """Return all rows, float32 [m, size]: for checks and small parts."""
        ...


class DensePart:
    """A part that is held as it is.

    Args:
        rows: float32 [m, ...].
        order: of the elements of a row; see :class:`Products`.
    """

    def __init__(self, rows: Tensor, order: tuple[int, int] = (1, 1)) -> None:
        self._rows, self._order = rows.flatten(1), order

    @property
    def is_small(self) -> bool:
        """Return whether an operation on the part takes longer to begin than to do."""
        return self._rows.numel() <= _SIDE_BY_SIDE

    def squares(self) -> Tensor:
        """Return the squared norms, in float64 from the exact squares."""
        return dense_squares(self._rows)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add the weighted rows; see :class:`Part`."""
        whole = math.prod(self._order)
        for some in _row_blocks(len(weights), total.device):
            columns = whole * max(1, BLOCK[total.device.type] // ((some.stop - some.start) * whole))
            blocks = torch.split(self._rows[some], columns, 1)
            for block, target in zip(blocks, torch.split(total, columns), strict=True):
                add_block(target, _weighed(block, weights[some]), self._order)

    def rows(self) -> Tensor:
        """Return the rows."""
        return _canonical(self._rows, self._order).reshape(self._rows.shape)


class SmallParts:
    """Small dense parts of one micro-batch, side by side: each operation on all of them takes the time of one.

    The rows of a model over several devices are copied to one of them. Operations then have the shapes of the model
    that is not split, and so its bytes.

    Args:
        pairs: at least one part, each with its total.
    """

    def __init__(self, pairs: Sequence[tuple[DensePart, Tensor]]) -> None:
        self._pairs = pairs
        here = pairs[0][0]._rows.device
        self._rows = torch.cat([part._rows.to(here) for part, _ in pairs], 1)

    def squares(self) -> Tensor:
        """Return for each row the sum of its squared norms, as :meth:`Part.squares`."""
        return dense_squares(self._rows)

    def add(self, weights: Tensor) -> None:
        """Add the weighted rows of each part to its total, as :meth:`Part.add`."""
        sizes = [part._rows.shape[1] for part, _ in self._pairs]
        weights = weights.to(self._rows.device)
        for some in _row_blocks(len(weights), self._rows.device):
            blocks = torch.split(_weighed(self._rows[some], weights[some]), sizes)
            for block, (part, total) in zip(blocks, self._pairs, strict=True):
                add_block(total, block.to(total.device), part._order)


def _weighed(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of rows [m, n] by their weights, [n] in the type in which weighted rows are added up."""
    sums = SUMS[rows.device.type]
    return torch.mv(finite(rows.to(sums)).T, weights.to(sums))


class OuterPart:
    """A part with one product per row, such as a linear layer without a sequence: g = l rᵀ.

    A product of two float32 numbers is exact in float64, so |l|²|r|² is the squared norm and no g is formed.

    Args:
        left, right: [m, r] and [m, c], float32 or narrower.
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self._left, self._right = left, right

    def squares(self) -> Tensor:
        """Return the squared norms as products of those of both sides."""
        return dense_squares(self._left) * dense_squares(self._right)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add the weighted rows, those of a block with one product; see :class:`Part`."""
        sums, table = SUMS[total.device.type], total.view(self._left.shape[1], self._right.shape[1])
        left, right = finite(self._left.to(sums)), finite(self._right.to(sums))
        # Without it the weighted side could underflow though the other is large, and so be rounded up by much.
        largest = right.abs().amax(1, keepdim=True).clamp_(min=_SMALLEST)
        # Down: a number below the smallest normal one would else be rounded up by much.
        left.mul_(rounded_down(weights[:, None] * largest.double(), sums))
        right.div_(largest)
        height = max(1, BLOCK[total.device.type] // right.shape[1])
        for some in _row_blocks(len(weights), total.device):
            for columns, target in zip(torch.split(left[some], height, 1), torch.split(table, height), strict=True):
                add_block(target, torch.mm(columns.T, right[some]))

    def rows(self) -> Tensor:
        """Return all products, rounded to float32."""
        return (self._left.float()[:, :, None] * self._right.float()[:, None, :]).flatten(1)


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products, one per row and group: the gradient of a row is leftᵀ right, groups one below the other.

    Attributes:
        left, right: [m, groups, tokens, r] and [m, groups, tokens, c], in any strides; float32, or of a
            narrower type and widened before anything is computed with them.
        order: p and q, where c elements stand as [..., p, q] and the parameter has them as [..., q, p]. A convolution's
            patches are copied fastest with the channels q innermost.
    """

    left: Tensor
    right: Tensor
    order: tuple[int, int] = (1, 1)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Rows, groups, tokens, r and c."""
        count, groups, tokens, height = self.left.shape
        return count, groups, tokens, height, self.right.shape[3]

    @property
    def rows_are_smaller(self) -> bool:
        """Return whether the rows take no more memory than the two sides that they come from."""
        _, _, tokens, height, width = self.shape
        return height * width <= tokens * (height + width)

    def all_rows(self) -> Tensor:
        """Return every row's products as the parameter has them, float32 [m, groups * r * c]."""
        rows = self.unordered_rows()
        return _canonical(rows, self.order).reshape(rows.shape)

    def unordered_rows(self) -> Tensor:
        """Return every row's products in their own order, float32 [m, groups * r * c]."""
        count, groups, tokens, height, width = self.shape
        left = self.left.reshape(count * groups, tokens, height).float()
        right = self.right.reshape(count * groups, tokens, width).float()
        return torch.bmm(left.transpose(1, 2), right).reshape(count, -1)


@dataclass(frozen=True, slots=True)
class Lookups:
    """Gradients of single rows of a table: of token t of row k, ``values[k, t]`` goes to table row ``ids[k, t]``.

    No id occurs twice in a row. One of ``entries`` or more names no row of the table, and its values are zero; see
    :func:`merged`.
    """

    ids: Tensor
    values: Tensor
    entries: int

    def add_weighted(self, weights: Tensor, table: Tensor) -> None:
        """Add all values times their row's weight to a float64 [entries, width] table."""
        wide = finite(self.values.double()).mul_(weights[:, None, None])
        if _adds_in_turn(table.device):
            table.index_add_(0, self._named().flatten(), wide.flatten(0, 1))
            return
        # A row's ids differ, and so no time depends on how often one of them occurs in the micro-batch.
        whole = table.new_zeros(self.entries + self.ids.shape[1], table.shape[1])
        for ids, values in zip(self.ids, wide, strict=True):
            whole.index_add_(0, ids, values)
        table += whole[: self.entries]

    def columns(self, left: Tensor) -> Tensor:
        """Return the elements of ``left`` [m, t, entries] that ids name, [m, t, tokens]; any for an id without row."""
        return left.gather(2, self._named()[:, None, :].expand(-1, left.shape[1], -1))

    def of_rows(self, rows: slice) -> "Lookups":
        """Return those of some rows."""
        return Lookups(self.ids[rows], self.values[rows], self.entries)

    def _named(self) -> Tensor:
        return self.ids.clamp(max=self.entries - 1)


def merged(ids: Tensor, values: Tensor, entries: int) -> Lookups:
    """Return lookups in which equal ids of a row are added up in float32.

    The shape stays as it is, whatever repeats: the sum stands at the first of the equal tokens. The others get zeros
    and the number of no row, each its own. Work depends on no id.

    Args:
        ids: int64 [m, tokens], each below ``entries``.
        values: float32 [m, tokens, width].
    """
    count, tokens, _ = values.shape
    place = torch.arange(tokens, device=ids.device)
    sums, own = torch.empty_like(values), torch.empty_like(ids)
    # The comparison of all pairs takes memory with the square of the tokens, so only some rows are compared at once.
    step = max(1, 2**22 // tokens**2)
    for start in range(0, count, step):
        some = slice(start, start + step)
        equal = ids[some, :, None] == ids[some, None, :]
        place_of_first = equal.to(torch.uint8).argmax(2)
        first = place_of_first == place
        if _adds_in_turn(ids.device):
            for row, slots in enumerate(place_of_first, start):
                sums[row].zero_().index_add_(0, slots, values[row])
        else:
            torch.bmm((equal & first[:, :, None]).float(), values[some], out=sums[some])
        own[some] = torch.where(first, ids[some], entries + place)
    return Lookups(own, sums, entries)


class LookupPart:
    """A part of a table's rows, such as an embedding: only the rows that a row's tokens name are not zero."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups

    def squares(self) -> Tensor:
        """Return the squared norms of the merged values."""
        return dense_squares(self._lookups.values.flatten(1))

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add the weighted values to their table rows; see :class:`Part`."""
        self._lookups.add_weighted(weights, total.view(self._lookups.entries, -1))

    def rows(self) -> Tensor:
        """Return whole tables, float32 [m, entries * width]."""
        ids, values, entries = self._lookups.ids, self._lookups.values, self._lookups.entries
        table = torch.zeros(len(ids), entries + ids.shape[1], values.shape[2], device=values.device)
        for each, row, value in zip(table, ids, values, strict=True):
            each.index_add_(0, row, value)
        return table[:, :entries].flatten(1)


class RowsPart:
    """A part whose rows are formed one after another, in one buffer, and twice: once measured and once added.

    Guarantee: a finite row that is added has the bits that were measured. Both come from the same function of the same
    values, in the same shapes, strides and alignment. A library for a GPU promises less, so there rows are added here
    and never measured (docs/proofs/006-clipped-gradients.md, section 3).

    Args:
        products: of one order, and of one shape but for the tokens; at least one.
        lookups: table rows added to the products, as of a table that is also an output layer.
    """

    def __init__(self, products: list[Products], lookups: list[Lookups]) -> None:
        self._products, self._lookups = products, lookups
        self._count, self._groups, _, self._height, self._width = products[0].shape
        self._order = products[0].order
        self._device = products[0].left.device

    def squares(self) -> Tensor:
        """Return the squared norms of the rounded rows, from their exact squares.

        Raises:
            RefusedError: ``proof_bound`` on a GPU.
        """
        require_bound(self._device.type == "cpu", "products of a library have equal bits on a CPU")
        squares = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        for piece in self._pieces():
            for row in range(self._count):
                wide = self._formed(piece, row).double()
                squares[row] += torch.dot(wide, wide)
        return squares

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add the weighted rows; see :class:`Part`."""
        sums = SUMS[total.device.type]
        factors = weights.to(sums)
        for piece in self._pieces():
            target = total[piece.start : piece.start + piece.size]
            block = torch.empty(piece.size, dtype=sums, device=total.device)
            for some in _row_blocks(self._count, total.device):
                block.zero_()
                for row in range(some.start, some.stop):
                    # A number that is not finite is of a row of weight zero, and zero times infinity would be NaN.
                    formed = self._formed(piece, row).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                    block.addcmul_(formed.to(sums), factors[row])
                add_block(target, block, self._order)

    def rows(self) -> Tensor:
        """Return all rows, in float32."""
        found = torch.zeros(self._count, self._groups * self._height * self._width, device=self._device)
        for piece in self._pieces():
            for row in range(self._count):
                found[row, piece.start : piece.start + piece.size] = self._formed(piece, row)
        return _canonical(found, self._order).reshape(found.shape)

    def _pieces(self) -> Iterator["_RowPiece"]:
        """Yield the pieces of a row, in order. Each is formed for all rows while it is in a CPU's cache."""
        height = max(1, min(self._height, BLOCK[self._device.type] // self._width))
        spare = max((each.ids.shape[1] for each in self._lookups), default=0)
        buffer = torch.zeros(height + spare, self._width, device=self._device)
        for group in range(self._groups):
            for low in range(0, self._height, height):
                high = min(low + height, self._height)
                start = (group * self._height + low) * self._width
                yield _RowPiece(group, low, high, start, (high - low) * self._width, buffer)

    def _formed(self, piece: "_RowPiece", row: int) -> Tensor:
        """Return a piece of a row, float32 [size]; the memory is reused."""
        formed = piece.buffer[: piece.high - piece.low]
        for index, each in enumerate(self._products):
            left = each.left[row, piece.group, :, piece.low : piece.high].float()
            right = each.right[row, piece.group].float()
            if index == 0:
                torch.mm(left.T, right, out=formed)
            else:
                formed.addmm_(left.T, right)
        for lookup in self._lookups:
            _add_lookups(piece, lookup.ids[row], lookup.values[row])
        return formed.flatten()


@dataclass(frozen=True, slots=True)
class _RowPiece:
    """Some rows of the matrices of one group.

    Attributes:
        low, high: those rows of the matrix.
        start, size: its coordinates.
        buffer: memory for it, float32 [high - low or more, width], and below for the tokens that name none of its rows.
    """

    group: int
    low: int
    high: int
    start: int
    size: int
    buffer: Tensor


def _has_kernels(device: torch.device) -> bool:
    """Return whether a kernel of `raycloak.workers.device` forms rows; a library for a GPU promises them no bits."""
    return device.type == "cuda"


def _row_blocks(count: int, device: torch.device) -> list[slice]:
    """Return the rows of each block that is added before float64 takes over; a GPU adds all rows in float64."""
    size = ROW_BLOCK if SUMS[device.type] == torch.float32 else count
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _canonical(elements: Tensor, order: tuple[int, int]) -> Tensor:
    """Return a view [..., q, p] of elements [..., n * p * q] that stand as [..., n, p, q]."""
    return elements.view(*elements.shape[:-1], -1, *order).mT


def add_block(target: Tensor, block: Tensor, order: tuple[int, int] = (1, 1)) -> None:
    """Add the sums of a block of rows to float64 totals."""
    if order != (1, 1):
        block = _canonical(block, order)
        target = target.view(block.shape)
    if target.device.type == "cpu":
        # NumPy widens float32 as it adds, in half the time that torch takes. The numbers are the same.
        np.add(target.numpy(), block.numpy(), out=target.numpy())
    else:
        target += block


def _terms(products: list[Products], lookups: list[Lookups]) -> int:
    """Return the number of terms at a coordinate: merged lookups of a table are one more, however many there are."""
    return sum(each.shape[2] for each in products) + len(lookups)


def _add_lookups(piece: _RowPiece, ids: Tensor, values: Tensor) -> None:
    """Add values to the rows of a piece that ``ids`` name; those of other rows go to memory of their own below it.

    A select by boolean indexing would have a shape that tells of the ids.
    """
    height = piece.high - piece.low
    here = (ids >= piece.low) & (ids < piece.high)
    places = torch.where(here, ids - piece.low, height + torch.arange(len(ids), device=ids.device))
    piece.buffer.index_add_(0, places, values)


def _adds_in_turn(device: torch.device) -> bool:
    """Return whether equal ids are added one after the other, in order; a GPU sorts them, in a time that tells."""
    return device.type == "cpu"


class GramPart:
    """A part whose rows are measured without being formed, from the Gram matrices of both sides of their products.

    Guarantee: that of :class:`Part`, whatever cancels, underflows or overflows, for up to `MAX_GRAM_TOKENS` tokens and
    sides of up to `MAX_GRAM_WIDTH`. The squares carry a charge for the rounding of both the Gram matrices and the row
    that is added. It grows with the spread, which is the sum of |l||r| over the row's tokens, since that is what the
    errors of a matrix product follow where its terms cancel.

    Args:
        products: of one group, one order, and one shape but for the tokens; at least one.
        lookups: table rows added to the products, as of a table that is also an output layer.
    """

    def __init__(self, products: list[Products], lookups: list[Lookups]) -> None:
        self._products, self._lookups = products, lookups
        self._formed = RowsPart(products, lookups)
        self._height, self._width = products[0].shape[3:]
        self._tokens = sum(each.shape[2] for each in products) + sum(each.ids.shape[1] for each in lookups)
        require_bound(self._tokens <= MAX_GRAM_TOKENS, "a Gram matrix has at most 2^12 tokens")
        require_bound(max(self._height, self._width) <= MAX_GRAM_WIDTH, "sides of a Gram part have length 2^16 at most")

    def squares(self) -> Tensor:
        """Return the squared norms with their charges."""
        count = self._products[0].shape[0]
        step = max(1, _GRAM_BLOCK // self._tokens**2)
        return torch.cat([self._squares(slice(start, start + step)) for start in range(0, count, step)])

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add the weighted rows, products and lookups together; see :class:`Part`.

        Added one after the other, what cancels within a row could still round away other rows' part of the total.
        """
        self._formed.add(weights, total)

    def rows(self) -> Tensor:
        """Return all rows, in float32."""
        return self._formed.rows()

    def _squares(self, rows: slice) -> Tensor:
        left, right = (
            _tokens_of([getattr(each, side)[rows, 0].float() for each in self._products]) for side in ("left", "right")
        )
        left_gram = _gram(left)
        left_norms = _token_norms(left_gram, self._height)
        if self._lookups:
            lookups = [each.of_rows(rows) for each in self._lookups]
            right = _tokens_of([right, *(each.values for each in lookups)])
            left_gram = _with_units(left, left_gram, lookups)
            ones = left_norms.new_ones(len(left), left_gram.shape[1] - left.shape[1])
            left_norms = torch.cat([left_norms, ones], 1)
        right_gram = _gram(right)
        right_norms = _token_norms(right_gram, self._width)
        estimate = left_gram.mul_(right_gram).sum((1, 2))
        terms = _terms(self._products, self._lookups)
        spread = (left_norms * right_norms).sum(1)
        lost = math.sqrt(self._height) * right_norms.sum(1) + math.sqrt(self._width) * left_norms.sum(1)
        # How far a row that float32 forms, in any order, is off its exact gradient.
        off = ROUNDING * terms * spread + UNDERFLOW * (2 * terms * math.sqrt(self._height * self._width) + lost)
        # A float32 dot product of n numbers is off by n rounding units of the product of both norms, and by what it
        # loses below the smallest number.
        rounding = ROUNDING * (min(self._height, _DOT) + min(self._width, _DOT) + 4)
        below = self._height * right_norms.sum(1).square() + self._width * left_norms.sum(1).square() + self._tokens**2
        charge = rounding * spread.square() + 2 * UNDERFLOW * (below + spread * lost)
        squares = ((estimate.clamp(min=0.0) + charge).sqrt() + off).square()
        return torch.where((spread <= _LARGEST_SPREAD) & squares.isfinite(), squares, torch.inf)


def _tokens_of(tokens: list[Tensor]) -> Tensor:
    """Return all tokens of each row, [m, t, n]; of one use as they are, since a copy takes a fifth of a product."""
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens, 1)


def _token_norms(gram: Tensor, width: int) -> Tensor:
    """Return upper bounds of the norms of vectors of length ``width``, float64 [m, t], from Gram matrices [m, t, t]."""
    squares = gram.diagonal(dim1=1, dim2=2) + 4 * UNDERFLOW * width
    return (squares * (1 + ROUNDING * (min(width, _DOT) + 2))).sqrt()


def _gram(side: Tensor) -> Tensor:
    """Return the Gram matrices of float32 [m, t, n], float64 [m, t, t]: float32 for `_DOT` columns, then float64."""
    blocks = torch.split(side, _DOT, 2)
    gram = torch.bmm(blocks[0], blocks[0].mT).double()
    for block in blocks[1:]:
        gram += torch.bmm(block, block.mT)
    return gram


def _with_units(left: Tensor, gram: Tensor, lookups: list[Lookups]) -> Tensor:
    """Return the Gram matrices of ``left`` [m, t, r] followed by the unit vectors of ids; exact in these."""
    crossed = torch.cat([each.columns(left) for each in lookups], 2)
    ids = torch.cat([each.ids for each in lookups], 1)
    equal = (ids[:, :, None] == ids[:, None, :]).to(gram.dtype)
    return torch.cat([torch.cat([gram, crossed], 2), torch.cat([crossed.mT, equal], 2)], 1)


class OutersPart:
    """A part with one product for each row of a unit, such as a linear layer without a sequence: g = Σ l rᵀ.

    No g is formed: products are added up in float64. What they lose there is far below what :class:`GramPart` charges.

    Args:
        products: of one group, at most `MOST_OUTERS` tokens, and sides of up to `MAX_GRAM_WIDTH`; on a CPU.
    """

    def __init__(self, products: Products) -> None:
        require_bound(products.shape[1] == 1 and products.shape[2] <= MOST_OUTERS, "a unit adds at most 64 products")
        self._gram = GramPart([products], [])
        self._left, self._right = products.left[:, 0], products.right[:, 0]

    def squares(self) -> Tensor:
        """Return the squared norms with their charges."""
        return self._gram.squares()

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add the weighted products, those of a block with one product; see :class:`Part`."""
        table = total.view(self._left.shape[2], self._right.shape[2])
        height = max(1, BLOCK[total.device.type] // self._right.shape[2])
        for some in _row_blocks(len(weights), total.device):
            # Exact, and nothing underflows.
            left = finite(self._left[some].double()).mul_(weights[some, None, None]).flatten(0, 1)
            right = finite(self._right[some].double()).flatten(0, 1)
            for columns, target in zip(torch.split(left, height, 1), torch.split(table, height), strict=True):
                add_block(target, torch.mm(columns.T, right))

    def rows(self) -> Tensor:
        """Return the sums of products, rounded to float32."""
        return self._gram.rows()


class AbsentPart:
    """The part of a parameter that the forward pass did not use."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self._count, self._size, self._device = count, size, device

    def squares(self) -> Tensor:
        """Return zeros."""
        return torch.zeros(self._count, dtype=torch.float64, device=self._device)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add nothing."""

    def rows(self) -> Tensor:
        """Return zeros."""
        return torch.zeros(self._count, self._size, device=self._device)


def finite(values: Tensor) -> Tensor:
    """Return a copy with zeros for values that are not finite: only rows of weight zero have such values.

    Zero times infinity would be NaN. All others times their weight are within the clip, so no sum overflows.
    """
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def dense_squares(rows: Tensor) -> Tensor:
    """Return the squared norm of each row of float32 [m, size], float64 [m].

    Squares of float32 numbers are exact in float64 and cannot overflow or underflow there.
    """
    blocks = torch.split(rows, max(1, _SQUARED[rows.device.type] // len(rows)), 1)
    # In one pass for a root that is squared again: to square wide numbers and to add them takes twice as long.
    norms: list[Tensor] = [torch.linalg.vector_norm(block, dim=1, dtype=torch.float64) for block in blocks]
    return reduce(Tensor.add_, map(Tensor.square_, norms))


def rounded_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 numbers, none of them negative, each rounded towards zero to one of ``dtype``."""
    narrow = values.to(dtype)
    return torch.where(narrow.double() > values, torch.nextafter(narrow, torch.zeros_like(narrow)), narrow)


@dataclass(frozen=True, slots=True)
class LookupUse:
    """A use as a table: ``values`` [m, tokens, width] at ``ids`` [m, tokens], of which some may be equal."""

    ids: Tensor
    values: Tensor


Use = Tensor | Products | LookupUse
"""A use of a parameter: the gradient of each row, float32 [m, *shape], a matrix product, or a table."""


def settled(use: Use) -> Use:
    """Return a product as its rows where these take no more memory than its two sides; any other use as it is.

    A checkpointed model saves memory by it: the sides of a product live no longer than the layer's backward pass.
    """
    if isinstance(use, Products) and use.shape[1:3] != (1, 1) and use.rows_are_smaller:
        return use.all_rows()
    return use


def part_of(uses: list[Use], count: int, shape: tuple[int, ...], device: torch.device, rows_per_unit: int = 1) -> Part:
    """Return the part of a parameter of this shape from all its uses by ``count`` rows, or units of so many rows.

    Guarantee: the form is a function of shapes and types, so two computations of one shape take the same path,
    whatever they hold.
    """
    size = torch.Size(shape).numel()
    if not uses:
        return AbsentPart(count, size, device)
    products = [use for use in uses if isinstance(use, Products)]
    tables = [use for use in uses if isinstance(use, LookupUse)]
    has_rows = len(products) + len(tables) < len(uses)
    if not has_rows and not products:
        return LookupPart(joined(tables, shape[0]))
    if len(uses) == len(products) == 1 and products[0].shape[1:3] == (1, 1):
        left, right = (side.reshape(count, -1) for side in (products[0].left, products[0].right))
        return OuterPart(left, right)
    if len(uses) == len(products) == 1 and count * size > _SIDE_BY_SIDE and _are_outers(products[0], rows_per_unit):
        return OutersPart(products[0])
    if len(uses) == len(products) == 1 and count * size <= _SMALL:
        return DensePart(products[0].unordered_rows(), products[0].order)
    unlike = len({(each.shape[1], each.order) for each in products}) > 1
    if has_rows or unlike or count * size <= _SMALL or all(each.rows_are_smaller for each in products):
        return DensePart(dense_rows(uses, count, shape))
    lookups = [joined(tables, shape[0])] if tables else []
    return GramPart(products, lookups) if _gram_pays(products, lookups) else rows_part(products, lookups)


def rows_part(products: list[Products], lookups: list[Lookups]) -> Part:
    """Return the part whose rows are formed to be measured and again to be added, for the device of the products.

    Args as :class:`RowsPart`.

    Raises:
        ConfigError: ``no_triton`` for a GPU without Triton.
        ProtocolError: ``not_reproducible`` if a GPU forms other rows than a CPU.
    """
    if not _has_kernels(products[0].left.device):
        return RowsPart(products, lookups)
    take_triton()
    # Imported here: it needs Triton.
    from raycloak.workers.device.rows import FusedRows

    sides = ([getattr(each, side) for each in products] for side in ("left", "right"))
    left, right = (each[0] if len(each) == 1 else torch.cat(each, 2) for each in sides)
    if (order := products[0].order) != (1, 1):
        right = _canonical(right, order).reshape(right.shape)
    tied = (lookups[0].ids, lookups[0].values) if lookups else None
    return FusedRows.proven(left, right, tied)


def dense_rows(uses: list[Use], count: int, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of each row, float32 [m, size]; uses, at least one, are added in their order."""

    def rows(use: Use) -> Tensor:
        match use:
            case Tensor():
                return use.reshape(count, -1)
            case Products():
                return use.all_rows()
            case LookupUse(ids, values):
                return LookupPart(merged(ids, values, shape[0])).rows()

    return reduce(torch.add, map(rows, uses))


def _gram_pays(products: list[Products], lookups: list[Lookups]) -> bool:
    """Return whether Gram matrices are proved and cost less than forming the rows once more; by shapes and types."""
    _, groups, _, height, width = products[0].shape
    tokens = sum(each.shape[2] for each in products)
    every = tokens + sum(each.ids.shape[1] for each in lookups)
    proved = groups == 1 and every <= MAX_GRAM_TOKENS and max(height, width) <= MAX_GRAM_WIDTH
    # A GPU forms such rows on its tensor cores, which have no rounding model that a Gram matrix could be charged for.
    narrow = any(each.dtype == torch.bfloat16 for both in products for each in (both.left, both.right))
    if narrow and _has_kernels(products[0].left.device):
        return False
    return proved and tokens**2 * height + every**2 * width <= tokens * height * width


def _are_outers(use: Products, rows_per_unit: int) -> bool:
    """Return whether each of a unit's several rows has one token, and the unit a Gram matrix; by shapes and types."""
    few = 1 < use.shape[2] == rows_per_unit <= MOST_OUTERS
    return few and _gram_pays([use], []) and not _has_kernels(use.left.device)


def joined(uses: list[LookupUse], entries: int) -> Lookups:
    """Return all lookups of a table of so many ``entries``, merged."""
    return merged(torch.cat([use.ids for use in uses], 1), torch.cat([use.values for use in uses], 1), entries)
