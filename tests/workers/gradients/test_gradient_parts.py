"""The parts of a model's gradients are those of brute force in float64, row by row, for models that people train."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from raycloak.workers.gradients.clipping import ClippedSum
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.models.losses import cross_entropy
from tests.workers.gradients.model_zoo import ZOO, Case

ROWS = 6


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


def case_of(name: str) -> Case:
    torch.manual_seed(3)
    case = ZOO[name]()
    with torch.no_grad():
        for tensor in case.module.parameters():
            if tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return case


def brute_force(module: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """Each row's gradient, float64 [m, d]."""
    wide = copy.deepcopy(module).double().train()
    trained = [tensor for tensor in wide.parameters() if tensor.requires_grad]
    rows = []
    for row in range(len(labels)):
        some = features[row : row + 1]
        loss = cross_entropy(wide(some.double() if some.is_floating_point() else some), labels[row : row + 1])
        gradients = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
        filled = [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, trained, strict=True)]
        rows.append(torch.cat([each.flatten() for each in filled]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ZOO)
def test_rows_norms_and_clipped_sums_are_those_of_brute_force(name: str) -> None:
    case = case_of(name)
    features, labels = case.batch(ROWS)
    expected = brute_force(case.module, features, labels)
    norms = expected.norm(dim=1)
    clip = float(norms.median())
    sizes = [tensor.numel() for tensor in case.module.parameters() if tensor.requires_grad]

    rows = GradientParts(copy.deepcopy(case.module), cross_entropy).rows(features, labels)
    found = torch.cat([row.flatten(1) for row in rows], 1).double()
    assert float((found - expected).norm(dim=1).div(norms).max()) < 3e-6

    parts = GradientParts(copy.deepcopy(case.module), cross_entropy)(features, labels)
    squares = torch.stack([part.squares() for part in parts]).sum(0)
    assert bool((squares.sqrt() >= norms * (1 - 1e-5)).all())
    torch.testing.assert_close(squares.sqrt(), norms, rtol=1e-3, atol=0)

    valid = torch.ones(ROWS, dtype=torch.bool)
    valid[2] = False
    weights = torch.where(valid, (clip / norms).clamp(max=1), 0.0)
    total = ClippedSum(sizes, clip, torch.device("cpu"))
    total.add(parts, valid)
    summed = expected.T @ weights
    assert float((torch.from_numpy(torch.cat(total.pieces()).numpy()) - summed).norm() / summed.norm()) < 1e-3
    assert not any(tensor.grad is not None for tensor in case.module.parameters())


def test_positions_as_many_as_rows_are_not_taken_for_the_batch() -> None:
    case = case_of("own parameters")
    features, labels = case.batch(12)
    assert features.shape == (12, 12)
    rows = GradientParts(copy.deepcopy(case.module), cross_entropy).rows(features, labels)
    found = torch.cat([row.flatten(1) for row in rows], 1).double()
    expected = brute_force(case.module, features, labels)
    assert float((found - expected).norm(dim=1).div(expected.norm(dim=1)).max()) < 3e-6


@pytest.mark.parametrize("name", ZOO)
def test_two_computations_of_the_same_rows_have_the_same_bytes(name: str) -> None:
    case = case_of(name)
    features, labels = case.batch(ROWS)
    sizes = [tensor.numel() for tensor in case.module.parameters() if tensor.requires_grad]
    totals = []
    for _ in range(2):
        total = ClippedSum(sizes, 0.1, torch.device("cpu"))
        total.add(GradientParts(case.module, cross_entropy)(features, labels), torch.ones(ROWS, dtype=torch.bool))
        totals.append(torch.cat(total.pieces()).numpy().tobytes())
    assert totals[0] == totals[1]
    assert math.isfinite(torch.cat(total.pieces()).numpy().sum())
