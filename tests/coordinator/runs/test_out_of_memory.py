"""A model that asks for more memory than there is: the run ends before any charge, and says what to lower."""

import pytest
import torch
from torch import nn

from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.metrics.errors import ConfigError, RunFailedError, is_gpu_error, is_out_of_memory
from raycloak.workers.answer_codes import answer_code
from raycloak.workers.gradients.row_loss import RowLoss
from tests.protocol import RENYI, config, trained, whole_run

BEYOND = 2**60
"""Bytes that no machine has: torch's own allocator fails at once."""


class Hungry(nn.Module):
    """A linear layer that needs more memory than there is for batches of more than ``ROWS`` examples."""

    ROWS = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if len(features) > self.ROWS:
            torch.empty(BEYOND, dtype=torch.uint8)
        return self.layer(features.flatten(1))


def hungry() -> nn.Module:
    return Hungry()


def greedy() -> nn.Module:
    torch.empty(BEYOND, dtype=torch.uint8)
    return Hungry()


MODELS = {
    "where it is built": ("greedy", 0),
    "where it is checked": ("hungry", 0),
    "at the run's own rows": ("hungry", 7),
}


@pytest.mark.parametrize("where", MODELS)
def test_out_of_memory_names_the_field_to_lower_and_nothing_is_charged(where, tmp_path, monkeypatch):
    name, rows = MODELS[where]
    monkeypatch.setattr(Hungry, "ROWS", rows)
    fields = {"model": f"tests.coordinator.runs.test_out_of_memory:{name}", "steps": 1, "dp_config": RENYI}
    run = whole_run(tmp_path, **fields, micro_batch_size=8)
    with pytest.raises(RunFailedError) as caught:
        run.train()
    assert caught.value.code == "out_of_memory"
    assert "micro_batch_size" in caught.value.remedy
    assert "worker-0: out_of_memory" in caught.value.message
    assert run.stage.calls("charge") == []
    with pytest.raises(RuntimeError) as planned:
        plan_of(config(**fields, micro_batch_size=8), tmp_path / "data")
    assert is_out_of_memory(planned.value), "a plan says the same, and does not blame the model"


def test_lower_rows_train_the_same_expected_batch(tmp_path, monkeypatch):
    """What the error asks for works: the noise, the expected batch and the steps stay."""
    monkeypatch.setattr(Hungry, "ROWS", 7)
    fields = {"model": "tests.coordinator.runs.test_out_of_memory:hungry", "steps": 1, "dp_config": RENYI}
    lower = trained(tmp_path / "lower", **fields, micro_batch_size=4).finished.manifest.computation.mechanism
    monkeypatch.setattr(Hungry, "ROWS", 100)
    mechanism = trained(tmp_path / "same", **fields, micro_batch_size=8).finished.manifest.computation.mechanism
    same = ("noise_multiplier", "expected_batch_size", "sample_rate", "steps", "max_grad_norm", "num_examples")
    assert {name: getattr(lower, name) for name in same} == {name: getattr(mechanism, name) for name in same}


def test_a_loss_that_lacks_memory_is_not_taken_for_one_that_needs_rows_one_by_one():
    """It would be of another known answer on a machine with less memory."""

    calls = []

    def loss(output, labels):
        calls.append(labels)
        # Once: what is freed meanwhile may be enough for a single row.
        if len(calls) == 1:
            torch.empty(BEYOND, dtype=torch.uint8)
        return output.sum(1)

    with pytest.raises(RuntimeError, match="allocate memory"):
        RowLoss(loss)(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


# As torch 2.13 words them: of its allocator, the driver, cuDNN, and cuBLAS as it starts and later.
FULL_GPU = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


@pytest.mark.parametrize("error", FULL_GPU, ids=lambda error: str(error)[:40])
def test_a_full_gpu_is_out_of_memory_however_it_says_so(error):
    assert is_out_of_memory(error)
    assert not is_gpu_error(error)
    assert answer_code(error) == "out_of_memory"


def test_any_other_failure_of_a_gpu_has_a_code_of_its_own():
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert is_gpu_error(error)
    assert answer_code(error) == "gpu_error"
    assert answer_code(RuntimeError("CUDA error: device-side assert triggered")) == "worker_error"


def test_an_error_that_only_speaks_of_memory_is_no_want_of_it():
    assert not is_out_of_memory(ConfigError("config", "Cannot allocate memory"))
    assert not is_out_of_memory(ValueError("Cannot allocate memory"))
    assert not is_out_of_memory(RuntimeError("the memory of the model"))
