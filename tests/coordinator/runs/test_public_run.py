"""Training without noise: only on data declared public, said everywhere, and then plain gradient descent."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.coordinator.cli.views.verdict import verdict_text
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.report.words import verdict_rows
from raycloak.coordinator.runs.progress import status_line
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.metrics.errors import RefusedError
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import Arrays, WholeRun, config, mechanism, trained, whole_run, worker_setup

NO_NOISE = {"dp_config": {"enabled": False}}
PUBLIC = {**NO_NOISE, "overrides": ["dataset.public=true"]}

# --- who may


def test_without_noise_a_run_on_data_not_declared_public_is_refused_before_anything_is_charged(tmp_path):
    run = whole_run(tmp_path, **NO_NOISE)
    with pytest.raises(RefusedError) as error:
        run.train()
    assert (error.value.code, error.value.exit_code) == ("not_public", 3)
    assert run.stage.calls("compute_known_answer") == run.stage.calls("charge") == []


def test_plan_and_trainer_refuse_it_alike(tmp_path):
    settings = config(**NO_NOISE)
    base = Path(worker_setup(settings, tmp_path).base)
    for refused in (lambda: plan_of(settings, base), lambda: Trainer(settings, config_dir=base)):
        with pytest.raises(RefusedError, match="not_public"):
            refused()
    with pytest.raises(RefusedError, match="not_public"):
        Trainer(settings.model_copy(update={"dataset": None}), train_dataset=[(np.zeros(6), 0)])


def test_a_worker_asked_for_vectors_without_noise_on_such_data_refuses(tmp_path):
    """Whatever the driver says: the declaration is in the dataset's identity, which is in the manifest."""
    quiet = mechanism(private=False)
    codes = {}
    for public in ("false", "true"):
        worker = TrainWorker("worker-0", None, lambda: 0.0)
        worker.prepare(worker_setup(config([f"dataset.public={public}"]), tmp_path))
        try:
            codes[public] = len(worker.compute_known_answer(quiet))
        except RefusedError as error:
            codes[public] = error.code
    assert codes == {"false": "not_public", "true": 32}


# --- what it says


@pytest.fixture(scope="module")
def public(tmp_path_factory) -> WholeRun:
    return trained(tmp_path_factory.mktemp("public"), **PUBLIC)


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> WholeRun:
    return trained(tmp_path_factory.mktemp("private"))


def test_manifest_verdict_metrics_progress_and_events_say_not_private(public, private):
    for run, marked in ((public, True), (private, False)):
        manifest = json.loads((run.folder / "manifest.json").read_bytes())
        assert manifest["computation"]["mechanism"]["private"] is not marked
        verdict = verdict_of(run.finished, run.folder, 1.0, "complete", run.finished.plan.warnings)
        assert verdict.metrics()["private"] is not marked
        assert (verdict.metrics()["privacy_epsilon"] is None) == marked
        assert ("NOT PRIVATE" in verdict_text(verdict).splitlines()[0]) == marked
        mark = "NOT_PRIVATE" if marked else "private"
        assert run.metric("raycloak_run_claims_info", privacy=mark) == 1
        assert run.metric("raycloak_noise_multiplier_ratio") == (0 if marked else 2.0)
        assert ["NOT PRIVATE" in status_line(report) for report in run.reports] == [marked] * 3
        (admitted,) = (line for line in run.told if line["event"] == "admitted")
        assert admitted["privacy"] == mark
        assert ["epsilon" in line for line in run.told if line["event"] == "step"] == [not marked] * 3


def test_a_public_run_charges_nothing_and_needs_no_mask(tmp_path, public):
    second = trained(tmp_path, num_workers=2, secure_aggregation=False, **PUBLIC)
    assert public.digests == second.digests
    assert public.finished.charged_epsilon == 0
    assert public.finished.masked_bytes > 0 == second.finished.masked_bytes


# --- what it computes: linear regression on 100 examples, which 8 virtual workers cannot share evenly

STEPS, RATE = 20, 0.1


def regression_data() -> Arrays:
    generator = np.random.default_rng(4)
    features = generator.normal(size=(100, 6)).astype(np.float32)
    weights = np.array([1.5, -2.0, 0.5, 0.0, 3.0, -1.0])
    labels = features @ weights + 0.7 + generator.normal(scale=0.1, size=100)
    return features, labels.astype(np.float32)


def regression(home, workers: int) -> WholeRun:
    """Return full batches, declared public, measured on the same examples every fifth step."""
    source = {"kind": "npz", "path": "examples.npz", "features": "features", "public": True}
    return trained(
        home,
        data=regression_data(),
        model="tests.models:linear_regression",
        loss="mse",
        steps=STEPS,
        num_workers=workers,
        secure_aggregation=workers > 1,
        expected_batch_size=100,
        dataset=source,
        evaluation={"dataset": source, "every": 5},
        optimizer={"learning_rate": RATE},
        **NO_NOISE,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> WholeRun:
    return regression(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("workers", [3, 8])
def test_a_linear_regression_has_the_same_weights_for_any_workers(tmp_path, alone, workers):
    run = regression(tmp_path, workers)
    assert run.digests == alone.digests
    assert run.finished.parameters.tobytes() == alone.finished.parameters.tobytes()
    assert run.finished.evaluation == alone.finished.evaluation


def released(run: WholeRun) -> list[np.ndarray]:
    """Return the parameters after each step, as the one aggregator returned them."""
    return [references[1].value for call, references in run.stage.log if call.method == "reduce"]


def test_the_loss_printed_is_the_loss_measured(alone):
    """Each reported loss against float64, from the parameters released after that step; per-example losses are float32.

    2^-20 is eight units in the last place of a float32: seven products and sums, and a square.
    """
    features, labels = (array.astype(np.float64) for array in regression_data())
    reported = {line["step"]: line["evaluation_loss"] for line in alone.told if "evaluation_loss" in line}
    assert list(reported) == [4, 9, 14, 19]
    for step, loss in reported.items():
        parameters = released(alone)[step].astype(np.float64)
        errors = features @ parameters[:6] + parameters[6] - labels
        # Relative to the terms of the sum, since the residuals are differences of larger numbers.
        scale = np.mean((np.abs(features) @ np.abs(parameters[:6]) + np.abs(labels)) * np.abs(errors))
        assert abs(loss - np.mean(errors**2)) < 2.0**-20 * scale
    assert reported[19] < 0.1 * reported[4]
    verdict = verdict_of(alone.finished, alone.folder, 1.0, "complete", ())
    assert verdict.evaluation_loss == reported[19] == alone.reports[-1].evaluation_loss
    assert alone.metric("raycloak_evaluation_loss") == reported[19]
    assert f"{reported[19]:.6g}" in dict(verdict_rows(verdict))["loss"]


def test_without_noise_training_is_plain_gradient_descent(alone):
    """Against torch in float64; 20 steps in float32, with gradients on a grid of 2^-30 or finer, stay within 2e-6."""
    assert alone.finished.plan.mechanism.gamma_log2 <= -30
    features, labels = (torch.tensor(array, dtype=torch.float64) for array in regression_data())
    model = nn.Linear(6, 1, dtype=torch.float64)
    _, _, start, *_ = alone.stage.calls("reduce")[0].arguments
    with torch.no_grad():
        model.weight.copy_(torch.tensor(start[:6]).reshape(1, 6))
        model.bias.copy_(torch.tensor(start[6:]))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(features)[:, 0] - labels).square().mean().backward()
        optimizer.step()
    expected = torch.cat([model.weight.detach().reshape(-1), model.bias.detach()]).numpy()
    assert np.abs(alone.finished.parameters - expected).max() < 2e-6
    assert np.abs(alone.finished.parameters - start).max() > 0.5
