"""The report on a model and its mechanical mends, against the engine and against Opacus' validator."""

from typing import Any

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import nn

import raycloak
from raycloak.coordinator.cli.model import advice
from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.model_report import LayerReport, ModelReport, report_on
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import check_layers

FORM = DatasetForm(num_examples=100, feature_shape=(6, 5), feature_dtype="float32", label_shape=(), label_dtype="int64")


def check(model: nn.Module) -> None:
    check_trainable(model, FORM, cross_entropy)


class Sequence(nn.Module):
    """Some layers over six vectors of five numbers, and a head on the last of them."""

    def __init__(self, inner: nn.Module, width: int, takes: Any = lambda output: output) -> None:
        super().__init__()
        self.inner, self.head, self.takes = inner, nn.Linear(width, 3), takes

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.takes(self.inner(features))[:, -1])
        return output


def first(output: Any) -> Any:
    return output[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.attention = nn.Linear(5, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        wide = self.wide(features)
        output: torch.Tensor = self.attention(wide, wide, wide)[0]
        return output


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def image_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (6, 1)),
        nn.Conv2d(6, 8, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(40, 3),
    )


def by_name(report: ModelReport) -> dict[str, LayerReport]:
    return {layer.name: layer for layer in report.layers}


def test_every_layer_has_its_line():
    net = image_net()
    net[6].requires_grad_(False)
    report = by_name(report_on(net))
    assert {name: layer.status for name, layer in report.items()} == {
        "1": "trained",
        "2": "refused",
        "3": "no parameters",
        "4": "refused",
        "6": "frozen",
    }
    assert report["2"].reason.startswith("mixing_layer: layer '2' (BatchNorm2d) computes statistics over the batch")
    assert advice(report["2"]).endswith("raycloak.fix(model): GroupNorm(4, 8) in place of BatchNorm2d.")
    assert advice(report["3"]) == "raycloak.fix(model): ReLU out of place."
    assert "Set its dropout to 0" in report["4"].remedy
    assert sum(layer.parameters for layer in report.values()) == 6 * 8 + 8 + 16


def test_guarantee_a_fixed_model_trains_and_lists_what_was_done_and_the_given_one_stays():
    given = image_net().double()
    with torch.no_grad():
        given[2].weight.fill_(3.0)
    fixed, done = raycloak.fix(given)
    check(fixed)
    assert isinstance(given[2], nn.BatchNorm2d)
    assert given[3].inplace
    assert torch.equal(fixed[2].weight, torch.full((8,), 3.0))
    assert done[:2] == ("2: GroupNorm(4, 8) in place of BatchNorm2d", "3: ReLU out of place")
    assert done[2].startswith("dropout is set to 0 (4 was 0.5)")
    assert done[3:] == tuple(
        f"{name}: float32 in place of float64"
        for name in ("1.weight", "1.bias", "2.weight", "2.bias", "6.weight", "6.bias")
    )
    assert raycloak.fix(fixed)[1] == ()


def test_a_model_that_is_itself_such_a_layer_is_fixed():
    assert isinstance(raycloak.fix(nn.BatchNorm1d(6))[0], nn.GroupNorm)
    frozen, _ = raycloak.fix(nn.BatchNorm2d(48, affine=False).eval())
    assert isinstance(frozen, nn.GroupNorm)
    assert (frozen.num_groups, frozen.affine, frozen.training) == (16, False, False)


def test_no_group_has_a_single_number_to_normalise():
    """Such a group is a constant, whatever the example."""
    for kind, channels, groups in ((nn.BatchNorm1d, 64, 1), (nn.BatchNorm2d, 8, 4), (nn.BatchNorm2d, 7, 1)):
        fixed = raycloak.fix(kind(channels))[0]
        assert isinstance(fixed, nn.GroupNorm)
        assert fixed.num_groups == groups


def test_a_shared_layer_is_replaced_wherever_it_is():
    norm = nn.BatchNorm1d(6)
    fixed, done = raycloak.fix(nn.Sequential(norm, nn.Linear(5, 5), norm))
    assert len(done) == 2
    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in fixed.modules())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_replaced_by_one_that_computes_the_same_and_trains(kind: Any):
    torch.manual_seed(0)
    given = Sequence(kind(5, 4, num_layers=2, batch_first=True), 4, first)
    with pytest.raises(ModelError, match=r"unsupported_layer.*raycloak\.fix\(model\)"):
        check_layers(given)
    fixed, done = raycloak.fix(given)
    assert done[0].startswith(f"inner: opacus.layers.DP{kind.__name__} in place of {kind.__name__}")
    features = torch.randn(3, 6, 5)
    assert torch.allclose(given(features), fixed(features), atol=1e-6)
    check(fixed)


def test_a_recurrent_layer_without_a_counterpart_stays_and_is_refused():
    report = by_name(report_on(Sequence(nn.LSTM(5, 4, proj_size=2, batch_first=True), 2, first)))
    assert report["inner"].status == "refused"
    assert report["inner"].mechanical == ""


@pytest.mark.parametrize("inner", [Attention, encoder], ids=["MultiheadAttention", "TransformerEncoder"])
def test_attention_of_torch_needs_nothing(inner: Any):
    model = Sequence(inner(), 8 if inner is Attention else 5)
    assert raycloak.fix(model)[1] == ()
    assert report_on(model, check).refused == ()


def example(kind: type[nn.Module]) -> nn.Module:
    """Return a layer of a kind that Opacus' validator has an opinion on, as it is written at first."""
    name = kind.__name__
    if "BatchNorm" in name:
        return kind(6)
    if "InstanceNorm" in name:
        return kind(6, affine=True, track_running_stats=True)
    return kind(8, 2) if kind is nn.MultiheadAttention else kind(5, 4, batch_first=True)


@pytest.mark.parametrize("kind", sorted(ModuleValidator.VALIDATORS, key=lambda kind: kind.__name__))
def test_guarantee_what_opacus_would_replace_is_trained_as_it_is_or_named_and_mended(kind: type[nn.Module]):
    layer = example(kind)
    assert ModuleValidator.validate(layer, strict=False)
    if kind is nn.MultiheadAttention:
        check_layers(layer)
        return
    (report,) = report_on(layer).refused
    assert report.mechanical
    check_layers(raycloak.fix(layer)[0])


class Mixing(nn.Module):
    """A layer that no type gives away."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (features - features.mean(0)) * self.scale


def test_what_only_a_run_shows_is_told_of_its_layer_beside_what_types_tell():
    net = nn.Sequential(Mixing(), nn.Flatten(), nn.Linear(30, 3), nn.BatchNorm1d(3))
    report = report_on(net, check)
    assert [layer.name for layer in report.refused] == ["0", "3"]
    assert by_name(report)["0"].reason.startswith("mixing_layer: layer '0' mixes the examples")
    assert report.was_run
    assert [layer.name for layer in report_on(net).refused] == ["3"]
