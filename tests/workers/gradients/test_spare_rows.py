"""Synthetic examples for the rows that no example was drawn for."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.spare_rows import spare_rows
from raycloak.workers.inputs.datasets import DatasetForm
from tests.workers.gradients.model_zoo import ZOO


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


def form(shape: tuple[int, ...], dtype: str = "float32") -> DatasetForm:
    return DatasetForm.model_validate(
        {"num_examples": 9, "feature_shape": shape, "feature_dtype": dtype, "label_shape": (), "label_dtype": "int64"}
    )


def test_texts_are_of_many_lengths_and_hold_only_ids_that_the_model_takes() -> None:
    module = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(48, 2))
    ids, labels = spare_rows(module, form((12,), "int64"), vocabulary=50)
    assert ids.shape == (24, 12)
    assert labels.shape == (24,)
    assert ids.min() >= 0
    assert ids.max() < 50
    lengths = {int((row != row[-1]).sum()) for row in ids}
    assert len(lengths) > 6


def test_values_are_of_many_sizes_and_rows_without_a_finite_output_are_left_out() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1, keepdim=True).sqrt()

    values, _ = spare_rows(Root(), form((6,)))
    assert 0 < len(values) < 24
    assert (values.sum(1) >= 0).all()
    sizes = np.abs(spare_rows(nn.Linear(6, 2), form((6,)))[0]).max(1)
    assert sizes.max() > 100 * sizes[sizes > 0].min()


def test_the_same_rows_come_each_time_and_the_random_state_stays() -> None:
    module = nn.Linear(6, 2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again = (spare_rows(module, form((6,))) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))


def test_a_model_without_a_finite_output_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.nan

    with pytest.raises(ModelError, match="model_input: the model gives no finite output"):
        spare_rows(Nothing(), form((6,)))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_kind_of_model_has_spare_rows(name: str) -> None:
    case = ZOO[name]()
    shape = form(case.shape, "int64" if case.text else "float32")
    features, labels = spare_rows(case.module, shape, vocabulary=61 if case.text else None)
    assert len(features) == len(labels) >= 12
