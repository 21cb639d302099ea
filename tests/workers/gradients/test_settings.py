"""No sum runs under other settings of torch than its proof is for; what changes one is refused by name."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.clipping import ClippedSum, GradientEngine
from raycloak.workers.gradients.gradient_parts import named_operations
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.numerics import exact_sums, pin_numerics
from raycloak.workers.gradients.parts import GramPart, Lookups, Products
from raycloak.workers.gradients.settings import held_settings
from raycloak.workers.gradients.sum_engines import PrivateEvaluationEngine
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import read_flat
from raycloak.workers.terms.measurement import Measurement
from tests.protocol import mechanism

FORM = DatasetForm(num_examples=64, feature_shape=(6,), feature_dtype="float32", label_shape=(), label_dtype="int64")
ROWS = 16
AUTOCAST = "torch.set_autocast_enabled"
MATMUL: Any = torch.backends.cuda.matmul


def leave_autocast_on() -> None:
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()


# Each changes one setting and does not change it back.
CHANGES: dict[str, Callable[[], object]] = {
    "torch.set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.backends.cuda.matmul.allow_tf32": lambda: setattr(MATMUL, "allow_tf32", True),
    "torch.backends.cudnn.allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", True),
    "torch.backends.cuda.matmul.fp32_precision": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "torch.backends.cuda.conv.fp32_precision": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32"),
    "torch.backends.cuda.rnn.fp32_precision": lambda: setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32"),
    "torch.backends.mkldnn.matmul.fp32_precision": lambda: setattr(
        torch.backends.mkldnn.matmul, "fp32_precision", "bf16"
    ),
    "torch.backends.mkldnn.conv.fp32_precision": lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    "torch.backends.mkldnn.rnn.fp32_precision": lambda: setattr(torch.backends.mkldnn.rnn, "fp32_precision", "bf16"),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: setattr(
        MATMUL, "allow_bf16_reduced_precision_reduction", True
    ),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: setattr(
        MATMUL, "allow_fp16_reduced_precision_reduction", True
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": lambda: setattr(MATMUL, "allow_fp16_accumulation", True),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", False),
    "torch.backends.mha.set_fastpath_enabled": lambda: torch.backends.mha.set_fastpath_enabled(True),
    "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "torch.utils.deterministic.fill_uninitialized_memory": lambda: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "torch.set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    AUTOCAST: leave_autocast_on,
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(False),
    "torch.set_num_threads": lambda: torch.set_num_threads(2),
}


@pytest.fixture(autouse=True)
def pinned() -> Iterator[None]:
    pin_numerics()
    yield
    torch.clear_autocast_cache()
    pin_numerics()


def settings() -> tuple[object, ...]:
    return (
        torch.get_float32_matmul_precision(),
        MATMUL.allow_tf32,
        MATMUL.allow_bf16_reduced_precision_reduction,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.cudnn.benchmark,
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_deterministic_debug_mode(),
        torch.get_num_threads(),
        sys.float_info.min / 2,
    )


class Forward(nn.Module):
    """Changes something in its forward pass."""

    def __init__(self, change: Callable[[], object]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.head, self.change = nn.Linear(6, 3), change

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return self.head(x)


class Backward(Forward):
    """Changes something in a hook of its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.head(x)
        if output.requires_grad:
            output.register_hook(self.hook)
        return output

    def hook(self, gradient: Tensor) -> None:
        self.change()


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(6, 3)


def loss_that(change: Callable[[], object]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        change()
        return cross_entropy(output, labels)

    return loss


MODELS: dict[str, Callable[[Callable[[], object]], tuple[nn.Module, Any]]] = {
    "forward pass": lambda change: (Forward(change), cross_entropy),
    "backward hook": lambda change: (Backward(change), cross_entropy),
    "loss": lambda change: (network(), loss_that(change)),
}


def batch() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(3)
    return random.random((ROWS, 6), np.float32), np.arange(ROWS) % 3, np.ones(ROWS, np.bool_)


def summed(module: nn.Module, loss_fn: Any) -> Any:
    plan = mechanism(dimension=21, micro_batch_size=ROWS, micro_batches=1)
    return torch.cat(GradientEngine(module, loss_fn, plan).clipped_sum(read_flat(module), [batch()])).numpy()


# Torch itself ends what a backward hook does to autocast, with the backward pass.
PLACES = [(name, where) for name in CHANGES for where in MODELS if (name, where) != (AUTOCAST, "backward hook")]


@pytest.mark.parametrize(("name", "where"), PLACES)
def test_a_block_in_which_anything_changed_a_setting_ends_in_an_error_that_names_it(name: str, where: str) -> None:
    before = settings()
    module, loss_fn = MODELS[where](CHANGES[name])
    with pytest.raises(ModelError, match="changed_setting") as refusal:
        summed(module, loss_fn)
    assert name in refusal.value.message
    assert settings() == before, "the next sum finds what it needs"


@pytest.mark.parametrize("where", MODELS)
@pytest.mark.parametrize("name", ["torch.backends.cuda.matmul.allow_tf32", "torch.set_default_dtype"])
def test_what_changes_a_setting_is_refused_before_anything_is_charged(where: str, name: str) -> None:
    before = settings()
    module, loss_fn = MODELS[where](CHANGES[name])
    with pytest.raises(ModelError, match=f"changed_setting.*{name}"):
        check_trainable(module, FORM, loss_fn)
    assert settings() == before


def test_an_evaluation_refuses_it_too() -> None:
    counted = mechanism(
        query="evaluation", sample_rate=1.0, dimension=2, max_grad_norm=1.0, micro_batch_size=ROWS, micro_batches=1
    )
    module = Forward(CHANGES["torch.backends.cuda.matmul.allow_tf32"])
    engine = PrivateEvaluationEngine(Measurement(mechanism=counted, every=1, loss_bound=10.0), module, cross_entropy)
    with pytest.raises(ModelError, match="changed_setting"):
        torch.cat(engine.clipped_sum(read_flat(module), [batch()])).numpy()


def test_a_model_that_fails_because_it_changed_a_setting_is_refused_for_the_change() -> None:
    def change_and_fail() -> None:
        torch.set_default_dtype(torch.float64)
        raise ValueError("data")

    with pytest.raises(ModelError, match="changed_setting"):
        summed(Forward(change_and_fail), cross_entropy)
    with pytest.raises(ModelError, match="changed_setting"):
        check_trainable(Forward(change_and_fail), FORM, cross_entropy)


def test_what_a_model_sets_and_sets_back_is_its_own_affair() -> None:
    def as_float64() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)

    assert np.array_equal(summed(Forward(as_float64), cross_entropy), summed(Forward(lambda: None), cross_entropy))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("block", [exact_sums, held_settings, lambda: named_operations(True)])
def test_whatever_was_set_before_a_block_runs_under_the_settings_of_the_proofs(name: str, block: Any) -> None:
    pinned = settings()
    CHANGES[name]()
    if name == "torch.use_deterministic_algorithms":
        pin_numerics()
    changed = settings() if "fp32_precision" not in name else None
    with block():
        assert settings() == pinned
    if changed is not None:
        assert settings() == changed, "a process that only plans keeps what its user has set"


def test_an_interrupt_passes_and_leaves_the_settings() -> None:
    before = settings()
    stopped = held_settings()
    stopped.__enter__()
    torch.set_default_dtype(torch.float64)
    assert not stopped.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert settings() == before


def tf32(values: Tensor) -> Tensor:
    """Round to ten bits, as a GPU does with the sides of a product where that is allowed."""
    if not MATMUL.allow_tf32:
        return values
    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_no_row_moves_a_total_by_more_than_c_though_tf32_was_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which is simulated here, such a row counted up to 4.8 C."""
    mm, bmm, addmm = torch.mm, torch.bmm, Tensor.addmm_
    monkeypatch.setattr(torch, "mm", lambda left, right, out=None: mm(tf32(left), tf32(right), out=out))
    monkeypatch.setattr(torch, "bmm", lambda left, right: bmm(tf32(left), tf32(right)))
    monkeypatch.setattr(Tensor, "addmm_", lambda own, left, right: addmm(own, tf32(left), tf32(right)))
    torch.manual_seed(0)
    right = torch.randn(4, 1, 1, 96)
    left = torch.zeros(4, 1, 1, 64)
    # The table's row cancels all but 3 % of it. It rounds to -1 in products and not in the table's terms of the norm,
    # which then find nothing of the 3 %.
    left[..., 5] = -(1 + 2.0**-11 * 0.98)
    part = GramPart([Products(left, right)], [Lookups(torch.full((4, 1), 5), right[:, 0] * 0.97, 64)])
    clipped = ClippedSum([64 * 96], 1e-3, torch.device("cpu"))
    MATMUL.allow_tf32 = True
    clipped.add([part], torch.tensor([True, False, False, False]))
    assert np.linalg.norm(torch.cat(clipped.pieces()).numpy()) <= 1e-3
