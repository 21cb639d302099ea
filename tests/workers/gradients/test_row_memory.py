"""How many rows fit is a function of model, loss and form of the data."""

import pytest
import torch
from torch import nn

from raycloak.workers.gradients import row_memory
from raycloak.workers.gradients.row_memory import FEWEST_ROWS, MOST_ROWS, MOST_SCORED, largest_rows, scored_rows
from raycloak.workers.inputs.datasets import DatasetForm


def form(*shape: int, dtype: str = "float32") -> DatasetForm:
    return DatasetForm(num_examples=100, feature_shape=shape, feature_dtype=dtype, label_shape=(), label_dtype="int64")


def wide(width: int) -> nn.Module:
    """A model whose rows take memory in proportion to ``width``, in activations alone."""
    return nn.Sequential(nn.Linear(4, 2), nn.Tanh(), Repeat(width), nn.Tanh(), Mean())


class Repeat(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.repeat(1, self.times)


class Mean(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(len(rows), -1, 2).mean(1)


class Scratch(nn.Module):
    """Takes 4 MiB for a moment, however many rows there are."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.ones(2**20).mean()


def rows_of(module: nn.Module) -> int:
    return largest_rows(module, form(4), loss)


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, labels, reduction="none")


def test_a_row_that_takes_more_memory_leaves_room_for_fewer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(row_memory.MICRO_BATCH_BYTES, "cpu", 2**26)
    narrow, wider = rows_of(wide(2**13)), rows_of(wide(2**16))
    assert 4 * wider <= narrow <= 16 * wider
    assert narrow < MOST_ROWS


@pytest.mark.parametrize("budget", [2**23, 2**24])
def test_what_a_row_adds_is_seen_behind_a_moment_that_takes_more_at_few_rows(
    monkeypatch: pytest.MonkeyPatch, budget: int
):
    monkeypatch.setitem(row_memory.MICRO_BATCH_BYTES, "cpu", budget)
    plain, behind = wide(2**13), nn.Sequential(Scratch(), wide(2**13))
    assert FEWEST_ROWS < rows_of(behind) == rows_of(plain) < MOST_ROWS
    assert 1 < scored_rows(behind, form(4), loss) <= scored_rows(plain, form(4), loss) < MOST_SCORED


def test_the_measured_peak_counts_what_is_alive_at_once():
    def compute() -> None:
        for _ in range(3):
            torch.zeros(1000, dtype=torch.float64).add(1)

    # A new tensor is made while its predecessor is alive, and both are freed before the next round.
    assert row_memory.peak_bytes(compute) == 2 * 8000


def test_a_frozen_base_takes_no_room_from_rows(monkeypatch: pytest.MonkeyPatch):
    """Its 4 MiB are those of 4096 rows of its output, however many rows there are."""
    base = nn.Linear(1024, 1024).requires_grad_(False)
    monkeypatch.setitem(row_memory.MICRO_BATCH_BYTES, "cpu", 2**22)
    rows = largest_rows(nn.Sequential(base, nn.Tanh(), nn.Linear(1024, 2)), form(1024), loss)
    assert rows >= 16 * FEWEST_ROWS


def test_views_are_counted_once():
    def compute() -> None:
        torch.zeros(1000, dtype=torch.float64).view(10, 100).t()

    assert row_memory.peak_bytes(compute) == 8000


def test_the_number_of_rows_is_the_same_each_time_and_leaves_the_model_alone():
    module = wide(2**14)
    before = [tensor.clone() for tensor in module.parameters()]
    state = torch.get_rng_state()
    found = {rows_of(module) for _ in range(3)}
    assert len(found) == 1
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_the_rows_are_a_power_of_two_and_never_below_four(monkeypatch: pytest.MonkeyPatch):
    assert rows_of(nn.Linear(4, 2)) == MOST_ROWS
    for budget in (2**20, 2**23, 2**25):
        monkeypatch.setitem(row_memory.MICRO_BATCH_BYTES, "cpu", budget)
        rows = rows_of(wide(2**14))
        assert rows & (rows - 1) == 0
        assert rows >= FEWEST_ROWS
    monkeypatch.setitem(row_memory.MICRO_BATCH_BYTES, "cpu", 1)
    assert rows_of(wide(2**14)) == FEWEST_ROWS


def test_a_gpu_spares_sixteen_times_a_cpus_memory_and_a_cpus_caches_hold_an_eighth_of_that():
    module = wide(2**18)
    on = {device: largest_rows(module, form(4), loss, device=device) for device in ("cpu", "cuda")}
    assert MOST_ROWS > on["cuda"] == 128 * on["cpu"]


def test_the_memory_that_is_given_bounds_a_micro_batch_and_what_is_scored_on_either_device():
    """On a CPU the caches bound it as well."""
    module = wide(2**14)
    rows = {
        (device, given): largest_rows(module, form(4), loss, device=device, most_bytes=given)
        for device in ("cpu", "cuda")
        for given in (2**25, 2**27, 2**30)
    }
    assert rows["cuda", 2**30] == 8 * rows["cuda", 2**27] == 32 * rows["cuda", 2**25]
    assert [rows["cpu", given] for given in (2**25, 2**27)] == [rows["cuda", given] for given in (2**25, 2**27)]
    assert rows["cpu", 2**30] <= 2 * rows["cpu", 2**27]
    scored = [scored_rows(module, form(4), loss, most_bytes=given) for given in (2**21, 2**23)]
    assert scored[1] == 4 * scored[0]


def test_fewer_rows_are_scored_at_once_where_an_output_takes_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # A small bound, so that no row is large.
    monkeypatch.setitem(row_memory.MICRO_BATCH_BYTES, "cpu", 2**22)
    found = [scored_rows(wide(width), form(4), loss) for width in (4, 2**12, 2**14, 2**18)]
    assert found == sorted(found, reverse=True)
    assert found[0] == MOST_SCORED
    assert found[2] == found[1] // 4
    # One row is scored whatever it takes.
    assert found[3] == 1
