"""Where the checks of a model run, how much they run, and what a batch of weighed losses shows.

What they refuse is tested by kind: test_row_places.py, test_read_values.py, test_kept_state.py, test_row_loss.py, and
tests/workers/models.
"""

import pytest
import torch
import transformers
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.model_checks import check_briefly, check_rows, check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.probes import odd_ids
from raycloak.workers.gradients.row_places import weighings
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import cross_entropy, token_cross_entropy
from raycloak.workers.models.text_model import TextModel
from tests.protocol import mechanism
from tests.workers.gradients.model_zoo import ZOO

VALUES = DatasetForm(num_examples=64, feature_shape=(4,), feature_dtype="float32", label_shape=(), label_dtype="int64")


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()
    torch.manual_seed(3)


def llama() -> TextModel:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=None,
        bos_token_id=7,
        eos_token_id=9,
    )
    return TextModel(transformers.LlamaForCausalLM(config)).train()


def texts(tokens: int) -> DatasetForm:
    return DatasetForm(
        num_examples=64, feature_shape=(tokens,), feature_dtype="int64", label_shape=(tokens,), label_dtype="int64"
    )


# --- where


def test_the_checks_make_every_tensor_on_the_device_of_the_model() -> None:
    """A device that none of them names is one without memory here, so what names none fails."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    with torch.device("meta"):
        check_briefly(model, VALUES, cross_entropy)
        check_trainable(model, VALUES, cross_entropy)
        check_rows(model, VALUES, cross_entropy, [mechanism(23, micro_batch_size=6)])


class Centred(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(0)


def test_two_rows_show_a_model_that_mixes_them() -> None:
    with pytest.raises(ModelError) as caught:
        check_briefly(nn.Sequential(Centred(), nn.Linear(4, 2)), VALUES, cross_entropy)
    assert caught.value.code == "mixing_layer"


# --- how much


@pytest.mark.parametrize(("own", "lengths"), [(False, {16}), (True, {40})])
def test_texts_are_short_but_where_a_loss_of_the_user_may_count_on_their_length(
    monkeypatch: pytest.MonkeyPatch, own: bool, lengths: set[int]
) -> None:
    met, forward = set[int](), TextModel.forward
    monkeypatch.setattr(TextModel, "forward", lambda self, ids: (met.add(ids.shape[1]), forward(self, ids))[1])

    def of_the_user(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.transpose(1, 2), labels, reduction="none").mean(1)

    check_trainable(llama(), texts(40), of_the_user if own else token_cross_entropy, vocabulary=50)
    assert met == lengths


def test_a_text_model_meets_the_ids_that_it_may_treat_otherwise() -> None:
    assert odd_ids(llama(), 50) == (-1, 7, 9, 50)
    # All negative ids are one and the same to it, and all beyond the vocabulary.
    model = llama().eval()
    rows = torch.tensor([[3, 4, each] for each in (-1, -100, 50, 2**20)])
    first, other, beyond, far = model(rows)
    assert torch.equal(first, other)
    assert torch.stack([beyond, far]).isnan().all()


# --- weighed losses


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 257, 4096])
def test_any_two_rows_have_other_weights_in_some_pass(count: int) -> None:
    digits = torch.stack(weighings(count, torch.device("cpu")), 1)
    assert len({tuple(row) for row in digits.tolist()}) == count
    assert set(digits.unique().tolist()) <= set(range(16))
    assert digits.shape[1] <= 3


class Swapped(nn.Module):
    """Swaps two rows inside and puts them back; the others stay."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__()
        self.layer, self.pair = nn.Linear(4, 4), (left, right)

    def forward(self, rows: Tensor) -> Tensor:
        order = torch.arange(len(rows))
        order[list(self.pair)] = order[list(self.pair[::-1])]
        return torch.tanh(self.layer(rows[order]))[order]


@pytest.mark.parametrize("pair", [(0, 1), (3, 19), (2, 18)])
def test_a_place_that_another_rows_loss_reaches_is_named_by_one_look(pair: tuple[int, int]) -> None:
    module, features, labels = Swapped(*pair), torch.randn(20, 4), torch.randint(2, (20,))
    look = GradientParts(module, cross_entropy).looked_at(features, labels, module)
    assert look.moved == "layer.weight"


@pytest.mark.parametrize("name", sorted(ZOO))
def test_one_look_gives_the_gradients_of_a_call_and_finds_no_row_that_moved(name: str) -> None:
    case = ZOO[name]()
    features, labels = case.batch(7)
    gradients = GradientParts(case.module, cross_entropy)
    look = gradients.looked_at(features, labels, case.module)
    assert look.moved is None
    for part, plain in zip(look.parts, gradients(features, labels), strict=True):
        assert torch.equal(part.rows(), plain.rows())


class GrownCentred(nn.Module):
    """Mixes rows in one mode alone, and only where parameters have grown."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.layer, self.only = nn.Linear(4, 2), training

    def forward(self, rows: Tensor) -> Tensor:
        large = torch.where(self.layer.weight.abs().max() > 2, 1.0, 0.0)
        return self.layer(rows - large * rows.mean(0) if self.training == self.only else rows)


@pytest.mark.parametrize("training", [False, True])
def test_rows_that_mix_once_parameters_have_grown_are_found_in_both_modes(training: bool) -> None:
    with pytest.raises(ModelError) as caught:
        check_trainable(GrownCentred(training), VALUES, cross_entropy)
    assert caught.value.code == "mixing_layer"
