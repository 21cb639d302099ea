"""docs/proofs/006-clipped-gradients.md in exact rationals: no row moves the total by more than C, whatever it holds.

Every row of every case is removed in turn. Each constant that the proof needs is broken once, and the bound fails.
"""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from raycloak.metrics.errors import RefusedError
from raycloak.workers.gradients import clipping
from raycloak.workers.gradients import parts as parts_module
from raycloak.workers.gradients.clipping import ClippedSum
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.parts import (
    MAX_GRAM_TOKENS,
    ROW_BLOCK,
    DensePart,
    GramPart,
    LookupPart,
    Lookups,
    LookupUse,
    OuterPart,
    Part,
    Products,
    RowsPart,
    Use,
    merged,
)
from raycloak.workers.gradients.vocabulary_loss import HeadPart

ROWS, TOKENS, HEIGHT, WIDTH = 5, 12, 4, 3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


def cancelling(draw: torch.Generator, scale: float, left: Tensor, right: Tensor) -> None:
    """Make each odd token take the one before it away, up to one last bit; what is left has size one."""
    left[:, 0, ::2] *= scale
    left[:, 0, 1::2] = -left[:, 0, ::2]
    right[:, 0, 1::2] = right[:, 0, ::2]
    right[:, 0, 1, 0] = torch.nextafter(right[:, 0, 0, 0], torch.tensor(torch.inf))
    left[:, 0, -1], right[:, 0, -1] = torch.randn(2, generator=draw)[0], torch.randn(WIDTH, generator=draw)
    left[:, 0, -2] = 0


def sides(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Left [m, 1, tokens, height] and right [m, 1, tokens, width] of one hostile kind; the last rows are ordinary."""
    draw = torch.Generator().manual_seed(seed)
    left = torch.randn(ROWS, 1, TOKENS, HEIGHT, generator=draw)
    right = torch.randn(ROWS, 1, TOKENS, WIDTH, generator=draw)
    match kind:
        case "2^30 that cancels":
            cancelling(draw, 2.0**30, left, right)
        case "2^60 that cancels":
            cancelling(draw, 2.0**60, left, right)
        case "huge":
            left[:2] *= 2.0**70
            right[:2] *= 2.0**70
        case "near overflow":
            left[:2] *= 2.0**63
            right[:2] *= 2.0**60
        case "small times large":
            left[:3] *= 2.0**-77
            right[:3] *= 2.0**62
        case "underflow":
            left[:3] *= 2.0**-80
            right[:3] *= 2.0**-60
        case "infinite":
            left[1, 0, 2, 0] = torch.inf
            right[2, 0, 1, 1] = -torch.inf
        case "not a number":
            left[1, 0, 2, 0] = torch.nan
            right[2] = torch.nan
        case "aligned":
            left[:], right[:] = left[:1, :, :1], right[:1, :, :1]
    return left.contiguous(), right.contiguous()


KINDS = (
    "ordinary", "2^30 that cancels", "2^60 that cancels", "huge", "near overflow", "small times large", "underflow",
    "infinite", "not a number", "aligned",
)  # fmt: skip


def ids_of(seed: int) -> Tensor:
    """Ids of the tokens: row 0 has one id alone, the others repeat some."""
    ids = torch.randint(HEIGHT, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
    ids[0] = 1
    return ids


def tied_lookups(right: Tensor, seed: int) -> list[Lookups]:
    """Half of the tokens' gradients once more, with the other sign, as those of a table that is an output, too."""
    return [merged(ids_of(seed)[:, ::2], -right[:, 0, ::2], HEIGHT)]


class GivenSides:
    """Sides in the place of a head that computes them, in pieces of five tokens."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self._left, self.hidden = left[:, 0], right[:, 0]

    def pieces(self, row: int) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, TOKENS, 5):
            some = slice(start, min(start + 5, TOKENS))
            yield some, self._left[row, some]


def head_part(left: Tensor, right: Tensor, others: list[Use]) -> HeadPart:
    return HeadPart(GivenSides(left, right), others, (HEIGHT, WIDTH))


PARTS: dict[str, Callable[[Tensor, Tensor, int], Part]] = {
    "dense": lambda left, right, seed: DensePart(Products(left, right).all_rows()),
    "outer": lambda left, right, seed: OuterPart(left[:, 0, 0], right[:, 0, 0]),
    "rows": lambda left, right, seed: RowsPart([Products(left, right)], []),
    "rows, tied": lambda left, right, seed: RowsPart([Products(left, right)], tied_lookups(right, seed)),
    "rows, used twice": lambda left, right, seed: RowsPart([Products(left, right), Products(-left, right)], []),
    "gram": lambda left, right, seed: GramPart([Products(left, right)], []),
    "gram, tied": lambda left, right, seed: GramPart([Products(left, right)], tied_lookups(right, seed)),
    "gram, used twice": lambda left, right, seed: GramPart([Products(left, right), Products(-left, right)], []),
    "head": lambda left, right, seed: head_part(left, right, []),
    "head, tied": lambda left, right, seed: head_part(left, right, [LookupUse(ids_of(seed), -right[:, 0])]),
    "lookup": lambda left, right, seed: LookupPart(merged(ids_of(seed), right[:, 0], HEIGHT)),
}


def total_of(
    parts: list[Part], sizes: list[int], clip: float, valid: Tensor, normalised: bool = False
) -> list[Fraction]:
    total = ClippedSum(sizes, clip, CPU, normalised)
    # The second half is another micro-batch.
    total.add(parts, valid)
    total.add(parts, torch.ones(ROWS, dtype=torch.bool))
    return [Fraction(float(each)) for each in torch.cat(total.pieces()).numpy()]


def largest_move(parts: list[Part], clip: float, normalised: bool = False) -> Fraction:
    """Return the square of the largest change of the total by one row, in units of C², exactly."""
    sizes = [part.rows().shape[1] for part in parts]
    everyone = torch.ones(ROWS, dtype=torch.bool)
    whole = total_of(parts, sizes, clip, everyone, normalised)
    largest = Fraction(0)
    for row in range(ROWS):
        absent = everyone.clone()
        absent[row] = False
        without = total_of(parts, sizes, clip, absent, normalised)
        largest = max(largest, sum(((a - b) ** 2 for a, b in zip(whole, without, strict=True)), Fraction(0)))
    return largest / Fraction(clip) ** 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", PARTS)
def test_no_row_moves_the_total_by_more_than_c(form: str, kind: str) -> None:
    for seed in range(2):
        left, right = sides(kind, seed)
        for clip in (1.0, 2.0**-14, 3.7e-9, 2.0**40):
            assert largest_move([PARTS[form](left, right, seed)], clip) <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", PARTS)
def test_no_normalised_row_moves_the_total_by_more_than_c(form: str, kind: str) -> None:
    left, right = sides(kind, 0)
    for clip in (1.0, 2.0**-100, 3.7e-9, 2.0**100):
        assert largest_move([PARTS[form](left, right, 0)], clip, normalised=True) <= 1


def test_a_normalised_row_of_sides_far_apart_does_not_overflow() -> None:
    """A side times a weight above 1 would be infinite, though the row is short."""
    part = OuterPart(torch.full((1, 1), 2.0**-100), torch.full((1, 1), 2.0**100))
    total = ClippedSum([1], 2.0**100, CPU, normalised=True)
    total.add([part], torch.ones(1, dtype=torch.bool))
    assert total.pieces()[0].item() == pytest.approx(2.0**100 / (1 + clipping.STABILITY), rel=1e-3)


def test_normalised_rows_are_all_near_the_bound() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, -0.4], [0.0, 0.0]])
    total = ClippedSum([2], 2.0, CPU, normalised=True)
    total.add([DensePart(rows)], torch.tensor([True, True, True]))
    weights = [2.0 / (norm + clipping.STABILITY) for norm in (5.0, 0.5, 0.0)]
    expected = [
        sum(weight * row[place] for weight, row in zip(weights, rows.tolist(), strict=True)) for place in (0, 1)
    ]
    # Less what the target leaves below C; and asked for again, nothing is scaled twice.
    for _ in range(2):
        assert total.pieces()[0].tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_one_model_are_clipped_together(kind: str) -> None:
    left, right = sides(kind, 7)
    # A model has one head. Two parts are dense, which are measured and added side by side.
    parts = [make(left, right, 7) for form, make in PARTS.items() if form != "head"] + [DensePart(right[:, 0])]
    for clip in (0.5, 2.0**-14):
        assert largest_move(parts, clip) <= 1


def exact_square(part: Part, row: int) -> Fraction:
    """The squared norm of what a part adds of one row, in exact arithmetic on the float64 numbers that it adds."""
    total = torch.zeros(part.rows().shape[1], dtype=torch.float64)
    weights = torch.zeros(ROWS, dtype=torch.float64)
    # The engine's weights bring a row within its target, which is far from overflow.
    weights[row] = weight = 1.0 if part.squares()[row] < 2.0**120 else 2.0**-100
    part.add(weights, total)
    return sum(((Fraction(float(each)) / Fraction(weight)) ** 2 for each in total), Fraction(0))


def allowed(square: float, size: int = HEIGHT * WIDTH) -> Fraction:
    """The largest exact square of a row that is added alone, as its block has the errors of one row."""
    rounding = Fraction(ROW_BLOCK + 2, 2**24 - ROW_BLOCK - 2)
    root = Fraction(math.nextafter(math.sqrt(square), math.inf))
    return (root * (1 + Fraction(2) ** -19) * (1 + rounding) + Fraction(2) ** -148 * math.isqrt(4 * size)) ** 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", PARTS)
def test_a_parts_squares_bound_what_it_adds(form: str, kind: str) -> None:
    for seed in range(5):
        part = PARTS[form](*sides(kind, seed), seed)
        for row, square in enumerate(part.squares().tolist()):
            if math.isfinite(square):
                assert exact_square(part, row) <= allowed(square)


@pytest.mark.parametrize("form", PARTS)
def test_a_row_of_weight_zero_adds_exactly_zero(form: str) -> None:
    for kind in ("infinite", "not a number"):
        part = PARTS[form](*sides(kind, 1), 1)
        size = part.rows().shape[1]
        total = torch.zeros(size, dtype=torch.float64)
        part.add(torch.zeros(ROWS, dtype=torch.float64), total)
        assert not total.any()


def test_the_rows_that_are_measured_are_those_that_are_added() -> None:
    """Bit for bit, also next to rows that are dropped."""
    for seed in range(5):
        left, right = sides("ordinary", seed)
        part = RowsPart([Products(left, right)], tied_lookups(right, seed))
        measured = part.rows()
        for row in range(ROWS):
            weights = torch.zeros(ROWS, dtype=torch.float64)
            weights[row] = 1
            total = torch.zeros(measured.shape[1], dtype=torch.float64)
            part.add(weights, total)
            assert torch.equal(total.float(), measured[row])


def test_equal_tokens_of_a_row_are_added_up_before_they_are_measured() -> None:
    ids = torch.tensor([[3, 3, 1, 3]])
    values = torch.tensor([[[1.0], [2.0], [5.0], [4.0]]])
    found = merged(ids, values, 6)
    assert found.values.flatten().tolist() == [7, 0, 5, 0]
    assert found.ids.tolist() == [[3, 7, 1, 9]], "each repeated one has the number of no row"
    part = LookupPart(found)
    assert part.squares().tolist() == [49 + 25]
    assert part.rows().tolist() == [[0, 5, 0, 7, 0, 0]]


@pytest.mark.parametrize("form", ["lookup", "rows, tied", "gram, tied"])
def test_no_id_is_added_to_twice_by_one_operation_whose_time_would_tell(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose kernel adds equal ids one after the other; the numbers are those of a CPU."""
    left, right = sides("ordinary", 1)
    weights = torch.linspace(0.0, 1.0, ROWS, dtype=torch.float64)

    def total() -> Tensor:
        part = PARTS[form](left, right, 1)
        added = torch.zeros(part.rows().shape[1], dtype=torch.float64)
        part.add(weights, added)
        return added

    expected, seen, add = total(), [], Tensor.index_add_

    def watched(own: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        seen.append(index)
        return add(own, dim, index, source)

    monkeypatch.setattr(Tensor, "index_add_", watched)
    monkeypatch.setattr(parts_module, "_adds_in_turn", lambda device: False)
    # Some tokens are of another piece.
    monkeypatch.setitem(parts_module.BLOCK, "cpu", 2 * WIDTH)
    torch.testing.assert_close(total(), expected, rtol=1e-6, atol=1e-6)
    assert seen
    assert all(len(index.unique()) == len(index) for index in seen)


# --- each constant is needed


def moves(form: str) -> Fraction:
    """Return the largest move over all kinds at clips where charges decide."""
    found = Fraction(0)
    for kind in KINDS:
        for seed in range(3):
            left, right = sides(kind, seed)
            for clip in (1.0, 2.0**-14, 2.0**40):
                found = max(found, largest_move([PARTS[form](left, right, seed)], clip))
    return found


@pytest.mark.parametrize("constant", ["ROUNDING", "UNDERFLOW"], ids=["the rounding", "the underflow"])
def test_without_a_charge_the_bound_fails(monkeypatch: pytest.MonkeyPatch, constant: str) -> None:
    monkeypatch.setattr(parts_module, constant, 0.0)
    assert moves("gram") > 1


def test_without_merging_equal_tokens_the_bound_fails() -> None:
    _, right = sides("aligned", 0)
    part = LookupPart(Lookups(ids_of(0), right[:, 0], HEIGHT))
    assert largest_move([part], 2.0**-14) > 1


def test_without_the_cap_on_the_spread_a_row_that_overflows_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each token is finite in float32, also its square; only their sum is not.
    left = torch.full((ROWS, 1, TOKENS, HEIGHT), 2.0**62.5)
    part = GramPart([Products(left, left[..., :WIDTH])], [])
    assert not part.squares().isfinite().any()
    assert not part.rows().isfinite().any()
    monkeypatch.setattr(parts_module, "_LARGEST_SPREAD", 2.0**500)
    assert part.squares().isfinite().all()


def test_without_the_charge_for_the_added_row_a_sum_that_rounds_one_way_exceeds_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Increments just above half a unit of a running sum count double, so more is added than the exact gradient."""
    tokens = MAX_GRAM_TOKENS
    left = torch.ones(ROWS, 1, tokens, 1)
    right = torch.full((ROWS, 1, tokens, 1), 2.0**6 * 1.01)
    right[:, :, 0] = 2.0**30
    right[:, :, -2] = 2.0**24
    right[:, :, -1] = -(2.0**30)
    part = GramPart([Products(left, right)], [])
    added = exact_square(part, 0)
    assert added <= allowed(part.squares()[0].item(), 1)
    monkeypatch.setattr(parts_module, "_terms", lambda products, lookups: 0)
    assert added > allowed(part.squares()[0].item(), 1)


def test_without_the_charge_for_its_gram_matrices_a_row_whose_tokens_almost_cancel_exceeds_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left of two tokens is below the rounding of their Gram matrices, and far above that of the added row."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(ROWS, 1, 1, 256, generator=generator) for _ in range(2))
    part = GramPart([Products(torch.cat([left, -left * (1 + 2.0**-13)], 2), torch.cat([right, right], 2))], [])

    def exceed() -> bool:
        squares = part.squares()
        return any(exact_square(part, row) > allowed(squares[row].item(), 1) for row in range(ROWS))

    assert not exceed()
    monkeypatch.setattr(parts_module, "ROUNDING", 0.0)
    assert exceed()


def test_the_charge_of_many_tokens_that_cancel_is_small() -> None:
    """With 1,024 tokens and a spread of 12 times the norm, 0.07 % for the row and 0.22 % for the wide side."""
    left, right = torch.ones(1, 1, 1024, 512), torch.ones(1, 1, 1024, 512)
    left[:, :, : (1024 - 85) // 2] = -1.0
    part = GramPart([Products(left, right)], [])
    exact = part.rows().double().square().sum()
    spread = 1024 / (1024 - 2 * ((1024 - 85) // 2))
    assert 11.5 < spread < 12.5
    assert exact < part.squares().item() < exact * (1 + 2 * 0.0035)


def in_turned_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products add their tokens one after the other, each time in another order."""
    calls: list[int] = []

    def added(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        calls.append(0)
        order = torch.randperm(len(right), generator=torch.Generator().manual_seed(len(calls)))
        for token in order.tolist():
            out += left[:, token : token + 1] * right[token : token + 1]
        return out

    monkeypatch.setattr(torch, "mm", lambda left, right, out: added(left, right, out.zero_()))
    monkeypatch.setattr(Tensor, "addmm_", lambda own, left, right: added(left, right, own))


@pytest.mark.parametrize("form", ["gram", "gram, tied"])
def test_a_row_that_is_measured_by_gram_matrices_may_be_added_in_any_order(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turned_order(monkeypatch)
    for kind in KINDS:
        for seed in range(3):
            part = PARTS[form](*sides(kind, seed), seed)
            for row, square in enumerate(part.squares().tolist()):
                assert not math.isfinite(square) or exact_square(part, row) <= allowed(square)


def test_a_library_measures_no_rows_on_a_gpu() -> None:
    """Nobody promises that it multiplies twice alike there."""
    left, right = (torch.zeros(2, 1, 5, size, device="meta") for size in (HEIGHT, WIDTH))
    with pytest.raises(RefusedError, match="proof_bound"):
        RowsPart([Products(left, right)], []).squares()


def test_narrow_sides_on_a_gpu_are_measured_by_no_gram_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of a GPU's memory.
    monkeypatch.setattr(parts_module, "_has_kernels", lambda device: device.type == "meta")
    for device, kind, pays in (
        ("cpu", torch.bfloat16, True),
        ("meta", torch.bfloat16, False),
        ("meta", torch.float32, True),
    ):
        wide = torch.zeros(2, 1, 5, 100, device=device)
        assert parts_module._gram_pays([Products(wide.to(kind), wide)], []) == pays


def test_numbers_that_only_one_of_two_products_reads_as_zero_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is measured with its smallest numbers read as zero, and added with them."""

    def flushed(values: Tensor) -> Tensor:
        return torch.where(values.abs() < 2.0**-126, 0.0, values)

    bmm = torch.bmm
    left, right = torch.full((ROWS, 1, 4, HEIGHT), 2.0**60), torch.full((ROWS, 1, 4, WIDTH), 2.0**-130)
    with monkeypatch.context() as flushing:
        flushing.setattr(torch, "bmm", lambda a, b: flushed(bmm(flushed(a), flushed(b))))
        square = GramPart([Products(left, right)], []).squares()[0].item()
    assert 0 < exact_square(GramPart([Products(left, right)], []), 0) <= allowed(square)


def test_blocks_of_a_wide_side_are_added_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide side is charged as one block, so no block may be rounded away beside another."""
    for constant in ("ROUNDING", "UNDERFLOW"):
        monkeypatch.setattr(parts_module, constant, 0.0)
    left = torch.zeros(1, 1, 1, 600)
    left[..., 0] = 2.0**12
    left[..., 512] = 1.0
    for wide, narrow in ((left, torch.ones(1, 1, 1, 2)), (torch.ones(1, 1, 1, 2), left)):
        # Its square is the product of |wide|² = 2^24 + 1, which float32 does not hold, and |narrow|² = 2.
        square = GramPart([Products(wide, narrow)], []).squares().item()
        assert square == pytest.approx(2 * (2.0**24 + 1), rel=1e-15, abs=0)


# --- blocks of rows


def rows_of(values: Tensor) -> RowsPart:
    """Gradients of one number, added one after the other."""
    return RowsPart([Products(values.view(-1, 1, 1, 1), torch.ones(len(values), 1, 1, 1))], [])


def blocks_of(form: str, left: Tensor, right: Tensor) -> Part:
    count = len(left)
    match form:
        case "dense":
            return DensePart(Products(left, right).all_rows())
        case "outer":
            return OuterPart(left[:, 0, 0], right[:, 0, 0])
        case "rows":
            return RowsPart([Products(left, right)], [])
        case "gram":
            return GramPart([Products(left, right)], [])
        case _:
            ids = torch.arange(TOKENS).expand(count, -1)
            return LookupPart(merged(ids, right[:, 0], TOKENS))


@pytest.mark.parametrize("form", ["dense", "outer", "rows", "gram", "lookup"])
def test_what_a_block_of_rows_adds_depends_on_these_rows_alone(form: str) -> None:
    draw = torch.Generator().manual_seed(4)
    count = 2 * ROW_BLOCK + 7
    left, right = torch.randn(count, 1, TOKENS, 9, generator=draw), torch.randn(count, 1, TOKENS, 5, generator=draw)
    weights = torch.rand(count, generator=draw).double()
    size = blocks_of(form, left, right).rows().shape[1]
    for start in range(0, count, ROW_BLOCK):
        own = slice(start, start + ROW_BLOCK)
        totals = []
        for others in (0.0, 2.0**60, math.inf):
            changed = torch.zeros_like(left) + others, torch.zeros_like(right) + others
            changed[0][own], changed[1][own] = left[own], right[own]
            counted = torch.zeros_like(weights)
            counted[own] = weights[own]
            total = torch.zeros(size, dtype=torch.float64)
            blocks_of(form, *changed).add(counted, total)
            totals.append(total)
        alone = torch.zeros(size, dtype=torch.float64)
        blocks_of(form, left[own], right[own]).add(weights[own], alone)
        assert torch.equal(totals[0], totals[1])
        assert torch.equal(totals[0], totals[2])
        assert torch.equal(totals[0], alone)


@pytest.mark.parametrize("form", ["dense", "outer", "rows", "gram"])
def test_no_block_has_more_rows_than_the_clip_pays_for(form: str) -> None:
    """In float32 the last of these numbers would vanish beside the others."""
    left = torch.zeros(ROW_BLOCK + 1, 1, 1, 1)
    left[:-1], left[-1] = 1.0, 2.0**-20
    part = blocks_of(form, left, torch.ones_like(left))
    total = torch.zeros(1, dtype=torch.float64)
    part.add(torch.ones(ROW_BLOCK + 1, dtype=torch.float64), total)
    assert total.item() == ROW_BLOCK + 2.0**-20


def test_the_clip_pays_for_what_a_row_changes_in_the_roundings_of_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row takes the sum of its block into the next binade, where each later number is rounded up."""
    values = torch.full((ROW_BLOCK,), 1.25 * 2.0**-19)
    values[:32] = 1.0
    everyone = torch.ones(ROW_BLOCK, dtype=torch.bool)
    without = everyone.clone()
    without[31] = False

    def move(margin: float) -> float:
        """Return what the row changes, in units of a clip whose target is 1."""
        monkeypatch.setattr(clipping, "BLOCK_MARGIN", margin)
        # Above the target, so that no row is scaled.
        clip = (1 + 2.0**-40) * (1 + margin) / (1 - clipping.CLIP_MARGIN)
        totals = []
        for valid in (everyone, without):
            total = ClippedSum([1], clip, CPU)
            total.add([rows_of(values)], valid)
            totals.append(float(torch.cat(total.pieces()).numpy()[0]))
        return (totals[0] - totals[1]) / clip

    right = clipping.BLOCK_MARGIN
    assert move(right) <= 1
    # Rounding alone, without that of the other rows.
    assert move(right / (2 * ROW_BLOCK + 1)) > 1
    assert move(0.0) > 1


@pytest.mark.parametrize("form", ["dense", "outer", "rows", "gram"])
@pytest.mark.parametrize("kind", ["ordinary", "2^60 that cancels", "small times large", "underflow", "infinite"])
def test_no_row_of_whole_blocks_at_the_bound_moves_the_total_by_more_than_c(form: str, kind: str) -> None:
    """All others are at the bound, and as large as they can be in each coordinate that they share."""
    left, right = sides(kind, 2)
    others = torch.ones(ROW_BLOCK - 1, 1, TOKENS, HEIGHT), torch.ones(ROW_BLOCK - 1, 1, TOKENS, WIDTH)
    for clip in (1.0, 2.0**-40, 2.0**-100, 2.0**100):
        for row in range(ROWS):
            whole = torch.cat([others[0], left[row : row + 1]]), torch.cat([others[1], right[row : row + 1]])
            part = blocks_of(form, *whole)
            everyone = torch.ones(ROW_BLOCK, dtype=torch.bool)
            without = everyone.clone()
            without[-1] = False
            totals = []
            for valid in (everyone, without):
                total = ClippedSum([HEIGHT * WIDTH], clip, CPU)
                total.add([part], valid)
                totals.append([Fraction(float(each)) for each in torch.cat(total.pieces()).numpy()])
            assert sum((a - b) ** 2 for a, b in zip(*totals, strict=True)) <= Fraction(clip) ** 2


def test_a_small_side_beside_a_large_one_is_not_rounded_up_with_its_weight() -> None:
    """A weighted side that underflows would be a third larger than it is."""
    left, right = torch.full((1, 1), 1.5 * 2.0**-100), torch.full((1, 1), 2.0**100)
    part = OuterPart(left, right)
    total = torch.zeros(1, dtype=torch.float64)
    part.add(torch.tensor([2.0**-50], dtype=torch.float64), total)
    assert total.item() == 1.5 * 2.0**-50


def test_a_weight_that_underflows_beside_a_small_side_is_not_rounded_up() -> None:
    """Weight and side together are three quarters of the smallest number, and would be rounded to all of it."""
    part = OuterPart(torch.full((1, 1), 2.0**120), torch.full((1, 1), 1.5 * 2.0**-140))
    total = torch.zeros(1, dtype=torch.float64)
    part.add(torch.tensor([2.0**-10], dtype=torch.float64), total)
    assert total.item() <= 2.0**-10 * 1.5 * 2.0**-20


def test_weights_are_rounded_towards_zero() -> None:
    clip = 1.0
    rows = torch.linspace(1.0, 3.0, 50)[:, None]
    total = ClippedSum([1], clip, CPU)
    target = clip * (1 - clipping.CLIP_MARGIN) / (1 + clipping.BLOCK_MARGIN)
    weights = total._weights(DensePart(rows).squares(), torch.ones(50, dtype=torch.bool))
    assert torch.equal(weights.float().double(), weights)
    assert bool((weights * rows[:, 0].double() <= target * (1 + 2.0**-50)).all())


@pytest.mark.parametrize("form", [GramPart, RowsPart])
def test_what_cancels_within_a_row_leaves_no_trace_in_the_total(form: type[GramPart] | type[RowsPart]) -> None:
    """The tokens of an output layer and of its tied table are one number before they meet other rows' sum."""
    huge = 2.0**60
    products = Products(torch.tensor([huge, 0.0]).view(1, 1, 1, 2), torch.ones(1, 1, 1, 1))
    part = form([products], [merged(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1, 1), -huge), 2)])
    total = torch.full((2,), 1 / 3, dtype=torch.float64)
    part.add(torch.ones(1, dtype=torch.float64), total)
    assert total.tolist() == [1 / 3, 1 / 3]


def test_neighbouring_clips_change_nothing_about_the_bound() -> None:
    left, right = sides("2^30 that cancels", 0)
    for low, high in pairwise((2.0**-100, 2.0**-63, 2.0**-30, 1.0, 2.0**100)):
        for clip in (low, high):
            assert largest_move([GramPart([Products(left, right)], [])], clip) <= 1
