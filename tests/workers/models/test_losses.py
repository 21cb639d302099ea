"""The built-in losses: torch's values for each example, with the same bits alone and in any batch."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.models.losses import BUILT_IN_LOSSES, BuiltInLoss, cross_entropy, huber, mse
from raycloak.workers.models.losses import binary_cross_entropy as binary
from raycloak.workers.terms.loss import LossTerm

ROWS = 37
WEIGHTS = (1.0, 0.25, 3.0, 0.0, 7.0)


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


def of(name: str, **settings) -> BuiltInLoss:
    return BuiltInLoss((LossTerm.model_validate({"name": name, **settings}),))


def drawn(*shape: int, scale: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale


def classes(*shape: int, below: int = 5, lowest: int = 0) -> Tensor:
    return torch.randint(lowest, below, shape, generator=torch.Generator().manual_seed(1))


def chances(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2))


TOGETHER = BuiltInLoss(
    (
        LossTerm(name="cross_entropy", outputs=3, label_smoothing=0.1, class_weights=(1.0, 2.0, 3.0)),
        LossTerm(name="huber", outputs=2, delta=0.5, weight=0.125),
        LossTerm(name="binary_cross_entropy", outputs=1, weight=2.0, positive_weights=(5.0,)),
        LossTerm(name="mse", outputs=1, weight=0.3),
    )
)
COLUMNS = torch.cat([classes(ROWS, 1, below=4).float(), drawn(ROWS, 2), classes(ROWS, 1, below=2), drawn(ROWS, 1)], 1)

CASES: dict[str, tuple[BuiltInLoss, Tensor, Tensor]] = {
    "classes": (cross_entropy, drawn(ROWS, 5), classes(ROWS, below=6, lowest=-1)),
    "many classes": (cross_entropy, drawn(ROWS, 513), classes(ROWS, below=513)),
    "weighed": (of("cross_entropy", class_weights=WEIGHTS), drawn(ROWS, 5), classes(ROWS)),
    "smoothed": (of("cross_entropy", label_smoothing=0.1), drawn(ROWS, 5), classes(ROWS)),
    "both": (of("cross_entropy", label_smoothing=0.1, class_weights=WEIGHTS), drawn(ROWS, 5), classes(ROWS)),
    "pixels": (of("cross_entropy", class_weights=WEIGHTS), drawn(ROWS, 5, 3, 7), classes(ROWS, 3, 7)),
    "tokens": (of("token_cross_entropy", label_smoothing=0.2), drawn(ROWS, 9, 5), classes(ROWS, 9)),
    "next tokens": (of("next_token_cross_entropy", class_weights=WEIGHTS), drawn(ROWS, 9, 5), classes(ROWS, 9)),
    "yes or no": (binary, drawn(ROWS, 1), classes(ROWS, below=2)),
    "yes or no, flat": (binary, drawn(ROWS), classes(ROWS, below=2)),
    "several labels": (of("binary_cross_entropy", label_smoothing=0.1), drawn(ROWS, 11), classes(ROWS, 11, below=2)),
    "chances": (of("binary_cross_entropy", positive_weights=(3.0, 1.0, 0.5)), drawn(ROWS, 3), chances(ROWS, 3)),
    "mask": (binary, drawn(ROWS, 1, 5, 9), classes(ROWS, 5, 9, below=2)),
    "numbers": (mse, drawn(ROWS, 33), drawn(ROWS, 33, scale=1)),
    "number": (mse, drawn(ROWS, 1), drawn(ROWS, scale=1)),
    "outliers": (of("huber", delta=0.7), drawn(ROWS, 33), drawn(ROWS, 33, scale=1)),
    "outlier": (huber, drawn(ROWS, 1), drawn(ROWS, scale=1)),
    "together": (TOGETHER, drawn(ROWS, 7), COLUMNS),
}


def both(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and their gradient."""
    leaf = output.clone().requires_grad_()
    losses = loss(leaf, labels)
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


@pytest.mark.parametrize("case", CASES)
def test_guarantee_a_row_has_the_same_bits_alone_and_in_any_batch(case: str) -> None:
    """Loss and gradient, at every place of batches of several sizes: a kernel may round its last values otherwise."""
    loss, output, labels = CASES[case]
    assert RowLoss(loss)._built_in
    alone = [both(loss, output[row : row + 1], labels[row : row + 1]) for row in range(ROWS)]
    for count in (2, 3, 7, 8, 9, 16, 31, ROWS):
        for start in range(0, ROWS - count + 1, 5):
            part = slice(start, start + count)
            losses, gradient = both(loss, output[part], labels[part])
            assert torch.equal(losses.nan_to_num(-1), torch.cat([each for each, _ in alone[part]]).nan_to_num(-1))
            assert torch.equal(gradient, torch.cat([each for _, each in alone[part]]))


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_one_number_an_example_and_runs_on_rows_alone_as_well(case: str) -> None:
    loss, output, labels = CASES[case]
    rows = RowLoss(lambda *pair: loss(*pair))
    torch.testing.assert_close(loss(output, labels), rows(output, labels), equal_nan=True)
    assert loss(output, labels).shape == (ROWS,)
    assert not rows.row_by_row


def means(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(1)


@pytest.mark.parametrize(
    ("case", "by_torch"),
    [
        ("weighed", lambda x, y: functional.cross_entropy(x, y, torch.tensor(WEIGHTS), reduction="none")),
        ("smoothed", lambda x, y: functional.cross_entropy(x, y, reduction="none", label_smoothing=0.1)),
        ("pixels", lambda x, y: means(functional.cross_entropy(x, y, torch.tensor(WEIGHTS), reduction="none"))),
        (
            "tokens",
            lambda x, y: means(functional.cross_entropy(x.mT, y, reduction="none", label_smoothing=0.2)),
        ),
        (
            "yes or no",
            lambda x, y: functional.binary_cross_entropy_with_logits(x[:, 0], y.float(), reduction="none"),
        ),
        (
            "several labels",
            lambda x, y: means(functional.binary_cross_entropy_with_logits(x, y * 0.9 + 0.05, reduction="none")),
        ),
        (
            "chances",
            lambda x, y: means(
                functional.binary_cross_entropy_with_logits(
                    x, y, reduction="none", pos_weight=torch.tensor([3.0, 1.0, 0.5])
                )
            ),
        ),
        ("numbers", lambda x, y: means(functional.mse_loss(x, y, reduction="none"))),
        ("outliers", lambda x, y: means(functional.huber_loss(x, y, reduction="none", delta=0.7))),
        ("outlier", lambda x, y: functional.huber_loss(x[:, 0], y, reduction="none")),
        (
            "together",
            lambda x, y: (
                functional.cross_entropy(
                    x[:, :3], y[:, 0].long(), torch.tensor([1.0, 2, 3]), reduction="none", label_smoothing=0.1
                )
                + 0.125 * means(functional.huber_loss(x[:, 3:5], y[:, 1:3], reduction="none", delta=0.5))
                + 2.0
                * functional.binary_cross_entropy_with_logits(
                    x[:, 5], y[:, 3], reduction="none", pos_weight=torch.tensor(5.0)
                )
                + 0.3 * (x[:, 6] - y[:, 4]).square()
            ),
        ),
    ],
)
def test_the_losses_are_torchs(case: str, by_torch: Callable[[Tensor, Tensor], Tensor]) -> None:
    loss, output, labels = CASES[case]
    if case == "together":
        known = labels[:, 0] < 3
        output, labels = output[known], labels[known]
    for found, expected in zip(both(loss, output, labels), both(by_torch, output, labels), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_logits_far_from_zero_stay_exact() -> None:
    losses, gradient = both(binary, torch.tensor([200.0, -200.0, 200.0, -200.0]), torch.tensor([1, 0, 0, 1]))
    assert losses.tolist() == [0, 0, 200, 200]
    assert gradient.tolist() == [0, 0, 1, -1]


@pytest.mark.parametrize(
    ("loss", "output", "labels"),
    [
        (binary, drawn(3, 2), torch.tensor([[0, 1], [0, 2], [1, 1]])),
        (binary, drawn(3, 2), torch.tensor([[0, 1], [0, torch.nan], [1, 1]])),
        (binary, drawn(3, 2), torch.tensor([[0, 1], [-0.5, 1], [1, 1]])),
        (of("cross_entropy", class_weights=(1.0, 5.0)), drawn(3, 2), torch.tensor([0, 2, 1])),
        (cross_entropy, drawn(3, 2, 4), torch.tensor([[0, 1, -100, 1], [0, 2, 1, 1], [1, 1, 1, 1]])),
        (TOGETHER, drawn(3, 7), torch.tensor([[2.0, 1, 1, 1, 1], [3.0, 1, 1, 1, 1], [0.0, 1, 1, 1, 1]])),
        (TOGETHER, drawn(3, 7), torch.tensor([[2.0, 1, 1, 1, 1], [torch.nan, 1, 1, 1, 1], [0.0, 1, 1, 1, 1]])),
        (TOGETHER, drawn(3, 7), torch.tensor([[2.0, 1, 1, 1, 1], [1.0, 1, 1, 7, 1], [0.0, 1, 1, 1, 1]])),
    ],
)
def test_a_label_that_is_none_gives_its_whole_example_no_gradient(loss: BuiltInLoss, output: Tensor, labels: Tensor):
    losses, gradient = both(loss, output, labels)
    assert losses.isnan().tolist() == [False, True, False]
    assert not gradient[1].any()
    assert gradient[0].any()
    assert gradient[2].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("loss", [mse, huber])
@pytest.mark.parametrize("label", [torch.nan, torch.inf])
def test_a_label_that_is_no_finite_number_has_no_finite_loss(loss: BuiltInLoss, label: float) -> None:
    """Under huber an infinite one would have a gradient like any outlier."""
    losses, gradient = both(loss, torch.zeros(2, 1), torch.tensor([1.0, label]))
    assert losses.isfinite().tolist() == gradient.isfinite()[:, 0].tolist() == [True, False]


def test_pixels_of_minus_100_are_not_counted() -> None:
    output, labels = drawn(2, 5, 6), classes(2, 6)
    labels[0, 1:] = -100
    losses, gradient = both(cross_entropy, output, labels)
    torch.testing.assert_close(losses[0], functional.cross_entropy(output[:1, :, 0], labels[:1, 0]))
    assert not gradient[0, :, 1:].any()
    assert gradient[0, :, 0].any()


def test_a_class_of_several_losses_may_stand_among_numbers() -> None:
    """Columns have one type; a class is then a number with a point. What is between two classes is the nearer one."""
    loss = BuiltInLoss((LossTerm(name="cross_entropy", outputs=3), LossTerm(name="mse", outputs=1)))
    output = drawn(3, 4)
    floats = loss(output, torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.2, 0.0]]))
    expected = functional.cross_entropy(output[:, :3], torch.tensor([0, 1, 2]), reduction="none")
    torch.testing.assert_close(floats, expected + (output[:, 3] - torch.tensor([0.5, 1.5, 0.0])).square())
    whole = torch.tensor([[0, 5], [1, 6], [2, 7]])
    assert torch.equal(loss(output, whole), loss(output, whole.float()))


@pytest.mark.parametrize(
    ("loss", "output", "labels", "says"),
    [
        (cross_entropy, (4, 3), (4, 1), r"logits \[n, classes, ...\] and class numbers \[n, ...\]"),
        (cross_entropy, (4,), (4,), r"logits \[n, classes, ...\]"),
        (binary, (4, 2), (4,), "one output for each label"),
        (mse, (4, 2), (4,), "as many outputs as labels"),
        (huber, (4, 2), (4,), "huber needs as many outputs as labels"),
        (TOGETHER, (4, 6), (4, 5), r"outputs \[n, 7\] and labels \[n, 5\]"),
        (TOGETHER, (4, 7), (4, 4), r"outputs \[n, 7\] and labels \[n, 5\]"),
        (of("cross_entropy", class_weights=(1.0, 2.0)), (4, 3), (4,), "class_weights has 2 numbers, and there are 3"),
        (of("binary_cross_entropy", positive_weights=(1.0,)), (4, 3), (4, 3), "positive_weights has 1 numbers"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_shapes(loss: BuiltInLoss, output, labels, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        loss(torch.zeros(output), torch.zeros(labels, dtype=torch.int64))
    assert caught.value.code == "loss_shape"
    assert re.search(says, f"{caught.value.message} {caught.value.remedy}")


def test_every_built_in_loss_is_here_at_its_defaults() -> None:
    assert all(loss.terms == (LossTerm.model_validate({"name": name}),) for name, loss in BUILT_IN_LOSSES.items())
    tried = {term.name for loss, *_ in CASES.values() for term in loss.terms}
    assert tried == set(BUILT_IN_LOSSES)
