"""The removal of one unit from a clipped sum, and engines whose clipping it catches."""

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.coordinator.audit.removals import largest_move
from raycloak.workers.gradients.row_memory import mechanism_of_rows
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import read_flat
from tests.coordinator.audit.audit_cases import clipping_rows_in_the_place_of_their_unit

FORM = DatasetForm(num_examples=90, feature_shape=(6,), feature_dtype="float32", label_shape=(), label_dtype="int64")


def moved(rows_per_unit: int) -> float:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    flat = read_flat(module)
    mechanism = mechanism_of_rows(len(flat), 8).model_copy(update={"rows_per_unit": rows_per_unit})
    own = {"deterministic": True, "vocabulary": None}
    return largest_move(module, cross_entropy, FORM, mechanism, (np.array(flat),), **own)


@pytest.mark.parametrize("rows_per_unit", [1, 3])
def test_taking_a_unit_away_moves_the_sum_by_c(rows_per_unit: int) -> None:
    assert 0.99 < moved(rows_per_unit) <= 1


def test_rows_that_are_clipped_in_the_place_of_their_unit_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clipping_rows_in_the_place_of_their_unit(monkeypatch)
    assert moved(3) > 2.9
