"""Values of examples that Python reads in a forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.read_values import ReadValues
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.losses import cross_entropy

FORM = DatasetForm(num_examples=64, feature_shape=(6,), feature_dtype="float32", label_shape=(), label_dtype="int64")


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def written(x: Tensor) -> Tensor:
    fresh = torch.zeros(5, 6)
    fresh[0] = x[0]
    return fresh


READS: dict[str, Callable[[Tensor], object]] = {
    "bool": lambda x: bool((x > 0).any()),
    "if": lambda x: 1 if x.amax() > 3 else 0,
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.norm()),
    "int": lambda x: int(x.argmax()),
    "index": lambda x: [1, 2, 3][x.argmax() % 3],
    "range": lambda x: range((x > 0).sum()),
    "tolist": lambda x: (x > 0).sum(1).tolist(),
    "numpy": lambda x: x.numpy(),
    "in": lambda x: 5 in x,
    "maximum of Python": lambda x: max(x[:, 0]),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "is_nonzero": lambda x: torch.is_nonzero(x.sum()),
    "data": lambda x: float(x.data.sum()),
    "detached": lambda x: float(x.detach().sum()),
    "a piece": lambda x: float(x.chunk(2)[1].sum()),
    "written to a constant": lambda x: float(written(x).sum()),
    "added in place": lambda x: float(torch.zeros(5, 6).add_(x).sum()),
    "an own function": lambda x: float(Twice.apply(x).sum()),
    "under vmap": lambda x: float(torch.func.vmap(lambda row: row * 2)(x).sum()),
    "the mask of rows": lambda x: bool(x[x.isnan()].isnan().all()),
}
KEEPS: dict[str, Callable[[Tensor], object]] = {
    "shapes": lambda x: x.shape[1] + x.size(0) + x.dim() + len(x) + x.numel(),
    "types": lambda x: (x.dtype, x.device, x.requires_grad, x.is_floating_point()),
    "a constant": lambda x: x * float(torch.ones(3).sum()),
    "a mask": lambda x: torch.where(x > 0, x, 0.0),
    "softmax": lambda x: x.softmax(1).amax(1),
    "recurrent": lambda x: nn.LSTM(6, 3, batch_first=True)(x[:, None]),
    "attention": lambda x: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)(x[:, None]),
}


@pytest.mark.parametrize("name", READS)
def test_a_value_of_an_example_that_python_gets_is_found(name: str) -> None:
    x = torch.randn(5, 6)
    values = ReadValues(x)
    with values.watching():
        READS[name](x)
    assert values.found is not None


@pytest.mark.parametrize("name", KEEPS)
def test_what_is_no_value_of_an_example_is_not_taken_for_one(name: str) -> None:
    x = torch.randn(5, 6)
    values = ReadValues(x)
    with values.watching():
        KEEPS[name](x)
    assert values.found is None


def test_a_tensor_that_is_gone_is_not_mistaken_for_a_new_one() -> None:
    x = torch.randn(5, 6)
    values = ReadValues(x)
    with values.watching():
        for _ in range(200):
            x + 1
            assert float(torch.ones(2).sum()) == 2
    assert values.found is None
    assert len(values._followed) == 1


class EarlyExit(nn.Module):
    """Stops after the first block once the batch is confident, which it never is with the first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.last = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        early, late = self.one(hidden), self.last(hidden)
        if float(early.detach().softmax(1).amax()) > 0.9999999:
            return early + 0 * late
        return late + 0 * early


class FilledByTheLargest(nn.Module):
    """Infinite values are replaced by the largest finite one of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        infinite = torch.isinf(x)
        return torch.where(infinite, x[~infinite].amax(), x) if infinite.any() else x


def test_a_model_that_branches_on_its_examples_is_refused_though_no_probe_takes_the_branch() -> None:
    with pytest.raises(ModelError) as caught:
        check_trainable(EarlyExit(), FORM, cross_entropy)
    assert caught.value.code == "read_values"
    assert "layer 'model'" in caught.value.message
    assert "torch.where" in caught.value.remedy


def test_the_layer_that_reads_is_named() -> None:
    class Checks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.amax() > 1e30:
                raise ValueError("too large")
            return x

    with pytest.raises(ModelError, match=r"read_values: layer '1\.0' reads"):
        check_trainable(nn.Sequential(nn.Linear(6, 6), nn.Sequential(Checks()), nn.Linear(6, 3)), FORM, cross_entropy)


def test_what_a_branch_does_with_odd_values_is_told_first() -> None:
    module = nn.Sequential(FilledByTheLargest(), nn.Linear(6, 3))
    with pytest.raises(ModelError, match="mixing_layer"):
        check_trainable(module, FORM, cross_entropy)
