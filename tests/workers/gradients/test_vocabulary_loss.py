"""A loss of tokens from hidden states is that of logits, and rows stay bounded: frozen, trained and tied heads."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from raycloak.metrics.errors import ModelError, RefusedError
from raycloak.workers.evaluation import Scorer
from raycloak.workers.gradients import model_checks, vocabulary_loss
from raycloak.workers.gradients.clipping import ClippedSum, GradientEngine
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.parts import Part
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.row_memory import largest_rows, mechanism_of_rows, peak_bytes, scored_rows
from raycloak.workers.gradients.sum_engines import PrivateEvaluationEngine
from raycloak.workers.gradients.vocabulary_loss import HeadPart, ModelLosses, VocabularyHead
from raycloak.workers.inputs.datasets import ArrayDataset, DatasetForm
from raycloak.workers.models.losses import BuiltInLoss, next_token_cross_entropy, token_cross_entropy
from raycloak.workers.models.models import read_flat
from raycloak.workers.models.text_model import TextModel, as_text_model, heads_apart
from raycloak.workers.terms.loss import LossTerm
from tests.tiny_text import SIZES, bert_config, gpt2_config
from tests.workers.gradients.test_sensitivity import largest_move
from tests.workers.terms.test_measurement import measurement

ROWS, LENGTH, WORDS = 5, 9, 23


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pin_numerics()
    # Two tokens a piece.
    monkeypatch.setitem(vocabulary_loss.PIECE_BYTES, "cpu", 8 * WORDS)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        yield


def frozen(**fields: int) -> TextModel:
    """A causal model of which the last block alone is trained."""
    model = untied(**fields)
    for name, tensor in model.named_parameters():
        tensor.requires_grad_("h.1." in name)
    return model


def untied(**fields: int) -> TextModel:
    return _moved(transformers.GPT2LMHeadModel(gpt2_config(vocab_size=WORDS, tie_word_embeddings=False, **fields)))


def tied(**fields: int) -> TextModel:
    return _moved(transformers.GPT2LMHeadModel(gpt2_config(vocab_size=WORDS, **fields)))


def biased() -> TextModel:
    """A masked language model, whose head is tied and has a bias."""
    return _moved(transformers.BertForMaskedLM(bert_config(vocab_size=WORDS)))


HEADS = {"frozen": frozen, "trained": untied, "tied": tied, "tied with a bias": biased}


def _moved(module: nn.Module) -> TextModel:
    model, _ = as_text_model(module)
    assert isinstance(model, TextModel)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Ids that repeat, and their labels: a row without a counted label, one with a single one, and padding."""
    ids = torch.randint(WORDS, (ROWS, length))
    ids[0, : length // 2] = ids[0, 0]
    ids[1, length - length // 3 :] = -1
    labels = torch.where(ids < 0, -100, ids)
    labels[2] = -100
    labels[3, 2:] = -100
    return ids, labels


def in_float64(model: TextModel, ids: Tensor, labels: Tensor, shift: bool, **settings: object) -> tuple[Tensor, Tensor]:
    """Return each row's loss and gradient [m, d] by torch's own cross entropy of its own logits, in float64."""
    # A copy of the text model itself would share frozen tensors.
    wide = TextModel(copy.deepcopy(model.model)).double()
    trained = [tensor for tensor in wide.parameters() if tensor.requires_grad]
    losses, rows = [], []
    for row, targets in zip(ids, labels, strict=True):
        logits = wide._logits(row[None])[0]
        own = functional.pad(targets[1:], (0, 1), value=-100) if shift else targets
        each = functional.cross_entropy(logits, own, reduction="none", ignore_index=-100, **settings)
        loss = (each * (own != -100)).sum() / (own != -100).sum().clamp(min=1)
        gradients = torch.autograd.grad(loss, trained, materialize_grads=True, allow_unused=True)
        losses.append(loss.detach())
        rows.append(torch.cat([each.flatten() for each in gradients]))
    return torch.stack(losses), torch.stack(rows)


@pytest.mark.parametrize("length", [LENGTH, 2, 1])
@pytest.mark.parametrize("kind", HEADS)
def test_losses_and_gradients_are_those_of_torch_in_float64(kind: str, length: int) -> None:
    model, (ids, labels) = HEADS[kind](), batch(length)
    shift = kind != "tied with a bias"
    loss = next_token_cross_entropy if shift else token_cross_entropy
    losses, gradients = in_float64(model, ids, labels, shift)
    found = torch.cat([each.flatten(1) for each in GradientParts(model, loss).rows(ids, labels)], 1)
    torch.testing.assert_close(ModelLosses(model, RowLoss(loss))(ids, labels).double(), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), gradients, rtol=1e-3, atol=2e-6)


def test_weights_and_smoothing_of_classes_are_those_of_torch() -> None:
    weights, (ids, labels) = torch.rand(WORDS).tolist(), batch()
    model, term = tied(), LossTerm(name="token_cross_entropy", class_weights=tuple(weights), label_smoothing=0.2)
    settings = {"weight": torch.tensor(weights, dtype=torch.float64), "label_smoothing": 0.2}
    _, gradients = in_float64(model, ids, labels, False, **settings)
    found = torch.cat([each.flatten(1) for each in GradientParts(model, BuiltInLoss((term,))).rows(ids, labels)], 1)
    torch.testing.assert_close(found.double(), gradients, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("wrong", ["label", "id"])
def test_a_label_or_an_id_that_is_none_is_no_error_and_adds_nothing(wrong: str) -> None:
    model, (ids, labels) = tied(), batch()
    clean = engine_sum(model, ids, labels, [1, 2, 3, 4])
    (labels if wrong == "label" else ids)[0, 4] = WORDS + 3
    assert np.array_equal(clean, engine_sum(model, ids, labels, range(ROWS)))


def engine_sum(model: TextModel, ids: Tensor, labels: Tensor, valid: object) -> np.ndarray:
    chosen = np.isin(np.arange(len(ids)), list(valid))
    parameters = read_flat(model)
    engine = GradientEngine(
        copy.deepcopy(model), next_token_cross_entropy, mechanism_of_rows(len(parameters), len(ids))
    )
    return torch.cat(engine.clipped_sum(parameters, [(ids.numpy(), labels.numpy(), chosen)])).numpy()


@pytest.mark.parametrize("kind", HEADS)
def test_a_row_has_the_same_bits_alone_in_any_place_and_beside_any_neighbour(kind: str) -> None:
    """From hidden states on: losses, their gradients, and the rows of a trained head."""
    model, (ids, labels) = HEADS[kind](), batch()
    losses = ModelLosses(model, RowLoss(token_cross_entropy))
    with losses.module_form(), torch.no_grad():
        hidden = model(ids)

    def found(states: Tensor, of: Tensor) -> list[Tensor]:
        leaf, taken = states.clone().requires_grad_(), []

        def tap(each: Tensor, head: object, output: Tensor, known: Tensor) -> Tensor:
            use = vocabulary_loss.HeadUse(head, output.detach(), known, torch.ones_like(each.detach()))
            taken.extend([HeadPart(use, [], tuple(head.weight.shape)).rows(), use.bias_rows()])
            return each

        rows = losses.of(leaf, of, tap)
        return [rows.detach(), torch.autograd.grad(rows.sum(), leaf)[0], *taken]

    whole = found(hidden, labels)
    moved = [each.flip(0) for each in found(hidden.flip(0), labels.flip(0))]
    others = hidden.clone()
    others[1:] *= -3.0
    beside = found(others, torch.cat([labels[:1], 1 - labels[1:]]))
    for first, flipped, changed in zip(whole, moved, beside, strict=True):
        assert torch.equal(first, flipped)
        assert torch.equal(first[0], changed[0])
    for row in range(ROWS):
        alone = found(hidden[row : row + 1], labels[row : row + 1])
        assert all(torch.equal(each[row], one[0]) for each, one in zip(whole, alone, strict=True))


def parts_of(model: TextModel, scale: float) -> list[Part]:
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "ln_f" in name:
                tensor.mul_(scale)
    return GradientParts(model, next_token_cross_entropy)(*batch())


SMALL = {"n_embd": 4, "n_layer": 2, "n_head": 1}


@pytest.mark.parametrize("clip", [2.0**-14, 1.0])
@pytest.mark.parametrize("scale", [1.0, 2.0**40, 2.0**-60])
@pytest.mark.parametrize("kind", [frozen, untied, tied])
def test_no_row_of_a_text_model_moves_the_total_by_more_than_c(kind, scale: float, clip: float) -> None:
    parts = parts_of(kind(**SMALL), scale)
    assert sum(isinstance(part, HeadPart) for part in parts) == (kind is not frozen)
    assert largest_move(parts, clip) <= 1


def test_a_tied_head_is_measured_together_with_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded fault measures a row before its table's gradient is there."""
    parts = parts_of(tied(**SMALL), 1.0)
    (head,) = [part for part in parts if isinstance(part, HeadPart)]
    assert 0.9 < largest_move([head], 2.0**-14) <= 1
    table, head._table = head._table, None
    early = [row.square() for row in head.in_turn()]
    head._table = table
    squares = iter(early * 1000)
    monkeypatch.setattr(vocabulary_loss.FormedRow, "square", lambda _: next(squares))
    assert largest_move([head], 2.0**-14) > 1


def test_a_second_head_is_refused_since_its_rows_would_be_measured_too_late() -> None:
    (head,) = [part for part in parts_of(untied(**SMALL), 1.0) if isinstance(part, HeadPart)]
    size = head.rows().shape[1]
    total = ClippedSum([size, size], 1.0, torch.device("cpu"))
    with pytest.raises(RefusedError) as caught:
        total.add([head, head], torch.ones(ROWS, dtype=torch.bool))
    assert caught.value.code == "proof_bound"


FORM = DatasetForm(num_examples=90, feature_shape=(64,), feature_dtype="int64", label_shape=(64,), label_dtype="int64")


@pytest.mark.parametrize("kind", [frozen, untied, tied])
def test_a_step_holds_far_less_than_logits_of_its_tokens(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    words, rows = 20_000, 4
    monkeypatch.setattr(vocabulary_loss, "PIECE_BYTES", {"cpu": 2**18})
    monkeypatch.setattr("tests.workers.gradients.test_vocabulary_loss.WORDS", words)
    model = kind(n_positions=64)
    parameters, ids = read_flat(model), torch.randint(words, (rows, 64))
    engine = GradientEngine(model, next_token_cross_entropy, mechanism_of_rows(len(parameters), rows))
    peak = peak_bytes(
        lambda: engine.clipped_sum(parameters, [(ids.numpy(), ids.numpy(), np.ones(rows, bool))]), model.parameters()
    )
    # The sum itself is float64, and a trained head has one row of its size in memory.
    fixed = 8 * len(parameters) + (0 if kind is frozen else 4 * words * 16)
    assert peak - fixed < rows * 64 * words * 4 / 4


def test_more_rows_fit_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    words = 20_000
    monkeypatch.setattr(vocabulary_loss, "PIECE_BYTES", {"cpu": 2**18})
    monkeypatch.setattr("tests.workers.gradients.test_vocabulary_loss.WORDS", words)
    model = frozen(n_positions=64)
    rows, scored = (of(model, FORM, next_token_cross_entropy, vocabulary=words) for of in (largest_rows, scored_rows))
    model._ends_in_head = False
    assert 8 * largest_rows(model, FORM, next_token_cross_entropy, vocabulary=words) <= rows
    assert scored_rows(model, FORM, next_token_cross_entropy, vocabulary=words) < scored


def test_scores_are_those_of_logits() -> None:
    model, (ids, labels) = tied(), batch()
    scorer = Scorer(copy.deepcopy(model), next_token_cross_entropy, "loss", 2)
    total = scorer.scores(ArrayDataset(ids.numpy(), labels.numpy()), np.arange(ROWS)).total
    with torch.no_grad():
        expected = float(next_token_cross_entropy(model.eval()(ids), labels).double().sum())
    assert total == pytest.approx(expected, rel=1e-6)


def test_a_measured_loss_is_that_of_logits() -> None:
    model, (ids, labels) = tied(), batch()
    of = measurement("evaluation", 1)
    engine = PrivateEvaluationEngine(of, copy.deepcopy(model), next_token_cross_entropy)
    rows = [(ids.numpy(), labels.numpy(), np.ones(ROWS, np.bool_))]
    with torch.no_grad():
        losses = next_token_cross_entropy(model.eval()(ids), labels).double()
    expected = (losses.clamp(max=of.loss_bound) / of.loss_bound).sum() * of.unit
    assert float(torch.cat(engine.clipped_sum(read_flat(model), rows))) == pytest.approx(float(expected), rel=1e-3)


def test_a_loss_of_the_users_own_gets_logits() -> None:
    met = []

    def own(output: Tensor, labels: Tensor) -> Tensor:
        met.append(output.shape)
        return output.mean((1, 2))

    GradientParts(tied(), own)(*batch())
    assert met[-1][-2:] == (LENGTH, WORDS)


def test_labels_of_another_shape_are_refused() -> None:
    ids, labels = batch()
    with pytest.raises(ModelError) as caught:
        ModelLosses(tied(), RowLoss(token_cross_entropy))(ids, labels[:, 0])
    assert caught.value.code == "loss_shape"


@pytest.mark.parametrize("cls", ["Gemma2", "Cohere", "Granite"])
def test_logits_that_are_scaled_or_capped_after_the_head_stay_logits(cls: str) -> None:
    config = getattr(transformers, f"{cls}Config")(**SIZES, vocab_size=WORDS, num_key_value_heads=1)
    model, _ = as_text_model(getattr(transformers, f"{cls}ForCausalLM")(config))
    assert model.head is None
    with heads_apart():
        assert model(batch()[0]).shape == (ROWS, LENGTH, WORDS)


@pytest.mark.parametrize("kind", HEADS)
def test_looks_at_gradients_compute_few_classes_of_a_frozen_head_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    met, gradients = set[int](), VocabularyHead.gradients
    monkeypatch.setattr(
        VocabularyHead, "gradients", lambda head, *of: (met.add(len(head.weight)), gradients(head, *of))[1]
    )
    monkeypatch.setattr(model_checks, "_CLASSES", 8)
    model, loss = HEADS[kind](), token_cross_entropy
    form = FORM.model_copy(update={"feature_shape": (LENGTH,), "label_shape": (LENGTH,)})
    check_trainable(model, form, loss, vocabulary=WORDS)
    check_rows(model, form, loss, [mechanism_of_rows(read_flat(model).size, 4)], vocabulary=WORDS)
    assert met == {8 if kind == "frozen" else WORDS}


def test_the_loss_of_few_classes_is_that_of_their_logits() -> None:
    model, (ids, labels) = frozen(), batch()
    labels = labels.clamp(max=7)
    found = ModelLosses(model, RowLoss(token_cross_entropy), classes=8)(ids, labels)
    with torch.no_grad():
        torch.testing.assert_close(found.detach(), token_cross_entropy(model(ids)[:, :, :8], labels))
