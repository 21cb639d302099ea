"""Loss, tokens and gradient norm of a step on public data: exact, the same for any hosting, never of private data."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from raycloak.coordinator.training.pace import GatedPace, StopRequest
from raycloak.workers.gradients.clipping import ExampleCounter
from raycloak.workers.terms.public_sums import PublicSums
from tests.models import small_model
from tests.protocol import RENYI, WholeRun, examples, on, trained

STEPS = 2
PUBLIC = {"dp_config": {"enabled": False}, "overrides": ["dataset.public=true"]}


def observed(home, **fields) -> tuple[WholeRun, list[PublicSums | None]]:
    """Return a trained run, and what its workers counted in each step."""
    seen: list[PublicSums | None] = []

    def computed(step, epsilon, counted):
        seen.append(counted)
        if len(seen) == STEPS:
            pace.close()

    pace = GatedPace(StopRequest(), computed, *[lambda *_: None] * 2)
    pace.allow(STEPS, STEPS)
    return trained(home, pace=pace, steps=STEPS, **fields), seen


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> tuple[WholeRun, list[PublicSums | None]]:
    """Return a run whose steps use every example."""
    return observed(tmp_path_factory.mktemp("full"), expected_batch_size=40, **PUBLIC)


def test_loss_and_gradient_norm_are_those_of_plain_torch(full):
    """In float64 against float32 gradients: 2^-16 relative is far above their rounding."""
    run, seen = full
    features, labels = (torch.tensor(array) for array in examples())
    model = small_model().double()
    for step in range(STEPS):
        _, _, start, *_ = run.stage.calls("reduce")[step].arguments
        position = 0
        for tensor in model.parameters():
            tensor.data.copy_(torch.tensor(start[position : position + tensor.numel()]).view_as(tensor))
            position += tensor.numel()
        model.zero_grad()
        loss = functional.cross_entropy(model(features.double()), labels)
        loss.backward()
        norm = torch.cat([tensor.grad.reshape(-1) for tensor in model.parameters()]).norm()
        assert (seen[step].examples, seen[step].tokens) == (40, None)
        assert seen[step].mean_loss == pytest.approx(float(loss.detach()), rel=2.0**-16)
        assert run.reports[step].grad_norm == pytest.approx(float(norm), rel=2.0**-16)


LOST = {"num_workers": 4, "disturb": on("step", "worker-1", "dies", 1)}


@pytest.mark.parametrize("fields", [{"num_workers": 2}, LOST], ids=["two", "one is lost"])
def test_the_sums_are_the_same_bits_for_any_workers_and_after_a_loss(tmp_path, full, fields):
    run, seen = observed(tmp_path, expected_batch_size=40, **PUBLIC, **fields)
    assert seen == full[1]
    assert [report.grad_norm for report in run.reports] == [report.grad_norm for report in full[0].reports]


def test_the_sums_are_over_the_drawn_examples_and_tokens_without_padding():
    words = np.random.default_rng(2).integers(0, 8, (4, 6))
    words[:, 4:] = -1
    counted = ExampleCounter()
    counted.add(words, np.array([True, False, True, True]), torch.tensor([1.0, torch.nan, 2.0, 3.0]))
    assert counted.sums() == PublicSums(loss=6.0, examples=3, tokens=12)


def test_a_private_run_states_none_of_it(tmp_path):
    run, seen = observed(tmp_path, dp_config=RENYI)
    assert seen == [None] * STEPS
    assert [report.grad_norm for report in run.reports] == [None] * STEPS


def test_no_drawn_example_has_no_mean():
    assert PublicSums.of(()).mean_loss is None
