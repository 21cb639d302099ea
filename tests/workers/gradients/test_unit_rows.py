"""docs/proofs/012-units.md: a unit's gradient is the mean over its rows, and no unit moves the total by more than C.

A unit is zeroed with all its rows, whatever they hold. An engine that clips rows in the place of units is caught.
"""

import copy
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import RefusedError
from raycloak.workers.gradients import taps
from raycloak.workers.gradients.clipping import ClippedSum, GradientEngine
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.parts import (
    GramPart,
    Lookups,
    LookupUse,
    OutersPart,
    Part,
    Products,
    RowsPart,
    joined,
    part_of,
)
from raycloak.workers.gradients.row_places import SilentRows
from raycloak.workers.gradients.unit_rows import grouped, means, row_weights
from raycloak.workers.gradients.vocabulary_loss import HeadPart, HeadUse
from raycloak.workers.models.losses import cross_entropy, next_token_cross_entropy
from raycloak.workers.models.models import read_flat
from tests.workers.gradients.model_zoo import ZOO
from tests.workers.gradients.test_clipping import mechanism
from tests.workers.gradients.test_gradient_parts import brute_force, case_of
from tests.workers.gradients.test_sensitivity import CPU, HEIGHT, KINDS, ROWS, TOKENS, WIDTH, ids_of, sides
from tests.workers.gradients.test_vocabulary_loss import batch, frozen, untied
from tests.workers.gradients.test_vocabulary_loss import tied as tied_model

UNITS = 3
PRESENT = torch.tensor([[True, True], [True, False], [False, True]])
"""Of three units of two rows: one has both, two have one."""


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


def unit_gradients(rows: Tensor, present: Tensor) -> Tensor:
    """The mean over each unit's present rows, float64 [m, d] of rows [m * k, d]."""
    there = present.double()
    return (rows.view(*present.shape, -1) * there[:, :, None]).sum(1) / there.sum(1, keepdim=True)


def unit_parts(
    module: nn.Module, features: Tensor, labels: Tensor, silent: SilentRows, rows_per_unit: int
) -> list[Part]:
    gradients = GradientParts(copy.deepcopy(module), cross_entropy, rows_per_unit=rows_per_unit)
    with gradients.lent():
        return gradients.finished(*gradients.begun(features, labels), silent)


@pytest.mark.parametrize("name", ZOO)
def test_norms_and_clipped_sums_of_units_are_those_of_brute_force(name: str) -> None:
    case = case_of(name)
    features, labels = case.batch(PRESENT.numel())
    expected = unit_gradients(brute_force(case.module, features, labels), PRESENT)
    norms = expected.norm(dim=1)
    module, silent = copy.deepcopy(case.module), SilentRows(~PRESENT.flatten(), PRESENT.shape[1])
    parts = unit_parts(module, features, labels, silent, 2)
    assert not silent.reached

    found = torch.cat([part.rows() for part in parts], 1).double()
    assert float((found - expected).norm(dim=1).div(norms).max()) < 3e-6
    squares = torch.stack([part.squares() for part in parts]).sum(0)
    assert bool((squares.sqrt() >= norms * (1 - 1e-5)).all())
    torch.testing.assert_close(squares.sqrt(), norms, rtol=2e-3, atol=0)

    clip = float(norms.median())
    total = ClippedSum([part.rows().shape[1] for part in parts], clip, CPU)
    total.add(parts, torch.tensor([True, False, True]))
    summed = expected.T @ torch.where(torch.tensor([True, False, True]), (clip / norms).clamp(max=1), 0.0)
    assert float((torch.from_numpy(torch.cat(total.pieces()).numpy()) - summed).norm() / summed.norm()) < 1e-3


def test_a_wide_layer_of_one_token_a_row_forms_no_gradient_of_a_unit() -> None:
    """Its parts add up to brute force, and a unit whose rows cancel to their last bits moves the total by at most C."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 3))
    features, labels = torch.randn(2 * UNITS, 200), torch.randint(3, (2 * UNITS,))
    expected = unit_gradients(brute_force(module, features, labels), torch.ones(UNITS, 2, dtype=torch.bool))
    silent = SilentRows(torch.zeros(2 * UNITS, dtype=torch.bool), 2)
    parts = unit_parts(module, features, labels, silent, 2)
    assert [type(part) is OutersPart for part in parts] == [True, False, False, False]
    total = ClippedSum([part.rows().shape[1] for part in parts], float(expected.norm(dim=1).min()) / 2, CPU)
    total.add(parts, torch.ones(UNITS, dtype=torch.bool))
    summed = (expected / expected.norm(dim=1, keepdim=True)).sum(0) * float(expected.norm(dim=1).min()) / 2
    assert float((torch.cat(total.pieces()) - summed).norm() / summed.norm()) < 1e-3
    assert 0.99 < max(moves_of(module, features, labels, cross_entropy)) <= 1


@pytest.mark.parametrize("name", ["cnn", "tied", "gpt2 lora"])
def test_units_of_one_row_have_the_bytes_of_rows(name: str) -> None:
    case = case_of(name)
    features, labels = case.batch(4)
    sums = []
    for parts in (
        GradientParts(copy.deepcopy(case.module), cross_entropy)(features, labels),
        unit_parts(case.module, features, labels, SilentRows(torch.zeros(4, dtype=torch.bool)), 1),
    ):
        total = ClippedSum([part.rows().shape[1] for part in parts], 0.1, CPU)
        total.add(parts, torch.ones(4, dtype=torch.bool))
        sums.append(torch.cat(total.pieces()).numpy().tobytes())
    assert sums[0] == sums[1]


# --- one unit moves the total by at most C, whatever its rows hold

K = 3


class GivenHead:
    """Sides in the place of a head that computes them from what it kept."""

    def __init__(self, left: Tensor) -> None:
        self._left = left
        self.weight = torch.empty(HEIGHT, WIDTH)

    def pieces(self, tokens: int) -> list[slice]:
        return [slice(start, min(start + 5, tokens)) for start in range(0, tokens, 5)]

    def gradients(self, hidden: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, self._left[known]


def tokens_of_units(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Left [m * k, 1, T, height] and right [m * k, 1, T, width]: each unit has rows of one kind, the last ordinary."""
    drawn = [sides(kind if row < K else "ordinary", seed + row) for row in range(K)]
    left, right = (torch.stack([pair[side] for pair in drawn], 1).flatten(0, 1) for side in (0, 1))
    return left, right


def opposed(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Let the first unit's second row take the first one away."""
    left[1], right[1] = -left[0], right[0]
    return left, right


def head_of(left: Tensor, right: Tensor) -> HeadUse:
    numbers = torch.arange(left[:, 0, :, 0].numel()).view(len(left), -1)
    return HeadUse(GivenHead(left[:, 0].flatten(0, 1)), right[:, 0], numbers, torch.ones(len(left), TOKENS))


def all_ids(seed: int) -> Tensor:
    return torch.cat([ids_of(seed + row) for row in range(K)])


def lookups(left: Tensor, right: Tensor, seed: int) -> LookupUse:
    return LookupUse(all_ids(seed), -right[:, 0])


def products(left: Tensor, right: Tensor) -> Products:
    found = grouped(Products(left, right), K)
    assert isinstance(found, Products)
    return found


def tied(left: Tensor, right: Tensor, seed: int) -> list[Lookups]:
    use = grouped(lookups(left, right, seed), K)
    assert isinstance(use, LookupUse)
    return [joined([use], HEIGHT)]


PARTS: dict[str, Callable[[Tensor, Tensor, int], Part]] = {
    "dense": lambda left, right, seed: part_of(
        [grouped(Products(left, right).all_rows(), K)], ROWS, (HEIGHT, WIDTH), CPU
    ),
    "one token": lambda left, right, seed: part_of(
        [products(left[:, :, :1], right[:, :, :1])], ROWS, (HEIGHT, WIDTH), CPU
    ),
    "outers": lambda left, right, seed: OutersPart(products(left[:, :, :1], right[:, :, :1])),
    "rows": lambda left, right, seed: RowsPart([products(left, right)], []),
    "rows, tied": lambda left, right, seed: RowsPart([products(left, right)], tied(left, right, seed)),
    "gram": lambda left, right, seed: GramPart([products(left, right)], []),
    "gram, tied": lambda left, right, seed: GramPart([products(left, right)], tied(left, right, seed)),
    "head, tied": lambda left, right, seed: HeadPart(
        grouped(head_of(left, right), K), [grouped(lookups(left, right, seed), K)], (HEIGHT, WIDTH)
    ),
    "lookup": lambda left, right, seed: part_of([grouped(lookups(left, right, seed), K)], ROWS, (HEIGHT, WIDTH), CPU),
}


def largest_move(part: Part, clip: float) -> Fraction:
    """Return the square of the largest change of the total by one unit, in units of C², exactly."""

    def total(valid: Tensor) -> list[Fraction]:
        found = ClippedSum([HEIGHT * WIDTH], clip, CPU)
        found.add([part], valid)
        return [Fraction(float(each)) for each in torch.cat(found.pieces()).numpy()]

    everyone = torch.ones(ROWS, dtype=torch.bool)
    whole, largest = total(everyone), Fraction(0)
    for unit in range(ROWS):
        without = total(everyone & (torch.arange(ROWS) != unit))
        largest = max(largest, sum(((a - b) ** 2 for a, b in zip(whole, without, strict=True)), Fraction(0)))
    return largest / Fraction(clip) ** 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", PARTS)
def test_no_unit_moves_the_total_by_more_than_c_whatever_its_rows_hold(form: str, kind: str) -> None:
    for seed in range(2):
        left, right = opposed(*tokens_of_units(kind, seed))
        for clip in (1.0, 2.0**-14):
            assert largest_move(PARTS[form](left, right, seed), clip) <= 1


@pytest.mark.parametrize("name", ZOO)
def test_no_unit_of_a_model_moves_the_sum_by_more_than_c(name: str) -> None:
    case = case_of(name)
    features, labels = case.batch(2 * UNITS)
    moves = moves_of(case.module, features, labels, cross_entropy)
    assert max(moves) <= 1
    assert max(moves) > 0.99, "and it is the unit that is clipped to C"


@pytest.mark.parametrize("kind", [frozen, untied, tied_model])
def test_no_unit_of_a_text_model_with_a_head_moves_the_sum_by_more_than_c(kind: Callable) -> None:
    ids, labels = (torch.cat([part, part[:1]]) for part in batch())
    assert 0.99 < max(moves_of(kind(), ids, labels, next_token_cross_entropy)) <= 1


def moves_of(module: nn.Module, features: Tensor, labels: Tensor, loss: Callable) -> list[float]:
    """Return by how much the sum moves, in units of a C that clips all units, as each unit is zeroed."""
    parameters = read_flat(module)
    plan = mechanism(len(parameters), rows=UNITS, batches=1, clip=2.0**-20)
    plan = plan.model_copy(update={"rows_per_unit": 2})
    engine = GradientEngine(copy.deepcopy(module), loss, plan)

    def total(absent: int | None) -> np.ndarray:
        valid = PRESENT.numpy() & (np.arange(UNITS) != absent)[:, None]
        batch = features.numpy(), labels.numpy(), valid.ravel()
        return torch.cat(engine.clipped_sum(parameters, [batch])).numpy()

    whole = total(None)
    return [float(np.linalg.norm(whole - total(unit))) / plan.max_grad_norm for unit in range(UNITS)]


def test_an_engine_that_clips_rows_in_the_place_of_units_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("mlp")
    features, labels = case.batch(2 * UNITS)
    # Equal rows: clipped one by one, a unit's two rows add up to 2C.
    features[1], labels[1] = features[0], labels[0]
    assert max(moves_of(case.module, features, labels, cross_entropy)) <= 1
    add = ClippedSum.add
    monkeypatch.setattr(taps, "grouped", lambda use, rows_per_unit: use)
    monkeypatch.setattr(taps.Recording, "_units", property(lambda self: self._count))
    monkeypatch.setattr(
        ClippedSum, "add", lambda self, parts, valid: add(self, parts, valid.repeat_interleave(PRESENT.shape[1]))
    )
    assert max(moves_of(case.module, features, labels, cross_entropy)) > 1.9


# --- the steps that the proof names


def test_a_row_counts_one_over_the_rows_that_are_there_and_an_absent_one_nothing() -> None:
    present = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.bool)
    assert row_weights(present, 3).tolist() == pytest.approx([1 / 3] * 3 + [1, 0, 0] + [0] * 3)
    assert row_weights(present, 1).tolist() == present.float().tolist()


def test_means_leave_out_absent_rows_even_where_they_are_no_numbers() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [torch.nan, torch.inf], [torch.nan, 0.0], [0.0, 0.0]])
    present = torch.tensor([True, True, True, False, False, False])
    assert means(rows, present, 2).tolist() == [[2.0, 3.0], [5.0, 6.0], [0.0, 0.0]]


def test_the_tokens_of_a_unit_are_those_of_its_rows_in_their_order() -> None:
    draw = torch.Generator().manual_seed(2)
    left, right = torch.randn(6, 2, 4, 3, generator=draw), torch.randn(6, 2, 4, 5, generator=draw)
    found = grouped(Products(left.mT.contiguous().mT, right, (1, 1)), 2)
    assert isinstance(found, Products)
    assert found.shape == (3, 2, 8, 3, 5)
    for unit in range(3):
        for group in range(2):
            assert torch.equal(found.left[unit, group], torch.cat([left[2 * unit, group], left[2 * unit + 1, group]]))
    expected = Products(left, right).all_rows().view(3, 2, -1).sum(1)
    torch.testing.assert_close(found.all_rows(), expected)


def test_a_unit_counts_its_tokens_together_against_the_bound_of_gram_matrices() -> None:
    side = torch.randn(4, 1, 2**11 + 1, 2)
    uses = Products(side, side)
    GramPart([uses], [])
    with pytest.raises(RefusedError, match="2\\^12 tokens"):
        GramPart([grouped(uses, 2)], [])
