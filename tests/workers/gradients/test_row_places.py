"""Rows keep their places: models whose output keeps examples apart, and which move rows inside."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.clipping import CLIP_MARGIN, GradientEngine
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.model_checks import check_released, check_rows, check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.row_places import SilentRows, silences
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import read_flat
from tests.protocol import mechanism
from tests.workers.gradients.model_zoo import ZOO

VOCABULARY, LENGTH, WIDTH, ROWS = 500, 12, 8, 16
TEXTS = DatasetForm(
    num_examples=64, feature_shape=(LENGTH,), feature_dtype="int64", label_shape=(), label_dtype="int64"
)


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()
    torch.manual_seed(3)


class Encoder(nn.Module):
    """A classifier of texts: words, one layer over each word, their mean, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoded(ids.clamp(0, VOCABULARY - 1)))

    def encoded(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.words(ids))).mean(1)


class SortedByLength(Encoder):
    """The idiom of every tutorial of recurrent networks."""

    def encoded(self, ids: Tensor) -> Tensor:
        order = (ids != 0).sum(1).argsort(descending=True, stable=True)
        return super().encoded(ids[order])[order.argsort()]


class SortedInALayer(Encoder):
    """Sorts by what a layer computed, and puts back before the next one."""

    def encoded(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        order = words.mean((1, 2)).argsort()
        return torch.tanh(self.layer(words[order]))[order.argsort()].mean(1)


class TopK(Encoder):
    def encoded(self, ids: Tensor) -> Tensor:
        scores = self.words(ids).mean((1, 2))
        order = scores.topk(len(ids)).indices
        return super().encoded(ids[order])[order.argsort()]


class Gathered(Encoder):
    def encoded(self, ids: Tensor) -> Tensor:
        order = ids.sum(1).argsort()
        back = order.argsort()[:, None].expand(-1, WIDTH)
        return super().encoded(ids.gather(0, order[:, None].expand_as(ids))).gather(0, back)


class Rolled(Encoder):
    def encoded(self, ids: Tensor) -> Tensor:
        return super().encoded(ids.roll(1, 0)).roll(-1, 0)


class Flipped(Encoder):
    def encoded(self, ids: Tensor) -> Tensor:
        return super().encoded(ids.flip(0)).flip(0)


class FixedOrder(Encoder):
    """A permutation that a buffer holds; it moves two rows alone, and only where there are so many."""

    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("order", torch.tensor([*range(rows - 2), rows - 1, rows - 2]))

    def encoded(self, ids: Tensor) -> Tensor:
        if len(ids) != self.rows:
            return super().encoded(ids)
        return super().encoded(ids[self.order])[self.order]


class Buckets(Encoder):
    """Short texts first, then long ones: each bucket keeps its order."""

    def encoded(self, ids: Tensor) -> Tensor:
        order = ((ids != 0).sum(1) > LENGTH // 2).long().argsort(stable=True)
        return super().encoded(ids[order])[order.argsort()]


class Packed(Encoder):
    """A recurrent layer over packed texts, of its own cells, since torch's hides from taps."""

    def encoded(self, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        data = torch.tanh(self.layer(packed.data))
        padded, _ = pad_packed_sequence(packed._replace(data=data), batch_first=True, total_length=LENGTH)
        return padded.mean(1)


MOVING = [SortedByLength, SortedInALayer, TopK, Gathered, Rolled, Flipped, FixedOrder, Buckets]


@pytest.mark.parametrize("kind", MOVING)
def test_a_model_that_moves_rows_and_puts_them_back_is_refused_before_a_charge(kind: type[Encoder]) -> None:
    with pytest.raises(ModelError) as caught:
        check_trainable(kind(), TEXTS, cross_entropy, vocabulary=VOCABULARY)
    assert caught.value.code == "moved_rows"
    assert "parameter 'layer.weight'" in caught.value.message or "parameter 'words.weight'" in caught.value.message


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(ModelError) as caught:
        check_trainable(Packed(), TEXTS, cross_entropy, vocabulary=VOCABULARY)
    assert caught.value.code in ("mixing_layer", "moved_rows", "unsupported_layer")


def test_rows_that_move_at_the_physical_micro_batch_alone_are_refused() -> None:
    plan = mechanism(VOCABULARY * WIDTH + WIDTH * (WIDTH + 1) + 2 * (WIDTH + 1), micro_batch_size=ROWS)
    module = FixedOrder(ROWS)
    check_trainable(module, TEXTS, cross_entropy, vocabulary=VOCABULARY)
    with pytest.raises(ModelError, match="moved_rows"):
        check_rows(module, TEXTS, cross_entropy, [plan], vocabulary=VOCABULARY)


class Cautious(nn.Module):
    """Clips the gradient of an activation by the norm of the batch's: the forward pass shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * (5.0 / (gradient.norm() + 1e-6)).clamp(max=1.0))
        return self.last(torch.relu(hidden))


class FilledMissing(nn.Module):
    """A table whose missing values are filled with the mean of the batch's column."""

    def __init__(self, missing: float) -> None:
        super().__init__()
        self.missing, self.head = missing, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        missing = x == self.missing
        mean = torch.where(missing, 0.0, x).sum(0) / (~missing).sum(0).clamp(min=1)
        return self.head(torch.where(missing, mean, x))


class FilledInfinite(nn.Module):
    """Infinite values are replaced by the largest finite one of the batch, without a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        largest = torch.where(x.isinf(), -3e38, x).amax()
        return self.head(torch.where(x.isinf(), largest, x))


class Emptied(nn.Module):
    """Examples are dropped if one of the batch is out of range; no comparison with NaN says so."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.where(x.abs().amax() > 1e6, x * 0, x))


TABLE = DatasetForm(num_examples=64, feature_shape=(6,), feature_dtype="float32", label_shape=(), label_dtype="int64")


@pytest.mark.parametrize(
    "module",
    [Cautious(), FilledInfinite(), Emptied(), *map(FilledMissing, (-999.0, -9999.0, -1e4, 255.0, 65535.0))],
    ids=lambda module: f"{type(module).__name__} {getattr(module, 'missing', '')}",
)
def test_rows_that_meet_by_a_value_that_stands_for_something_are_refused(module: nn.Module) -> None:
    with pytest.raises(ModelError, match="mixing_layer"):
        check_trainable(module, TABLE, cross_entropy)


class MixesOnceGrown(nn.Module):
    """Mixes rows with large weights alone, as a saturated gate might."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        large = self.head.weight.detach().abs().amax() > 1.0
        return self.head(torch.where(large, x - x.mean(0), x))


def test_the_checks_are_made_again_with_parameters_of_eight_times_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="mixing_layer"):
        check_trainable(MixesOnceGrown(), TABLE, cross_entropy)
    monkeypatch.setattr("raycloak.workers.gradients.model_checks._GROWN", 1.0)
    check_trainable(MixesOnceGrown(), TABLE, cross_entropy)


def test_released_parameters_are_checked_where_the_model_is() -> None:
    module, plan = MixesOnceGrown().train(), mechanism(21)
    check_released(module, TABLE, cross_entropy, [plan])
    assert module.training
    assert all(tensor.requires_grad and tensor.grad is None for tensor in module.parameters())
    before = read_flat(module)
    with torch.no_grad():
        module.head.weight.mul_(8)
    with pytest.raises(ModelError, match="mixing_layer"):
        check_released(module, TABLE, cross_entropy, [plan])
    with torch.no_grad():
        module.head.weight.div_(8)
    assert read_flat(module).tobytes() == before.tobytes()


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_model_that_keeps_rows_in_their_places_is_not_refused(name: str) -> None:
    case = ZOO[name]()
    features, labels = case.batch(7)
    assert GradientParts(case.module, cross_entropy).moved_rows(features, labels) is None


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 16, 64, 257])
def test_each_ordered_pair_of_rows_is_told_apart_by_a_mask(count: int) -> None:
    loud = (~torch.stack(silences(count))).float()
    # Entry (i, j) counts the masks that leave the loss of i and silence that of j.
    apart = loud.T @ (1 - loud)
    assert bool((apart + torch.eye(count) > 0).all())
    assert len(loud) <= 12


# --- in a run


def texts(count: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    ids = draw.integers(1, VOCABULARY, (count, LENGTH))
    for row in range(count):
        ids[row, LENGTH - row % 9 :] = 0
    return ids, draw.integers(0, 2, count)


def sum_of(module: nn.Module, features: np.ndarray, labels: np.ndarray, *valid: np.ndarray) -> np.ndarray:
    """Return the sum of as many micro-batches as there are ``valid``, all of the same rows."""
    size = sum(tensor.numel() for tensor in module.parameters())
    plan = mechanism(size, micro_batch_size=len(features), micro_batches=len(valid))
    batches = [(features, labels, each) for each in valid]
    return torch.cat(GradientEngine(module, cross_entropy, plan).clipped_sum(read_flat(module), batches)).numpy()


@pytest.mark.parametrize("kind", MOVING)
def test_a_row_without_an_example_that_gets_a_gradient_ends_the_step(kind: type[Encoder]) -> None:
    """The error says nothing but its code: not which row, nor how many."""
    features, labels = texts()
    said = set()
    for gone in ([3], [1, 4, 9], list(range(1, ROWS, 2))):
        valid = np.ones(ROWS, np.bool_)
        valid[gone] = False
        module = FixedOrder(ROWS) if kind is FixedOrder else kind()
        # Two rows that no swap takes apart show nothing.
        valid[[ROWS - 2, ROWS - 1]] = True, False
        with pytest.raises(ModelError) as caught:
            sum_of(module, features, labels, valid)
        said.add((caught.value.code, caught.value.message))
    assert {code for code, _ in said} == {"moved_rows"}
    assert len(said) == 1


def test_no_later_micro_batch_makes_up_for_one_in_which_a_row_moved() -> None:
    features, labels = texts()
    every = np.ones(ROWS, np.bool_)
    without = np.arange(ROWS) % 2 > 0
    with pytest.raises(ModelError, match="moved_rows"):
        sum_of(SortedByLength(), features, labels, without, every)


def test_an_example_in_another_ones_place_would_move_the_sum_by_many_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterexample: of a model that is refused now, and of the same one without the order."""
    features, labels = texts(128)
    monkeypatch.setattr(SilentRows, "reached", torch.tensor(False))  # the check itself, out of the way
    clip = mechanism().max_grad_norm
    everyone, without = np.ones(128, np.bool_), np.arange(128) > 0
    shorter = features.copy()
    shorter[0], shorter[0, 0] = 0, 7
    found = {}
    for kind in (SortedByLength, Encoder):
        torch.manual_seed(3)
        module = kind()
        with torch.no_grad():
            # Gradients beyond C, as a trained model gives them for what it has not learned.
            module.head.weight.mul_(30)
        full = sum_of(module, features, labels, everyone)
        found[kind] = np.linalg.norm(full - sum_of(module, shorter, labels, without))
    assert found[SortedByLength] > 2 * clip
    assert found[Encoder] <= clip * (1 - CLIP_MARGIN / 2)


def test_a_row_without_an_example_may_hold_what_has_no_finite_gradient() -> None:
    features = np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)
    valid = np.arange(ROWS) % 3 > 0
    features[~valid] = np.inf
    total = sum_of(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), features, np.zeros(ROWS, int), valid)
    assert np.isfinite(total).all()
    assert total.any()


def test_a_micro_batch_whose_rows_all_have_examples_is_not_checked() -> None:
    """What is not claimed: there is no row whose loss could be zeroed."""
    features, labels = texts()
    assert np.isfinite(sum_of(SortedByLength(), features, labels, np.ones(ROWS, np.bool_))).all()
