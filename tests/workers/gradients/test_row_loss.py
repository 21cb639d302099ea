"""A loss sees one example at a time: one example moves the sum by at most C whatever the loss divides by."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.clipping import CLIP_MARGIN, GradientEngine
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.sum_engines import PrivateEvaluationEngine
from raycloak.workers.inputs.datasets import ArrayDataset, dataset_form
from raycloak.workers.models.losses import cross_entropy, mse
from raycloak.workers.models.models import LossFn, read_flat
from raycloak.workers.terms.measurement import Measurement
from tests.protocol import mechanism

ROWS, LENGTH, WORDS = 64, 128, 9


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


def over_positives(output: Tensor, labels: Tensor) -> Tensor:
    """Divided by the number of positives of the batch, as detection losses are."""
    losses = functional.cross_entropy(output, labels, reduction="none")
    return losses / (labels == 1).sum().clamp(min=1)


def over_labels(output: Tensor, labels: Tensor) -> Tensor:
    """Divided by the number of labels of the batch, as losses of tokens are."""
    losses = functional.cross_entropy(output, labels, reduction="none", ignore_index=-100)
    return losses.sum(1) / (labels != -100).sum()


def over_positives_row_by_row(output: Tensor, labels: Tensor) -> Tensor:
    """The same, in code that cannot run under vmap."""
    losses = functional.cross_entropy(output, labels, reduction="none")
    return losses / max(1, int((labels == 1).sum().item()))


class Tagger(nn.Module):
    """Texts [n, T] to logits of each token [n, classes, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, padding_idx=0)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids)).transpose(1, 2)


class Trimming(nn.Module):
    """Texts [n, T] to logits, computed on as many positions as the longest text of the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        longest = max(1, int((ids != 0).sum(1).max()))
        return self.head(torch.tanh(self.words(ids[:, :longest]).mean(1)))


def rare_positives() -> ArrayDataset:
    """Two positives: without one of them, every other gradient is twice as long."""
    draw = np.random.default_rng(0)
    labels = np.zeros(ROWS, np.int64)
    labels[[5, 6]] = 1
    return ArrayDataset(draw.random((ROWS, 6), dtype=np.float32), labels)


def sparse_tags() -> ArrayDataset:
    """One text with a label at every position, others with one label each."""
    draw = np.random.default_rng(1)
    labels = np.full((ROWS, LENGTH), -100)
    labels[:, 0] = 1
    labels[5] = 1
    return ArrayDataset(draw.integers(1, WORDS, (ROWS, LENGTH)), labels)


def one_long_text() -> ArrayDataset:
    draw = np.random.default_rng(2)
    texts = np.zeros((ROWS, LENGTH), np.int64)
    texts[:, :1] = draw.integers(1, WORDS, (ROWS, 1))
    texts[5] = draw.integers(1, WORDS, LENGTH)
    return ArrayDataset(texts, draw.integers(0, 3, ROWS))


def classifier() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(6, 3)


def of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def moved(module: nn.Module, loss: LossFn, data: ArrayDataset, clip: float, row: int = 5) -> float:
    """How far the sum goes if example ``row`` contributes nothing, in units of C; an engine's padding takes its place.

    In the adjacency of the mechanism a missing row is another example, marked as invalid.
    """
    parameters = read_flat(module)
    plan = mechanism(len(parameters)).model_copy(
        update={"micro_batch_size": ROWS, "micro_batches": 1, "max_grad_norm": clip}
    )
    engine = GradientEngine(module, loss, plan)
    features, labels = data.batch(np.arange(ROWS))
    valid = np.ones(ROWS, np.bool_)
    whole = torch.cat(engine.clipped_sum(parameters, [(features, labels, valid)])).numpy()
    features[row], labels[row], valid[row] = features[0], labels[0], False
    without = torch.cat(engine.clipped_sum(parameters, [(features, labels, valid)])).numpy()
    return float(np.linalg.norm(whole - without) / clip)


@pytest.mark.parametrize(
    ("make", "loss", "data", "clip"),
    [
        (classifier, over_positives, rare_positives, 1.5),
        (classifier, over_positives_row_by_row, rare_positives, 1.5),
        (lambda: of(Tagger), over_labels, sparse_tags, 0.03),
    ],
    ids=["over positives", "over positives, row by row", "over labels"],
)
def test_one_example_moves_the_sum_by_at_most_c_whatever_the_loss_divides_by(
    make: Callable[[], nn.Module], loss: LossFn, data: Callable[[], ArrayDataset], clip: float
) -> None:
    assert max(moved(make(), loss, data(), clip, row) for row in (0, 5, 63)) <= 1 + CLIP_MARGIN


def test_a_model_that_trims_its_batch_would_move_the_sum_by_many_c_and_is_refused() -> None:
    """No loss can help here: all rows are computed in the shape of the longest."""
    data = one_long_text()
    assert moved(of(Trimming), cross_entropy, data, 0.5) > 10
    with pytest.raises(ModelError) as caught:
        check_trainable(of(Trimming), dataset_form(data), cross_entropy, vocabulary=WORDS)
    assert caught.value.code == "mixing_layer"
    assert "'words'" in caught.value.message
    assert "trimmed to its longest text" in caught.value.message
    assert "one fixed length" in caught.value.remedy


def test_a_private_evaluation_moves_by_at_most_its_norm_whatever_the_loss_divides_by() -> None:
    """The counterexample: without one of two positives, the losses of all others are twice as large."""
    module, data = classifier(), rare_positives()
    plan = mechanism(1, max_grad_norm=1.0, sample_rate=1.0).model_copy(
        update={"query": "evaluation", "micro_batch_size": ROWS, "micro_batches": 1}
    )
    engine = PrivateEvaluationEngine(Measurement(mechanism=plan, every=1, loss_bound=2.0), module, over_positives)
    features, labels = data.batch(np.arange(ROWS))
    valid = np.ones(ROWS, np.bool_)
    parameters = read_flat(module)
    whole = torch.cat(engine.clipped_sum(parameters, [(features, labels, valid)])).numpy()
    features[5], labels[5], valid[5] = features[0], labels[0], False
    assert np.linalg.norm(whole - torch.cat(engine.clipped_sum(parameters, [(features, labels, valid)])).numpy()) <= 1


@pytest.mark.parametrize(
    ("loss", "output", "labels"),
    [
        (cross_entropy, (64, 10), torch.randint(-1, 11, (64,), generator=torch.Generator().manual_seed(0))),
        (cross_entropy, (8, 5, 7), torch.randint(-1, 6, (8, 7), generator=torch.Generator().manual_seed(0))),
        (mse, (64, 3), torch.rand(64, 3, generator=torch.Generator().manual_seed(0))),
        (mse, (1, 1), torch.rand(1, generator=torch.Generator().manual_seed(0))),
    ],
)
def test_a_built_in_loss_has_the_bits_on_the_whole_batch_that_it_has_on_each_row_alone(
    loss: LossFn, output: tuple[int, ...], labels: Tensor
) -> None:
    """Losses and gradients. So these may be called on the whole batch."""
    values = torch.randn(output, generator=torch.Generator().manual_seed(1))
    found = []
    for evaluated in (RowLoss(loss), RowLoss(lambda *row: loss(*row)), RowLoss(slowly(loss))):
        leaf = values.clone().requires_grad_()
        losses = evaluated(leaf, labels)
        losses.sum().backward()
        assert leaf.grad is not None
        found.append((losses.detach().nan_to_num(), leaf.grad))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def slowly(loss: LossFn) -> LossFn:
    """The same where vmap cannot run."""
    return lambda output, labels: loss(output, labels) * (1 if labels.sum().item() else 1.0)


def test_a_loss_that_does_not_run_under_vmap_is_evaluated_row_by_row() -> None:
    seen: list[int] = []

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        seen.append(len(output))
        return output.square().sum(1) * (2 if labels.item() > 1 else 1)

    rows = RowLoss(loss)
    output = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    losses = rows(output, torch.tensor([0, 1, 2]))
    assert losses.tolist() == [1, 4, 18]
    losses.sum().backward()
    assert output.grad is not None
    assert output.grad.tolist() == [[2], [4], [12]]
    assert rows.row_by_row
    assert set(seen) == {1}


def test_the_way_a_loss_is_evaluated_does_not_depend_on_an_example() -> None:
    """A label that the loss fails on, first of all: it is an error, and no reason to evaluate row by row."""

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels, reduction="none")

    rows = RowLoss(loss)
    with pytest.raises(RuntimeError, match="out of bounds"):
        rows(torch.zeros(2, 3), torch.tensor([0, 7]))
    assert not rows.row_by_row
    quiet = RowLoss(loss)
    with torch.no_grad():
        quiet(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert not quiet.row_by_row


def test_the_way_is_chosen_once_for_all_that_share_a_loss() -> None:
    shared = RowLoss(over_positives_row_by_row)
    assert RowLoss.of(shared) is shared
    shared(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert shared.row_by_row
    assert type(RowLoss.of(over_positives)) is RowLoss


def test_a_loss_that_is_not_one_number_of_one_example_is_refused() -> None:
    for loss in (lambda out, _: out.mean(), lambda out, _: out, lambda out, _: out.squeeze()):
        with pytest.raises(ModelError) as caught:
            RowLoss(loss)(torch.zeros(4, 1, 2), torch.zeros(4))
        assert caught.value.code == "loss_shape"
