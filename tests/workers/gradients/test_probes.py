"""Synthetic examples: odd values stand beside rows that have none of them."""

import pytest
import torch
from torch import nn

from raycloak.workers.gradients.probes import Probes, odd_ids
from raycloak.workers.inputs.datasets import DatasetForm

TEXTS = DatasetForm(num_examples=9, feature_shape=(8,), feature_dtype="int64", label_shape=(), label_dtype="int64")


@pytest.mark.parametrize(("ids", "fillings"), [(2, 9), (4, 10), (5, 1), (100, 1)])
def test_ordinary_rows_have_none_of_the_odd_ids_also_where_there_are_few_ids(ids: int, fillings: int) -> None:
    probes = Probes(TEXTS, ids, odd_ids(nn.Identity(), ids))
    found = list(probes.fillings(6))
    assert len(found) == fillings
    values = []
    for filling in found:
        odd = [int(example[0, 0]) for example in filling.filled.values()]
        assert not torch.isin(filling.ordinary, torch.tensor(odd)).any()
        assert filling.ordinary.min() >= 0
        assert filling.ordinary.max() < ids
        assert all(
            int((example == value).sum()) == 7 for example, value in zip(filling.filled.values(), odd, strict=True)
        )
        values += odd
    assert values == list(probes.fills)
