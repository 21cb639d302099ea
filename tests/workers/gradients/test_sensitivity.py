"""docs/proofs/006-clipped-gradients.md in exact rationals: no row moves the total by more than C, whatever it holds.

Every row of every case is removed in turn. Each constant that the proof needs is broken once, and the bound fails.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from raycloak.workers.gradients import parts as parts_module
from raycloak.workers.gradients.clipping import ClippedSum
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.parts import (
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
    return [merged(ids_of(seed)[:, ::2], -right[:, 0, ::2])]


PARTS: dict[str, Callable[[Tensor, Tensor, int], Part]] = {
    "dense": lambda left, right, seed: DensePart(Products(left, right).all_rows()),
    "outer": lambda left, right, seed: OuterPart(left[:, 0, 0], right[:, 0, 0]),
    "rows": lambda left, right, seed: RowsPart([Products(left, right)], []),
    "rows, tied": lambda left, right, seed: RowsPart([Products(left, right)], tied_lookups(right, seed)),
    "rows, used twice": lambda left, right, seed: RowsPart([Products(left, right), Products(-left, right)], []),
    "gram": lambda left, right, seed: GramPart([Products(left, right)], []),
    "gram, tied": lambda left, right, seed: GramPart([Products(left, right)], tied_lookups(right, seed)),
    "gram, used twice": lambda left, right, seed: GramPart([Products(left, right), Products(-left, right)], []),
    "lookup": lambda left, right, seed: LookupPart(merged(ids_of(seed), right[:, 0]), HEIGHT),
}


def total_of(parts: list[Part], sizes: list[int], clip: float, valid: Tensor) -> list[Fraction]:
    total = ClippedSum(sizes, clip, CPU)
    # The second half is another micro-batch.
    total.add(parts, valid)
    total.add(parts, torch.ones(ROWS, dtype=torch.bool))
    return [Fraction(float(each)) for each in total.total()]


def largest_move(parts: list[Part], clip: float) -> Fraction:
    """Return the square of the largest change of the total by one row, in units of C², exactly."""
    sizes = [part.rows().shape[1] for part in parts]
    everyone = torch.ones(ROWS, dtype=torch.bool)
    whole = total_of(parts, sizes, clip, everyone)
    largest = Fraction(0)
    for row in range(ROWS):
        absent = everyone.clone()
        absent[row] = False
        without = total_of(parts, sizes, clip, absent)
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
def test_parts_of_one_model_are_clipped_together(kind: str) -> None:
    left, right = sides(kind, 7)
    parts = [make(left, right, 7) for make in PARTS.values()]
    for clip in (0.5, 2.0**-14):
        assert largest_move(parts, clip) <= 1


def exact_square(part: Part, row: int) -> Fraction:
    """The squared norm of what a part adds of one row, in exact arithmetic on the float64 numbers that it adds."""
    total = torch.zeros(part.rows().shape[1], dtype=torch.float64)
    weights = torch.zeros(ROWS, dtype=torch.float64)
    weights[row] = 1
    part.add(weights, total)
    return sum((Fraction(float(each)) ** 2 for each in total), Fraction(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", PARTS)
def test_a_parts_squares_bound_what_it_adds(form: str, kind: str) -> None:
    for seed in range(5):
        part = PARTS[form](*sides(kind, seed), seed)
        for row, square in enumerate(part.squares().tolist()):
            if torch.isfinite(torch.tensor(square)):
                assert exact_square(part, row) <= Fraction(square) * (1 + Fraction(2) ** -18) * (1 + Fraction(2) ** -22)


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
    found = merged(ids, values)
    assert found.values.flatten().tolist() == [7, 0, 5, 0]
    part = LookupPart(found, 6)
    assert part.squares().tolist() == [49 + 25]
    assert part.rows().tolist() == [[0, 5, 0, 7, 0, 0]]


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


@pytest.mark.parametrize(
    ("constant", "value"), [("_ROUNDING", 0.0), ("_UNDERFLOW", 0.0)], ids=["the rounding", "the underflow"]
)
def test_without_a_charge_the_bound_fails(monkeypatch: pytest.MonkeyPatch, constant: str, value: float) -> None:
    monkeypatch.setattr(parts_module, constant, value)
    assert moves("gram") > 1


def test_without_merging_equal_tokens_the_bound_fails() -> None:
    _, right = sides("aligned", 0)
    part = LookupPart(Lookups(ids_of(0), right[:, 0]), HEIGHT)
    assert largest_move([part], 2.0**-14) > 1


def test_without_the_cap_on_the_spread_a_row_that_overflows_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    part = GramPart([Products(*sides("huge", 0))], [])
    assert not part.squares()[:2].isfinite().any()
    monkeypatch.setattr(parts_module, "_LARGEST_SPREAD", 2.0**1000)
    total = ClippedSum([HEIGHT * WIDTH], 1.0, CPU)
    total.add([part], torch.ones(ROWS, dtype=torch.bool))
    assert not torch.from_numpy(total.total()).isfinite().all()


def test_without_the_charge_for_the_added_row_a_sum_that_rounds_one_way_exceeds_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Increments just above half a unit of a running sum count double, so more is added than the exact gradient."""
    tokens = 1024
    left = torch.ones(ROWS, 1, tokens, 1)
    right = torch.full((ROWS, 1, tokens, 1), 2.0**6 * 1.01)
    right[:, :, 0] = 2.0**30
    right[:, :, -2] = 2.0**24
    right[:, :, -1] = -(2.0**30)
    limit = (1 + Fraction(2) ** -18) * (1 + Fraction(2) ** -22)
    found = {}
    for added in (2.0**18, 0.0):
        monkeypatch.setattr(parts_module, "_ADDED", added)
        part = GramPart([Products(left, right)], [])
        found[added] = max(exact_square(part, row) / Fraction(part.squares()[row].item()) for row in range(ROWS))
    assert found[2.0**18] <= limit
    assert found[0.0] > limit


def test_blocks_of_a_wide_side_are_added_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide side is charged as one block, so no block may be rounded away beside another."""
    for constant in ("_ROUNDING", "_UNDERFLOW"):
        monkeypatch.setattr(parts_module, constant, 0.0)
    left = torch.zeros(1, 1, 1, 600)
    left[..., 0] = 2.0**12
    left[..., 512] = 1.0
    for wide, narrow in ((left, torch.ones(1, 1, 1, 2)), (torch.ones(1, 1, 1, 2), left)):
        # Its square is the product of |wide|² = 2^24 + 1, which float32 does not hold, and |narrow|² = 2.
        assert GramPart([Products(wide, narrow)], []).squares().item() == 2 * (2.0**24 + 1)


@pytest.mark.parametrize("form", [GramPart, RowsPart])
def test_what_cancels_within_a_row_leaves_no_trace_in_the_total(form: type[GramPart] | type[RowsPart]) -> None:
    """The tokens of an output layer and of its tied table are one number before they meet other rows' sum."""
    huge = 2.0**60
    products = Products(torch.tensor([huge, 0.0]).view(1, 1, 1, 2), torch.ones(1, 1, 1, 1))
    part = form([products], [merged(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1, 1), -huge))])
    total = torch.full((2,), 1 / 3, dtype=torch.float64)
    part.add(torch.ones(1, dtype=torch.float64), total)
    assert total.tolist() == [1 / 3, 1 / 3]


def test_neighbouring_clips_change_nothing_about_the_bound() -> None:
    left, right = sides("2^30 that cancels", 0)
    for low, high in pairwise((2.0**-100, 2.0**-63, 2.0**-30, 1.0, 2.0**100)):
        for clip in (low, high):
            assert largest_move([GramPart([Products(left, right)], [])], clip) <= 1
