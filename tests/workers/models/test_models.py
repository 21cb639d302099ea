"""Models are built the same everywhere, flattened in one order, and refused by layer if they cannot be trained."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.attestation.core.messages import parse
from raycloak.attestation.core.roster import Query
from raycloak.metrics.errors import ConfigError, ModelError, ProtocolError
from raycloak.workers.gradients import model_checks
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.inputs.datasets import ArrayDataset, DatasetForm, dataset_form
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.models.losses import cross_entropy, mse
from raycloak.workers.models.models import (
    LossFn,
    ModelSource,
    build_model,
    check_layers,
    load_flat,
    loss_function,
    parameter_count,
    read_flat,
    trainable_tensors,
    twin_of,
)
from raycloak.workers.terms.loss import LossSpec
from tests.protocol import mechanism
from tests.workers.gradients.model_zoo import HiddenProduct

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FORM = DatasetForm(num_examples=100, feature_shape=(6,), feature_dtype="float32", label_shape=(), label_dtype="int64")


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class MixingInEvaluation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x - x.mean(0)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(())


class RareNoise(nn.Module):
    """A layer that draws every time, and changes its output once in 2^50."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand((), dtype=torch.float64) >= 2.0**-50)


class NumpyNoise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + NUMPY_STREAM.random()


class UnusedNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = NumpyNoise()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise(x)
        return x


NUMPY_STREAM = np.random.default_rng(0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


class Bypassing(nn.Module):
    """A model that uses a layer's weight in an operation that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HiddenProduct.apply(x, self.inner.weight)


class TwiceUsed(nn.Module):
    """A model that uses a weight through its layer and unseen beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + HiddenProduct.apply(x, self.inner.weight)


class BesideItsLayer(nn.Module):
    """A model that uses a weight through its layer and beside it, in an operation that torch shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + nn.functional.linear(x, self.inner.weight)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone().mul_(self.scale)


class Overwritten(nn.Module):
    """Changes a layer's input after the layer has run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        found = self.inner(x)
        x += 1
        return found + x


class Counted(nn.Module):
    """Counts its table's ids over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3, scale_grad_by_freq=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words((x > 0).long()).sum(1)


class CountedPlaces(nn.Module):
    """Adds what it learns of six places, which it counts along a row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x[:, :, None] + self.places(torch.ones_like(x[0]).cumsum(0).long() - 1)).sum(1))


class BatchSecond(nn.Module):
    """A model that hands its layer [time, batch, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.reshape(len(x), 3, 2).transpose(0, 1)).sum(0)


class ChannelsLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), 2, 3, 1).contiguous(memory_format=torch.channels_last)


class TrimmedTo(nn.Module):
    """A model of texts on as many positions as the longest or shortest of the batch needs, by one usual way."""

    def __init__(self, way: str, padding: int = 0, words: int = 11) -> None:
        super().__init__()
        self.way, self.padding = way, padding
        self.words = nn.Embedding(words, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids, real = ids.clamp(0, self.words.num_embeddings - 1), ids != self.padding
        match self.way:
            case "the number of words":
                kept = ids[:, : max(1, int(real.sum(1).max()))]
            case "the last word":
                kept = ids[:, : 1 + int((real * torch.arange(ids.shape[1])).max())]
            case "the first word":
                kept = ids[:, int((~real).cumprod(1).sum(1).min().clamp(max=ids.shape[1] - 1)) :]
            case _:
                kept = ids[:, : max(1, int(real.sum(1).min()))]
        return self.head(torch.tanh(self.words(kept).mean(1)))


class MaskUnlessFull(nn.Module):
    """A model that averages over the words of a text, and skips the mask where no text of the batch has padding."""

    def __init__(self) -> None:
        super().__init__()
        # So many that no ordinary draw has the padding.
        self.words = nn.Embedding(1000, 6, padding_idx=4)
        self.scale = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        real = (ids != 4).float()[:, :, None]
        words = self.words(ids)
        if not bool((real == 1).all()):
            words = self.scale(words) * real
        return self.head(words.sum(1))


class EqualRowsAtOnce(nn.Module):
    """A layer that computes one row where all rows are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:1]).expand(len(x), 3) if bool((x == x[:1]).all()) else self.inner(x)


class DividesByRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / len(x)


class MixesBeyond(nn.Module):
    """A layer that mixes the rows of batches of more than eight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if len(x) > 8 else x


class Puts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone().put_(torch.tensor([0]), torch.ones(1))


def around(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 3))


def refusal(
    module: nn.Module, form: DatasetForm = FORM, loss: LossFn = cross_entropy, vocabulary: int | None = None
) -> tuple[str, str]:
    with pytest.raises(ModelError) as caught:
        check_trainable(module, form, loss, vocabulary=vocabulary)
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(
    ("module", "code", "named"),
    [
        (around(nn.BatchNorm1d(6)), "mixing_layer", "'1' (BatchNorm1d)"),
        (around(nn.BatchNorm1d(6, affine=False)), "mixing_layer", "'1' (BatchNorm1d)"),
        (around(nn.SyncBatchNorm(6)), "mixing_layer", "SyncBatchNorm"),
        (around(nn.Sequential(nn.Dropout(0.1))), "random_layer", "'1.0' (Dropout)"),
        (nn.MultiheadAttention(6, 2, dropout=0.1), "random_layer", "MultiheadAttention"),
        (nn.GRU(6, 3), "unsupported_layer", "GRU"),
        (nn.LSTM(6, 3), "unsupported_layer", "LSTM"),
        (around(nn.InstanceNorm1d(6, affine=True, track_running_stats=True)), "unsupported_layer", "InstanceNorm1d"),
        (nn.Linear(6, 3).double(), "parameter_dtype", "'weight'"),
        (nn.Linear(6, 3).half(), "parameter_dtype", "'weight'"),
        (nn.Linear(6, 3).requires_grad_(False), "no_trainable_parameters", "requires_grad"),
    ],
)
def test_layers_are_refused_by_their_type_and_name(module: nn.Module, code: str, named: str) -> None:
    assert refusal(module)[0] == code
    assert named in refusal(module)[1]
    with pytest.raises(ModelError):
        check_layers(module)


@pytest.mark.parametrize(
    ("module", "code", "named"),
    [
        (around(nn.Sequential(Mixing())), "mixing_layer", "'1.0'"),
        (around(nn.Sequential(MixingInEvaluation())), "mixing_layer", "'1.0'"),
        (around(Noisy()), "random_layer", "'1'"),
        (around(RareNoise()), "random_layer", "'1'"),
        (around(NumpyNoise()), "random_layer", "'1'"),
        (around(UnusedNoise()), "random_layer", "'1.noise'"),
        (around(nn.Sequential(Counting())), "buffer_update", "'1.0.calls'"),
        (Bypassing(), "unsupported_layer", "'inner.weight'"),
        (TwiceUsed(), "unsupported_layer", "'inner.weight'"),
        (BatchSecond(), "unsupported_layer", "'inner.weight'"),
        (nn.Sequential(InPlace(), nn.Linear(6, 3)), "unsupported_layer", "'0.scale' is used by mul_"),
        (around(Overwritten()), "unsupported_layer", "'1.inner.weight'"),
        (Counted(), "unsupported_layer", "'words.weight'"),
        (around(Puts()), "nondeterministic_op", "put_"),
        (nn.Linear(7, 3), "model_input", "[n, 6]"),
        (nn.Sequential(nn.Linear(6, 3), nn.Flatten(0)), "model_input", "row per example"),
    ],
)
def test_layers_are_refused_by_what_they_do(module: nn.Module, code: str, named: str) -> None:
    assert refusal(module)[0] == code
    assert named in refusal(module)[1]


def test_labels_with_a_point_under_a_loss_of_classes_are_told() -> None:
    with pytest.raises(ModelError, match=r"model_input: .* classes are whole numbers\."):
        check_trainable(nn.Linear(6, 3), FORM.model_copy(update={"label_dtype": "float32"}), cross_entropy)


TEXTS = FORM.model_copy(update={"feature_dtype": "int64", "feature_shape": (9,)})


@pytest.mark.parametrize(
    "module",
    [
        TrimmedTo("the number of words"),
        TrimmedTo("the last word"),
        TrimmedTo("the first word"),
        TrimmedTo("the shortest"),
        TrimmedTo("the number of words", padding=1),
        TrimmedTo("the number of words", padding=10),
        TrimmedTo("the number of words", padding=-1),
        TrimmedTo("the last word", padding=-100),
        TrimmedTo("the last word", padding=2**20),
        MaskUnlessFull(),
    ],
    ids=lambda module: f"{getattr(module, 'way', 'mask')} {getattr(module, 'padding', '')}",
)
def test_a_model_whose_shapes_follow_its_longest_text_is_refused_with_the_fix(
    module: TrimmedTo | MaskUnlessFull,
) -> None:
    with pytest.raises(ModelError) as caught:
        check_trainable(module, TEXTS, cross_entropy, vocabulary=module.words.num_embeddings)
    assert caught.value.code == "mixing_layer"
    assert "trimmed to its longest text" in caught.value.message
    assert "'words'" in caught.value.message or "'scale'" in caught.value.message
    assert "one fixed length" in caught.value.remedy


def test_a_text_model_that_masks_by_each_text_alone_is_accepted() -> None:
    class Masked(TrimmedTo):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            real = (ids != 0).float()[:, :, None]
            return self.head((self.words(ids) * real).sum(1) / real.sum(1).clamp(min=1))

    check_trainable(Masked(""), TEXTS, cross_entropy, vocabulary=11)
    check_rows(Masked(""), TEXTS, cross_entropy, [mechanism(83, micro_batch_size=12)], vocabulary=11)


def test_a_batch_of_equal_rows_and_a_batch_of_one_row_are_tried() -> None:
    assert refusal(EqualRowsAtOnce())[0] == "mixing_layer"
    code, message = refusal(around(DividesByRows()))
    assert code == "mixing_layer"
    assert "another output alone" in message


def test_values_in_one_batch_do_not_hide_each_other() -> None:
    """NaN and large values stand in the same batch: the second fault shows in the row that met others before."""

    class MixesLarge(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0) if (x == 1e4).any() and not x.isnan().any() else x

    code, message = refusal(nn.Sequential(MixesLarge(), nn.Linear(6, 3)))
    assert (code, "'0' mixes the examples" in message) == ("mixing_layer", True)


def test_ordinary_rows_are_compared_among_odd_ones() -> None:
    """The odd rows themselves stay as they are."""

    class MovesOthers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            odd = x[:, :1] == x[:, -1:]
            return torch.where(~odd & odd.any(), x + 1, x)

    code, message = refusal(nn.Sequential(MovesOthers(), nn.Linear(6, 3)))
    assert (code, "'0' mixes the examples" in message) == ("mixing_layer", True)


def test_a_value_that_a_batch_may_not_consist_of_is_tried_among_others() -> None:
    class MixesMissing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            missing = x.isnan().any(1)
            if missing.all():
                raise ValueError("nothing is left")
            return x - x[~missing].mean(0) if missing.any() else x

    code, message = refusal(nn.Sequential(MixesMissing(), nn.Linear(6, 3)))
    assert (code, "'0' mixes the examples" in message) == ("mixing_layer", True)


@pytest.mark.parametrize("padding", [0, 1])
def test_padding_is_tried_where_there_are_no_other_ids_than_padding(padding: int) -> None:
    assert refusal(TrimmedTo("the last word", padding, words=2), TEXTS, vocabulary=2)[0] == "mixing_layer"
    assert refusal(TrimmedTo("the shortest", padding, words=2), TEXTS, vocabulary=2)[0] == "mixing_layer"


class MixesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


@pytest.mark.parametrize("rows", [5, 7, 12])
def test_gradients_are_compared_at_each_size(rows: int) -> None:
    """The forward pass shows nothing."""

    class OnlyThen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MixesGradients.apply(x) if len(x) == rows else x

    module = around(OnlyThen())
    code, message = refusal(module) if rows < 8 else refusal_of_rows(module)
    assert (code, "another's row where parameter '0." in message) == ("moved_rows", True)


def test_a_micro_batch_is_computed_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once ordinary, once filled with each of ten ids, once mixed, two rows alone; and with gradients ordinary, mixed,
    of other lengths, and with one other row."""
    counts: list[int] = []
    forward = model_checks.watched_pass
    monkeypatch.setattr(
        model_checks,
        "watched_pass",
        lambda module, rows, **more: counts.append(len(rows)) or forward(module, rows, **more),
    )
    module = nn.Sequential(nn.Embedding(11, 5), nn.Flatten(), nn.Linear(45, 3))
    check_rows(module, TEXTS, cross_entropy, [mechanism(193, micro_batch_size=12)], vocabulary=11)
    # Of the ten, 0, 1 and 10 are in the table: each other one is also tried in one row.
    assert (counts.count(12), counts.count(1)) == (1 + 10 + 7 + 1 + 4, 2)


def refusal_of_rows(module: nn.Module, form: DatasetForm = FORM, vocabulary: int | None = None) -> tuple[str, str]:
    """What the micro-batch of twelve rows is refused for, of a module that small batches show nothing of."""
    check_trainable(module, form, cross_entropy, vocabulary=vocabulary)
    plan = mechanism(sum(tensor.numel() for tensor in module.parameters()), micro_batch_size=12)
    with pytest.raises(ModelError) as caught:
        check_rows(module, form, cross_entropy, [plan], vocabulary=vocabulary)
    return caught.value.code, caught.value.message


def test_padding_is_tried_at_the_physical_micro_batch() -> None:
    """An id that no ordinary draw has."""

    class TrimsMany(TrimmedTo):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if len(ids) > 7:
                return super().forward(ids)
            return self.head(torch.tanh(self.words(ids.clamp(0, 10)).mean(1)))

    code, message = refusal_of_rows(TrimsMany("the last word", padding=-100), TEXTS, vocabulary=11)
    assert code == "mixing_layer"
    assert "trimmed to its longest text" in message


def test_a_row_alone_is_compared_with_the_physical_micro_batch() -> None:
    class DividesMany(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / len(x) if len(x) > 7 else x

    code, message = refusal_of_rows(around(DividesMany()))
    assert code == "mixing_layer"
    assert "another output alone than in a batch of 12" in message


def test_batches_of_two_distributions_are_tried() -> None:
    """Values between 0 and 1, and normal ones: these alone have large values of both signs."""

    class MixesBothSigns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = (x > 1).any() and (x < -0.5).any() and (x.abs() < 100).all()
            return x - x.mean(0) if both else x

    assert refusal(nn.Sequential(MixesBothSigns(), nn.Linear(6, 3)))[0] == "mixing_layer"


@pytest.mark.parametrize("rows", [5, 7])
def test_batches_of_two_sizes_are_tried(rows: int) -> None:
    class MixesBatchesOf(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0) if len(x) == rows else x

    code, message = refusal(around(MixesBatchesOf()))
    assert (code, "'1' mixes the examples" in message) == ("mixing_layer", True)


@pytest.mark.parametrize("query", ["gradient", "evaluation"])
def test_the_physical_micro_batch_of_a_run_is_tried_in_the_mode_that_it_computes_in(query: Query) -> None:
    class OnlyThen(MixesBeyond):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.training == (query == "gradient") else x

    module = around(OnlyThen())
    check_trainable(module, FORM, cross_entropy)
    other: Query = "evaluation" if query == "gradient" else "gradient"
    check_rows(module, FORM, cross_entropy, [mechanism(83, query=query, micro_batch_size=8)])
    check_rows(module, FORM, cross_entropy, [mechanism(83, query=other, micro_batch_size=9)])
    with pytest.raises(ModelError) as caught:
        check_rows(module, FORM, cross_entropy, [mechanism(83, query=query, micro_batch_size=9)])
    assert caught.value.code == "mixing_layer"


def test_an_extent_that_equals_the_micro_batch_by_chance_is_refused() -> None:
    module = CountedPlaces()
    check_trainable(module, FORM, cross_entropy)
    check_rows(module, FORM, cross_entropy, [mechanism(30, micro_batch_size=8)])
    with pytest.raises(ModelError, match=r"another's row where parameter 'places\.weight'"):
        check_rows(module, FORM, cross_entropy, [mechanism(30, micro_batch_size=6)])


def test_what_is_taken_as_the_same_for_all_rows_and_depends_on_examples_is_refused() -> None:
    """One list of all rows' tokens, of which each row sees its own: outputs and gradients keep apart."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 5), nn.Linear(5, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            own = torch.eye(len(ids), dtype=torch.bool).repeat_interleave(ids.shape[1], 1)
            words = self.words(ids.clamp(0, 10).reshape(-1))
            return self.head(torch.where(own[:, :, None], words, 0.0).sum(1))

    code, message = refusal(Packed(), TEXTS, vocabulary=11)
    assert (code, "parameter 'words.weight' meets a tensor that depends on examples" in message) == (
        "unsupported_layer",
        True,
    )


def test_a_loss_with_a_memory_is_refused() -> None:
    class Running:
        mean = 0.0

        def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            losses = cross_entropy(output, labels)
            self.mean = 0.5 * self.mean + 0.5 * float(losses.detach().mean())
            return losses / (1 + self.mean)

    class RemembersIgnored:
        seen = False

        def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen or -100 in labels.tolist()
            return output.square().mean(1) * (1 + self.seen)

    assert refusal(nn.Linear(6, 3), loss=Running())[0] == "mixing_loss"
    assert refusal(nn.Linear(6, 3), loss=RemembersIgnored())[0] == "mixing_loss"


def test_a_loss_over_the_whole_batch_is_refused() -> None:
    module = nn.Linear(6, 3)
    assert refusal(module, loss=lambda out, y: cross_entropy(out, y).mean())[0] == "loss_shape"
    assert refusal(module, loss=lambda out, y: cross_entropy(out, y) * out.std())[0] == "mixing_loss"
    assert refusal(module, loss=lambda out, y: cross_entropy(out, y) * (1 + y.sum()))[0] == "mixing_loss"
    assert refusal(module, loss=mse)[0] == "loss_shape"


def test_layers_that_keep_examples_apart_are_accepted() -> None:
    module = around(
        nn.Dropout(0.0), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), Offset(), nn.Tanh(), BesideItsLayer()
    )
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    check_trainable(module, FORM, cross_entropy)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not any(hasattr(tensor, "grad_sample") or tensor.grad is not None for tensor in module.parameters())


def test_channels_last_are_accepted() -> None:
    check_trainable(nn.Sequential(ChannelsLast(), nn.Conv2d(2, 3, (2, 1)), nn.Flatten()), FORM, cross_entropy)


def test_a_layer_initialised_to_zero_hides_nothing() -> None:
    module = nn.Sequential(TwiceUsed(), nn.Linear(6, 3))
    nn.init.zeros_(module[1].weight)
    assert refusal(module)[0] == "unsupported_layer"


def test_sequences_and_regression_are_accepted() -> None:
    tokens = FORM.model_copy(update={"feature_dtype": "int64"})
    embedding = nn.Sequential(nn.Embedding(4, 5), nn.Flatten(), nn.Linear(30, 3))
    check_trainable(embedding, tokens, cross_entropy, vocabulary=4)
    with pytest.raises(ConfigError, match="vocabulary: features are integers"):
        check_trainable(embedding, tokens, cross_entropy)
    assert refusal(embedding, tokens, vocabulary=5)[0] == "model_input", "an id beyond the table is drawn, too"
    values = FORM.model_copy(update={"label_dtype": "float32", "label_shape": (2,)})
    check_trainable(nn.Linear(6, 2), values, mse)


@pytest.mark.parametrize(
    ("folder", "function", "shape", "size"),
    [
        (EXAMPLES, "models:digits_mlp", (64,), 4_810),
        (EXAMPLES / "mnist", "recipes:cnn", (28, 28), 26_010),
        (EXAMPLES / "mnist", "recipes:scattering_linear", (201,), 2_010),
    ],
)
def test_the_example_models_are_trainable(folder: Path, function: str, shape: tuple[int, ...], size: int) -> None:
    data = ArrayDataset(np.zeros((9, *shape), np.float32), np.zeros(9, np.int64))
    module = build_model(ModelSource.of(function), folder, 0)
    assert parameter_count(module) == size
    check_trainable(module, dataset_form(data), cross_entropy)


def test_the_digits_example_fits_its_data() -> None:
    form = dataset_form(DatasetDescriptor(kind="digits").open(EXAMPLES))
    check_trainable(build_model(ModelSource.of("models:digits_mlp"), EXAMPLES, 0), form, cross_entropy)


def test_the_public_seed_determines_the_initial_parameters() -> None:
    source = ModelSource.of("models:digits_mlp")
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first, again, other = (read_flat(build_model(source, EXAMPLES, seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_a_callable_travels_with_the_digest_of_its_source() -> None:
    width = 5

    def make() -> nn.Module:
        return nn.Linear(6, width)

    source = parse(ModelSource, ModelSource.of(make).encode())
    assert parameter_count(build_model(source, ".", 0)) == 35
    assert source.code_digest(".") == ModelSource.of(make).code_digest(".")
    assert len(source.code_digest(".")) == 32
    named = ModelSource.of("models:digits_mlp")
    assert named.code_digest(EXAMPLES) != source.code_digest(EXAMPLES)


def test_guarantee_a_function_travels_as_one_field_that_its_digest_names() -> None:
    source = ModelSource.of(lambda: nn.Linear(6, 5))
    assert source.function is not None
    assert source.function.pickled_digest == hashlib.sha256(source.function.pickled).digest()
    other = ModelSource.of(lambda: nn.Linear(6, 4))
    assert other.function is not None
    forged = source.function.model_copy(update={"pickled": other.function.pickled})
    with pytest.raises(ProtocolError) as refusal:
        parse(ModelSource, source.model_copy(update={"function": forged}).encode())
    assert refusal.value.code == "malformed"


def test_a_function_that_fails_or_gives_something_else_is_refused() -> None:
    for make, part in ((lambda: 1 / 0, "ZeroDivisionError"), (lambda: 3, "returned a int")):
        with pytest.raises(ModelError) as caught:
            build_model(ModelSource.of(make), ".", 0)
        assert caught.value.code == "model_function"
        assert part in caught.value.message
    with pytest.raises(ConfigError) as missing:
        build_model(ModelSource.of("models:none"), EXAMPLES, 0)
    assert missing.value.code == "module_function"


def test_only_trained_tensors_are_flattened_in_canonical_order() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    module[0].bias.requires_grad_(False)
    assert [(tensor.name, tensor.shape) for tensor in trainable_tensors(module)] == [
        ("0.weight", (2, 2)),
        ("1.weight", (1, 2)),
        ("1.bias", (1,)),
    ]
    vector = np.arange(7, dtype=np.float32)
    vector.setflags(write=False)
    kept = module[0].bias.detach().clone()
    load_flat(module, vector)
    assert module[0].weight.tolist() == [[0, 1], [2, 3]]
    assert module[1].bias.tolist() == [6]
    assert torch.equal(module[0].bias, kept)
    assert read_flat(module).tobytes() == vector.tobytes()
    read_flat(module)[:] = 9
    assert read_flat(module).tobytes() == vector.tobytes()


def test_losses_are_per_example() -> None:
    output = torch.tensor([[2.0, 0.0], [0.0, 3.0]], requires_grad=True)
    labels = torch.tensor([0, 0])
    expected = -torch.log_softmax(output, 1)[:, 0]
    torch.testing.assert_close(cross_entropy(output, labels), expected)
    sequence = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([[0, 1, 2], [3, 3, 3]])
    by_hand = torch.stack([cross_entropy(sequence[:, :, t], classes[:, t]) for t in range(3)]).mean(0)
    torch.testing.assert_close(cross_entropy(sequence, classes), by_hand)
    torch.testing.assert_close(mse(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 4.0])), torch.tensor([1.0, 4.0]))
    both = mse(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]]))
    torch.testing.assert_close(both, torch.tensor([2.5]))


def test_a_label_that_is_no_class_has_no_gradient() -> None:
    output = torch.zeros(3, 2, requires_grad=True)
    losses = cross_entropy(output, torch.tensor([0, 2, -100]))
    assert losses.isnan().tolist() == [False, True, True]
    losses.sum().backward()
    assert output.grad is not None
    assert not output.grad[1:].any()
    assert output.grad[0].any()


def test_losses_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("def hinge(out, y): return (1 - out[:, 0]).clamp(min=0)\n")
    assert loss_function(LossSpec.of("mse"), tmp_path) == (mse, b"")
    function, code = loss_function(LossSpec.of("losses:hinge"), tmp_path)
    assert function(torch.zeros(4, 2), torch.zeros(4)).tolist() == [1] * 4
    assert len(code) == 32
    with pytest.raises(ConfigError):
        loss_function(LossSpec.of("losses:entropy"), tmp_path)


def test_a_twin_shares_the_frozen_parameters_and_no_others() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    twin = twin_of(module)
    for (name, own), (_, other) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert (own is other) == (not own.requires_grad), name
        assert torch.equal(own, other)
    # Nothing that either computes changes the other.
    assert not {id(each) for each in module.buffers()} & {id(each) for each in twin.buffers()}
    twin.eval()
    assert module.training
