"""A forward pass and a loss keep nothing: one that remembers an example is refused, on public data or in the run."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.clipping import CLIP_MARGIN, GradientEngine
from raycloak.workers.gradients.kept_state import KeptState
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.sum_engines import PrivateEvaluationEngine
from raycloak.workers.inputs.datasets import ArrayDataset, DatasetForm
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import LossFn, read_flat
from raycloak.workers.terms.measurement import Measurement
from tests.drawn import batches_of
from tests.protocol import mechanism

FORM = DatasetForm(num_examples=64, feature_shape=(6,), feature_dtype="float32", label_shape=(), label_dtype="int64")
ROWS = 16
CLASS_WIDE, GLOBAL = {"seen": False}, [0.0]


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


class Remembering(nn.Module):
    """Turns the sign of all features once it has seen one beyond ``above``."""

    def __init__(self, above: float) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.above, self.head = above, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.detach().abs() > self.above).any()):
            self.remember()
        return self.head(-x if self.remembers() else x)

    def remember(self) -> None:
        raise NotImplementedError

    def remembers(self) -> bool:
        raise NotImplementedError


class InBuffer(Remembering):
    def __init__(self, above: float) -> None:
        super().__init__(above)
        self.register_buffer("seen", torch.zeros(()))

    def remember(self) -> None:
        self.seen.fill_(1)

    def remembers(self) -> bool:
        return bool(self.seen)


class InAttribute(InBuffer):
    def __init__(self, above: float) -> None:
        Remembering.__init__(self, above)
        self.seen = torch.zeros(())

    def remember(self) -> None:
        self.seen = torch.ones(())


class InList(Remembering):
    def __init__(self, above: float) -> None:
        super().__init__(above)
        self.tensors = [torch.zeros(())]

    def remember(self) -> None:
        self.tensors[0].add_(1)

    def remembers(self) -> bool:
        return bool(self.tensors[0])


class InArray(Remembering):
    def __init__(self, above: float) -> None:
        super().__init__(above)
        self.array = np.zeros(3)

    def remember(self) -> None:
        self.array[1] = 1

    def remembers(self) -> bool:
        return bool(self.array.any())


class InNumber(Remembering):
    seen = 0.0

    def remember(self) -> None:
        self.seen += 1

    def remembers(self) -> bool:
        return self.seen > 0


class InClass(Remembering):
    def remember(self) -> None:
        CLASS_WIDE["seen"] = True

    def remembers(self) -> bool:
        return CLASS_WIDE["seen"]


class InGlobal(Remembering):
    def remember(self) -> None:
        GLOBAL.append(1.0)

    def remembers(self) -> bool:
        return len(GLOBAL) > 1


class InBranch(Remembering):
    """Chooses another of two functions from now on."""

    def __init__(self, above: float) -> None:
        super().__init__(above)
        self.sign: Callable[[Tensor], Tensor] = torch.abs

    def remember(self) -> None:
        self.sign = torch.neg

    def remembers(self) -> bool:
        return self.sign is torch.neg


class InMode(Remembering):
    def __init__(self, above: float) -> None:
        super().__init__(above)
        self.quiet = nn.Identity()

    def remember(self) -> None:
        self.quiet.train(not self.training)

    def remembers(self) -> bool:
        return self.quiet.training != self.training


class InTurn(Remembering):
    """Remembers the last batch alone."""

    def __init__(self, above: float) -> None:
        super().__init__(above)
        self.seen = False

    def forward(self, x: Tensor) -> Tensor:
        before, self.seen = self.seen, bool((x.detach().abs() > self.above).any())
        return self.head(-x if before else x)


KINDS = [InBuffer, InAttribute, InList, InArray, InNumber, InClass, InGlobal, InBranch, InMode]


@pytest.fixture(autouse=True)
def forgotten() -> None:
    forget()


def forget() -> None:
    CLASS_WIDE["seen"] = False
    GLOBAL[:] = [0.0]


def sum_of(module: nn.Module, outlier: float, row: int = 0, loss: LossFn = cross_entropy) -> np.ndarray:
    """The clipped sum of sixteen examples, of which one has an odd feature."""
    draw = np.random.default_rng(0)
    features, labels = draw.normal(size=(ROWS, 6)).astype(np.float32), draw.integers(0, 3, ROWS)
    features[row, 0] += outlier
    plan = mechanism(21, micro_batches=4)
    engine = GradientEngine(module, loss, plan)
    batches = batches_of(ArrayDataset(features, labels), np.arange(ROWS), plan)
    return torch.cat(engine.clipped_sum(read_flat(module), batches)).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_remembers_an_odd_value_is_refused_on_public_data(kind: type[Remembering]) -> None:
    """A value that only odd probes have: both batches of a pair meet a model that has it already."""
    with pytest.raises(ModelError) as caught:
        check_trainable(kind(50.0), FORM, cross_entropy)
    assert caught.value.code == "buffer_update"
    assert "Keep nothing" in caught.value.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_a_physical_micro_batch_is_watched_too(kind: type[Remembering]) -> None:
    class OnlyMany(kind):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) > 7 else self.head(x)

    check_trainable(OnlyMany(50.0), FORM, cross_entropy)
    with pytest.raises(ModelError, match="buffer_update"):
        check_rows(OnlyMany(50.0), FORM, cross_entropy, [mechanism(21, micro_batch_size=8)])


@pytest.mark.parametrize(
    "remembers",
    [lambda x: (x[:, 0] == 1e4).all(), lambda x: 0 < (x[:, 0] == 1e4).sum() < len(x)],
    ids=["a batch of one value", "one value among others"],
)
def test_a_model_that_forgets_with_the_next_batch_is_refused_on_public_data(
    remembers: Callable[[Tensor], Tensor | bool],
) -> None:
    class Forgetting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.seen = nn.Linear(6, 3), False

        def forward(self, x: Tensor) -> Tensor:
            self.seen = bool(remembers(x))
            return self.head(x)

    with pytest.raises(ModelError, match=r"buffer_update.*'seen'"):
        check_trainable(Forgetting(), FORM, cross_entropy)


@pytest.mark.parametrize("kind", [*KINDS, InTurn])
def test_a_model_that_remembers_what_no_probe_has_is_refused_as_it_does_so(kind: type[Remembering]) -> None:
    """Nothing of the sum leaves the engine, and nothing says which example it was.

    Such a model is refused before, since Python reads the value; a process that skipped the checks stops all the same.
    """
    with pytest.raises(ModelError):
        check_trainable(kind(1e6), FORM, cross_entropy)
    forget()
    assert np.isfinite(sum_of(kind(1e6), 60.0)).all()
    said = set()
    for row in (0, 15):
        forget()
        with pytest.raises(ModelError) as caught:
            sum_of(kind(1e6), 2e6, row)
        said.add((caught.value.code, caught.value.message))
    assert len(said) == 1
    assert said.pop()[0] == "buffer_update"


@pytest.mark.parametrize("kind", [*KINDS, InTurn])
def test_a_private_evaluation_refuses_it_too(kind: type[Remembering]) -> None:
    plan = mechanism(1, query="evaluation", max_grad_norm=1.0, sample_rate=1.0, micro_batches=4)
    module = kind(1e6)
    engine = PrivateEvaluationEngine(Measurement(mechanism=plan, every=1, loss_bound=2.0), module, cross_entropy)
    features = np.zeros((ROWS, 6), np.float32)
    features[3] = 2e6
    data = ArrayDataset(features, np.zeros(ROWS, np.int64))
    with pytest.raises(ModelError, match="buffer_update"):
        torch.cat(engine.clipped_sum(read_flat(module), batches_of(data, np.arange(ROWS), plan))).numpy()


def test_without_the_check_one_example_would_move_the_sum_by_many_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterexample. A model without memory moves by at most 2 C, as one example takes another's place."""
    monkeypatch.setattr("raycloak.workers.gradients.kept_state.KeptState.check", lambda _: None)
    clip = mechanism().max_grad_norm
    assert np.linalg.norm(sum_of(InNumber(50.0), 60.0) - sum_of(InNumber(50.0), 0.0)) > 4 * clip
    forgetful = [sum_of(InNumber(1e9), outlier) for outlier in (60.0, 0.0)]
    assert np.linalg.norm(forgetful[0] - forgetful[1]) <= 2 * clip * (1 + CLIP_MARGIN)


def test_a_running_mean_is_refused_wherever_it_is_kept() -> None:
    """Its use comes later than any probe: the output shows nothing of it."""

    class Running(nn.Module):
        def __init__(self, buffer: bool) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)
            if buffer:
                self.register_buffer("mean", torch.zeros(6))
            else:
                self.mean = torch.zeros(6)

        def forward(self, x: Tensor) -> Tensor:
            out = self.head(x + torch.where(self.mean.abs() > 1e3, self.mean, 0.0))
            self.mean = 0.5 * self.mean + x.detach().nan_to_num().clamp(-10, 10).mean(0)
            return out

    for buffer in (True, False):
        with pytest.raises(ModelError, match="buffer_update: a forward pass changes 'mean'"):
            check_trainable(Running(buffer), FORM, cross_entropy)


def test_a_write_that_torch_does_not_count_is_found_on_public_data() -> None:
    class Uncounted(InBuffer):
        def remember(self) -> None:
            self.seen.data.numpy()[...] = 1

    with pytest.raises(ModelError, match="buffer_update"):
        check_trainable(Uncounted(50.0), FORM, cross_entropy)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
def test_a_write_is_found_in_a_tensor_of_any_type(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(5, dtype=dtype)[1::2])
    state = KeptState(module, cross_entropy, copies=True)
    state.check()
    module.seen.data[1] = 1
    with pytest.raises(ModelError, match=r"buffer_update.*'seen'"):
        state.check()


class Shelves(nn.Module):
    """Two lists, and an object in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shelves: list[list[object]] = [[object()], []]


def test_an_object_that_moves_from_one_list_to_the_next_is_found() -> None:
    """The objects of both lists together are the same, in the same order."""
    module = Shelves()
    state = KeptState(module, cross_entropy)
    state.check()
    module.shelves[1].append(module.shelves[0].pop())
    with pytest.raises(ModelError, match="buffer_update"):
        state.check()


def test_the_last_output_kept_for_a_look_is_refused() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.head(x)
            return self.last

    with pytest.raises(ModelError, match="buffer_update: a forward pass changes 'last'"):
        check_trainable(Keeping(), FORM, cross_entropy)


class Counting:
    """A loss that counts its calls, and does nothing with the number."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(output, labels)


def test_a_loss_that_keeps_anything_is_refused() -> None:
    kept: list[Any] = []

    def keeping(output: Tensor, labels: Tensor) -> Tensor:
        kept.append(len(kept))
        return cross_entropy(output, labels)

    for loss in (Counting(), keeping):
        with pytest.raises(ModelError, match="mixing_loss: a call of the loss changes 'loss"):
            check_trainable(nn.Linear(6, 3), FORM, loss)
    with pytest.raises(ModelError, match=r"mixing_loss.*'loss[.]calls'"):
        sum_of(nn.Linear(6, 3), 0.0, loss=Counting())


def test_a_loss_that_remembers_a_label_of_no_class_is_refused_although_it_fails_on_it() -> None:
    class Failing(Counting):
        def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
            if (labels.abs() > 200).any():
                self.calls += 1
                raise ValueError("no class")
            return cross_entropy(output, labels)

    with pytest.raises(ModelError, match=r"mixing_loss.*'loss[.]calls'"):
        check_trainable(nn.Linear(6, 3), FORM, Failing())


def test_a_model_may_hold_what_it_only_reads() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.rows, self.names = nn.Linear(6, 3), [np.ones(6), torch.ones(6)], {"a": {1, 2}}
            self.nothing = torch.tensor([torch.nan])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * self.rows[1] + torch.from_numpy(self.rows[0]).float())

    check_trainable(Reading(), FORM, cross_entropy)
    assert np.isfinite(sum_of(Reading(), 1.0)).all()
