"""Dropout is recognised by what a layer does, set to 0 and said; nothing else of a layer changes."""

import copy

import pytest
import torch
from torch import nn

import raycloak
from raycloak.metrics.errors import ModelError
from raycloak.workers.models.dropout import dropouts, silence_dropout
from raycloak.workers.models.models import check_layers
from raycloak.workers.models.text_model import as_text_model


class DropPath(nn.Module):
    """Drops whole examples in training, as libraries of image models have it."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, True

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        return x * torch.empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(keep) / keep


class StochasticDepth(nn.Module):
    """The same by other names, for images alone."""

    def __init__(self, p, mode):
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x):
        assert x.ndim == 4, "images"
        return x if self.p == 0.0 or not self.training else x * (torch.rand(len(x), 1, 1, 1) > self.p)


class Dimmed(nn.Module):
    """Has numbers between 0 and 1 and draws nothing."""

    def __init__(self):
        super().__init__()
        self.p, self.drop_prob = 0.5, 0.25

    def forward(self, x):
        return x * self.p


class Shaken(nn.Module):
    """Draws random numbers whatever its number is, so no number can silence it."""

    def __init__(self):
        super().__init__()
        self.p = 0.5

    def forward(self, x):
        return x + self.p * torch.randn_like(x)


def test_every_dropout_is_0_and_said():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25), nn.LSTM(2, 2, num_layers=2, dropout=0.5), DropPath(0.125))
    sentence = "dropout is set to 0 (1 was 0.25, 2.dropout was 0.5, 3.drop_prob was 0.125)."
    assert silence_dropout(module, by_name=False) == (sentence,)
    assert silence_dropout(module, by_name=False) == ()
    assert module[1].p == module[2].dropout == module[3].drop_prob == 0


@pytest.mark.parametrize(
    ("layer", "name"), [(DropPath(0.1), "drop_prob"), (StochasticDepth(0.1, "row"), "p"), (DropPath(1.0), "drop_prob")]
)
def test_a_layer_that_drops_rows_is_dropout_by_what_it_does(layer, name):
    given = copy.deepcopy(layer)
    state = torch.get_rng_state()
    assert list(dropouts(layer)) == [(name, getattr(given, name))]
    assert torch.equal(state, torch.get_rng_state())
    assert (layer.training, vars(layer).keys()) == (given.training, vars(given).keys())
    model = nn.Sequential(nn.Conv2d(1, 2, 1), layer)
    with pytest.raises(ModelError, match=r"random_layer.*Set its dropout to 0"):
        check_layers(model)
    fixed, done = raycloak.fix(model)
    assert done == (f"dropout is set to 0 (1.{name} was {getattr(given, name):g}).",)
    check_layers(fixed)
    assert as_text_model(model)[1] == done
    check_layers(model)


@pytest.mark.parametrize("layer", [Dimmed(), Shaken(), DropPath(0.0), nn.Linear(2, 2), nn.PReLU(), nn.GELU()])
def test_other_layers_stay_as_they_are(layer):
    given = copy.deepcopy(layer)
    assert as_text_model(layer) == (layer, ())
    assert {name: value for name, value in vars(layer).items() if isinstance(value, float)} == {
        name: value for name, value in vars(given).items() if isinstance(value, float)
    }


def test_a_number_of_a_users_module_is_no_dropout():
    class Dropping(nn.Linear):
        drop_below = 0.5

        def __init__(self):
            super().__init__(2, 2)
            self.drop_above = 3.0

    module = Dropping()
    assert as_text_model(module) == (module, ())
    assert module.drop_above == 3.0
