"""Metrics of the user's own see public examples alone, and are tried before anything is charged."""

from pathlib import Path

import numpy as np
import pytest
import torch

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.own_metrics import own_metrics
from raycloak.coordinator.planning.public_split import PublicSplit
from raycloak.coordinator.planning.references import preflight
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.training.evaluation import Evaluator
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec
from tests.coordinator.config.test_run import GOOD
from tests.own_code import words

BASE = Path(__file__).parent
"""A folder without modules that those of `tests.own_code` import."""
METRICS = ("tests.own_code:predicted_first", "tests.own_code:largest_label")
FEATURES = np.eye(3, dtype=np.float32)[np.arange(600) % 3]
IDENTITY = np.concatenate([np.eye(3, dtype=np.float32).reshape(-1), np.zeros(3, np.float32)])


def evaluator(*metrics, warned=print) -> Evaluator:
    split = PublicSplit(ArrayDataset(FEATURES, np.arange(600) % 3))
    model = ModelSource.of(lambda: torch.nn.Linear(3, 3))
    return Evaluator(model, LossSpec.of("cross_entropy"), split, ".", own=own_metrics(metrics, (), BASE), warned=warned)


def test_a_metric_gets_all_outputs_and_labels_and_spoils_them_for_nobody() -> None:
    """Three batches; the first metric clears what it was given."""
    found = evaluator(*METRICS).measure(IDENTITY)
    assert (found.value, found.own) == (1.0, {"predicted_first": pytest.approx(1 / 3), "largest_label": 2.0})


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("words", "metric_value", "the metric words returned a str, not one number"),
        ("undefined", "metric_value", "the metric undefined is nan, not a finite number"),
        ("of_outputs", "metric_function", r"of_outputs fails with TypeError: of_outputs\(\) takes 1 positional"),
        ("nowhere", "module_function", "has no callable 'nowhere'"),
    ],
)
def test_guarantee_a_metric_that_cannot_be_called_is_refused_before_steps_are_charged(name, code, says) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        evaluator(f"tests.own_code:{name}")
    assert caught.value.code == code


def test_a_metric_that_fails_on_a_later_model_costs_its_value_and_no_run() -> None:
    said: list[str] = []

    def positive(outputs: torch.Tensor, labels: torch.Tensor) -> float:
        return 1.0 if outputs.max() < 1e6 else float("inf")

    own = (*own_metrics(METRICS, (positive,), BASE),)
    split = PublicSplit(ArrayDataset(FEATURES, np.arange(600) % 3))
    model = ModelSource.of(lambda: torch.nn.Linear(3, 3))
    measuring = Evaluator(model, LossSpec.of("cross_entropy"), split, ".", own=own, warned=said.append)
    for _ in range(2):
        found = measuring.measure(IDENTITY * np.float32(1e7))
        assert set(found.own) == {"predicted_first", "largest_label"}
    assert said == ["An evaluation lacks positive: the metric positive is inf, not a finite number."]


def test_two_metrics_have_two_names_and_each_has_one() -> None:
    with pytest.raises(ConfigError, match="two metrics are named words"):
        own_metrics(["tests.own_code:words"], [words], BASE)
    with pytest.raises(ConfigError, match="cannot be shown"):
        own_metrics((), [lambda outputs, labels: 0.0], BASE)


@pytest.mark.parametrize("private", [{"public": False}, {"kind": "sealed", "key_file": "key", "public": True}])
def test_guarantee_an_own_metric_never_sees_a_private_example(private, tmp_path) -> None:
    split = {"dataset": {"kind": "npz", "path": "test.npz", **private}, "metrics": [METRICS[0]]}
    with pytest.raises(ConfigError, match=f"the metric {METRICS[0]} has no known sensitivity") as caught:
        preflight(parse_config({**GOOD, "evaluation": split}), tmp_path)
    assert caught.value.code == "metric_private"
    noised = {"evaluation": {"noise_multiplier": 20, "metrics": [METRICS[0]]}}
    with pytest.raises(ConfigError, match=r"measurements\.evaluation: a metric of your own has no known sensitivity"):
        parse_config({**GOOD, "measurements": noised})


def test_a_metric_from_python_needs_a_public_split() -> None:
    with pytest.raises(ConfigError, match="the metric words has no known sensitivity") as caught:
        Trainer(parse_config({**GOOD, "model": "tests.models:small_model"}), metrics=[words])
    assert caught.value.code == "metric_private"
