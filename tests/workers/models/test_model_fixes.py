"""Norms that keep still, and layers of Opacus that name each tensor once."""

import copy

import pytest
import torch
from torch import nn

import raycloak
from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.model_fixes import keep_still
from raycloak.workers.models.models import check_layers

IMAGES = DatasetForm(
    num_examples=64, feature_shape=(3, 4, 4), feature_dtype="float32", label_shape=(), label_dtype="int64"
)


def transfer():
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    backbone(torch.randn(8, 3, 4, 4))
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(16, 3))


def test_a_frozen_norm_in_evaluation_mode_stays_in_it_and_is_trained_around():
    module = transfer().eval()
    before = copy.deepcopy(module.state_dict())
    keep_still(module)
    assert not module.train()[0][1].training
    assert module[1].training
    check_layers(module)
    check_trainable(module, IMAGES, cross_entropy)
    module(torch.randn(8, 3, 4, 4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    again = copy.deepcopy(module).train()
    assert not again[0][1].training


def test_a_frozen_norm_in_training_mode_is_refused_with_a_remedy_that_keeps_its_features():
    with pytest.raises(ModelError) as caught:
        check_layers(transfer())
    assert caught.value.code == "mixing_layer"
    assert caught.value.remedy.startswith("Put it into evaluation mode")
    fixed, done = raycloak.fix(transfer())
    assert done == ("0.1: BatchNorm2d stays in evaluation mode, since it is frozen",)
    assert isinstance(fixed.train()[0][1], nn.BatchNorm2d)
    check_layers(fixed)


def test_a_norm_that_is_trained_does_not_keep_still():
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3)).eval()
    keep_still(module)
    assert module.train()[0].training
    assert isinstance(raycloak.fix(module)[0][0], nn.GroupNorm)


class NormAct(nn.BatchNorm2d):
    """A norm with an activation inside, as libraries of image models have it."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


class Doubled(nn.BatchNorm2d):
    """A norm that does more than its layers say."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_norm_with_an_activation_keeps_it_and_any_other_norm_is_not_replaced():
    fixed, _ = raycloak.fix(nn.Sequential(NormAct(4), Doubled(4)))
    assert [type(layer) for layer in fixed[0]] == [nn.GroupNorm, nn.ReLU]
    assert type(fixed[1]) is Doubled
    assert (fixed[0](torch.randn(2, 4, 3, 3)) >= 0).all()


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = getattr(nn, kind)(5, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_state_dictionary_of_a_fixed_recurrent_model_fits_the_users_own(kind):
    own = Recurrent(kind)
    fixed, _ = raycloak.fix(own)
    with torch.no_grad():
        for tensor in fixed.parameters():
            tensor.add_(0.1)
    state = fixed.state_dict()
    assert sorted(state) == sorted(own.state_dict())
    own.load_state_dict(state)
    x = torch.randn(3, 7, 5)
    assert torch.allclose(own(x), fixed(x), atol=1e-6)
    again, _ = raycloak.fix(Recurrent(kind))
    again.load_state_dict(state)
    assert torch.equal(again(x), fixed(x))


@pytest.mark.parametrize("given", [3, nn.Linear])
def test_what_is_no_module_is_refused_by_name(given):
    with pytest.raises(ModelError, match="model_kind: fix takes"):
        raycloak.fix(given)
