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
from raycloak.workers.models.losses import cross_entropy

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
    "a text": lambda x: f"{x.amax():.3f}",
    "texts of rows": lambda x: str(x),
    "a formatted row": lambda x: f"{x[0]}",
    "the number of rows that are picked": lambda x: len(x[(x > 0).any(1)]),
    "places": lambda x: (x > 0).nonzero().shape[0],
    "condition alone": lambda x: torch.where(x > 0)[0].numel(),
    "different ones": lambda x: torch.unique(x > 0).shape[0],
    "the end of a slice": lambda x: x[: (x > 0).any(1).sum()],
    "a slice of columns": lambda x: x[:, (x > 0).any(1).sum() : 6],
    "a slice that is written": lambda x: torch.zeros(6).__setitem__(slice(None, (x > 0).any(1).sum()), 1.0),
    "repeats": lambda x: torch.repeat_interleave((x > 0).sum(1)).numel(),
}
KEEPS: dict[str, Callable[[Tensor], object]] = {
    "shapes": lambda x: x.shape[1] + x.size(0) + x.dim() + len(x) + x.numel(),
    "types": lambda x: (x.dtype, x.device, x.requires_grad, x.is_floating_point()),
    "a constant": lambda x: x * float(torch.ones(3).sum()),
    "a mask": lambda x: torch.where(x > 0, x, 0.0),
    "written where a mask is": lambda x: x.clone().index_put_((x > 0,), torch.tensor(1.0)),
    "one token of each": lambda x: x[torch.arange(5), (x > 0).sum(1) % 6],
    "a slice to a constant": lambda x: x[:, : torch.tensor(3)],
    "a mask of constants": lambda x: x[:, torch.tensor([True, False] * 3)],
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
    assert len(values._followed._values) == 1


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


class CountedExit(EarlyExit):
    """Counts the sure rows by the size of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        early, late = self.one(hidden), self.last(hidden)
        sure = (early.detach().softmax(1).amax(1) > 0.9999999).nonzero()
        return early + 0 * late if len(sure) else late + 0 * early


class Cautious(nn.Module):
    """Clips the gradient of an activation by the norm of the batch's, which no probe's is above."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * min(1.0, 1e6 / (float(gradient.norm()) + 1e-6)))
        return self.last(torch.relu(hidden))


class FilledByTheLargest(nn.Module):
    """Infinite values are replaced by the largest finite one of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        infinite = torch.isinf(x)
        return torch.where(infinite, x[~infinite].amax(), x) if infinite.any() else x


@pytest.mark.parametrize("kind", [EarlyExit, CountedExit])
def test_a_model_that_branches_on_its_examples_is_refused_though_no_probe_takes_the_branch(
    kind: type[nn.Module],
) -> None:
    with pytest.raises(ModelError) as caught:
        check_trainable(kind(), FORM, cross_entropy)
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


def test_a_hook_that_reads_a_gradient_is_refused() -> None:
    with pytest.raises(ModelError, match="read_values: the backward pass reads"):
        check_trainable(Cautious(), FORM, cross_entropy)


def test_what_a_branch_does_with_odd_values_is_told_first() -> None:
    module = nn.Sequential(FilledByTheLargest(), nn.Linear(6, 3))
    with pytest.raises(ModelError, match="mixing_layer"):
        check_trainable(module, FORM, cross_entropy)
