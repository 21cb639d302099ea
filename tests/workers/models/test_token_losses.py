"""The losses of tokens: the mean over an example's own tokens, with the same bits alone and in any batch."""

import pytest
import torch
from torch.nn import functional

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.models.losses import BUILT_IN_LOSSES, next_token_cross_entropy, token_cross_entropy

LENGTH, CLASSES = 9, 13


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(11, LENGTH, CLASSES, generator=draw)
    labels = torch.randint(CLASSES, (11, LENGTH), generator=draw)
    for row in range(11):
        labels[row, row:] = -100
    return logits, labels


def test_an_example_counts_its_own_tokens(batch):
    logits, labels = batch
    for row, loss in enumerate(token_cross_entropy(logits, labels)):
        own = min(row, LENGTH)
        expected = functional.cross_entropy(logits[row, :own], labels[row, :own]) if own else torch.tensor(0.0)
        torch.testing.assert_close(loss, expected)


def test_a_token_is_judged_by_the_one_before_it(batch):
    logits, labels = batch
    for row, loss in enumerate(next_token_cross_entropy(logits, labels)):
        own = min(row, LENGTH) - 1
        expected = functional.cross_entropy(logits[row, :own], labels[row, 1 : own + 1]) if own > 0 else torch.zeros(())
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", ["token_cross_entropy", "next_token_cross_entropy"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 11])
def test_an_example_has_the_same_bits_alone(name, count, batch):
    """Loss and gradient: a row loss calls it on whole batches because of this."""
    logits, labels = batch
    loss = BUILT_IN_LOSSES[name]
    assert RowLoss(loss)._built_in

    def both(some):
        leaf = logits[some].clone().requires_grad_()
        losses = loss(leaf, labels[some])
        return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

    losses, gradients = both(slice(0, count))
    for row in range(count):
        alone, gradient = both(slice(row, row + 1))
        assert torch.equal(alone[0], losses[row])
        assert torch.equal(gradient[0], gradients[row])


@pytest.mark.parametrize("label", [-1, CLASSES, 2**40])
def test_a_label_of_no_class_is_no_error_and_no_gradient(label, batch):
    logits, labels = batch
    labels[10, 4] = label
    leaf = logits.clone().requires_grad_()
    losses = token_cross_entropy(leaf, labels)
    assert losses[10].isnan()
    assert not losses[:10].isnan().any()
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert not gradient[10].any()
    assert gradient[9].any()


def test_labels_of_another_shape_are_refused(batch):
    logits, labels = batch
    with pytest.raises(ModelError) as caught:
        token_cross_entropy(logits, labels[:, 0])
    assert caught.value.code == "loss_shape"
