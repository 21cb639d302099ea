"""Released parameters are measured on public data only."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from raycloak.coordinator.planning.public_split import PublicSplit, open_public
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.evaluation import Evaluator
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec


def linear(inputs: int, outputs: int) -> ModelSource:
    return ModelSource.of(lambda: torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Linear(inputs, outputs)))


def test_accuracy_counts_the_labels_that_are_the_largest_output() -> None:
    features = np.eye(3, dtype=np.float32)[np.arange(1000) % 3]
    labels = np.where(np.arange(1000) < 900, np.arange(1000) % 3, (np.arange(1000) + 1) % 3)
    evaluator = Evaluator(linear(3, 3), LossSpec.of("cross_entropy"), PublicSplit(ArrayDataset(features, labels)), ".")
    parameters = np.concatenate([np.eye(3, dtype=np.float32).reshape(-1), np.zeros(3, np.float32)])
    parameters.setflags(write=False)
    # Of 1,000 labels 900 are right, as many in each class but for one.
    assert evaluator.measure(parameters) == Evaluation("accuracy", 0.9, 1000, pytest.approx(0.9, abs=1e-5))
    shifted = np.roll(parameters[:9].reshape(3, 3), 1, axis=0)
    assert evaluator.measure(np.concatenate([shifted.reshape(-1), parameters[9:]])).value == 0.1


def test_macro_f1_is_the_mean_over_all_labels_and_predictions() -> None:
    """Three batches; of four outputs one is never a label and never predicted, and two labels have no output."""
    predicted = np.arange(600) % 3
    labels = np.where(np.arange(600) < 300, 0, predicted)
    labels[[0, 1, 599]] = 9, -1, 9
    features = np.eye(4, dtype=np.float32)[predicted]
    evaluator = Evaluator(linear(4, 4), LossSpec.of("cross_entropy"), PublicSplit(ArrayDataset(features, labels)), ".")
    found = evaluator.measure(np.concatenate([np.eye(4, dtype=np.float32).reshape(-1), np.zeros(4, np.float32)]))
    assert found.f1 == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert found.f1 < found.value


@pytest.mark.parametrize("flat", [False, True])
def test_yes_or_no_is_measured_by_the_sign_of_one_output(flat: bool) -> None:
    """The labels are integers or numbers with a point."""
    scores = np.random.default_rng(0).standard_normal(600).astype(np.float32)
    labels = (np.random.default_rng(1).random(600) < 0.3).astype(np.float32 if flat else np.int64)
    source = ModelSource.of(lambda: torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Flatten(0 if flat else 1)))
    split = PublicSplit(ArrayDataset(scores[:, None], labels))
    found = Evaluator(source, LossSpec.of("binary_cross_entropy"), split, ".").measure(np.array([1, 0], np.float32))
    assert found.metric == "accuracy"
    assert found.value == pytest.approx(((scores > 0) == labels).mean())
    assert found.f1 == pytest.approx(f1_score(labels, scores > 0, average="macro"))


def test_several_labels_are_measured_each_by_itself() -> None:
    scores = np.random.default_rng(0).standard_normal((600, 4)).astype(np.float32)
    labels = (np.random.default_rng(1).random((600, 4)) < 0.3).astype(np.int64)
    # A label that nobody has and that is never predicted counts in no F1.
    scores[:, 3], labels[:, 3] = -1, 0
    split = PublicSplit(ArrayDataset(scores, labels))
    identity = np.concatenate([np.eye(4, dtype=np.float32).reshape(-1), np.zeros(4, np.float32)])
    found = Evaluator(linear(4, 4), LossSpec.of("binary_cross_entropy"), split, ".").measure(identity)
    assert (found.metric, found.value) == ("accuracy", pytest.approx(((scores > 0) == labels).mean()))
    assert found.f1 == pytest.approx(f1_score(labels[:, :3], scores[:, :3] > 0, average="macro"))


def test_a_class_for_each_of_several_places_has_an_accuracy_and_no_f1() -> None:
    """Predictions and labels have one shape here as well, but each is one of several classes. -100 is not counted."""

    class Places(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.scale * features

    scores = np.random.default_rng(0).standard_normal((40, 3, 5)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 3, (40, 5))
    labels[:, 3:] = -100
    split = PublicSplit(ArrayDataset(scores, labels))
    found = Evaluator(ModelSource.of(Places), LossSpec.of("cross_entropy"), split, ".").measure(np.ones(1, np.float32))
    assert found.value == pytest.approx((scores.argmax(1) == labels)[:, :3].mean())
    assert found.f1 is None


def test_the_mean_loss_is_measured_for_another_loss() -> None:
    data = ArrayDataset(np.arange(600, dtype=np.float32).reshape(600, 1), np.zeros(600))
    evaluator = Evaluator(linear(1, 1), LossSpec.of("mse"), PublicSplit(data), ".")
    found = evaluator.measure(np.array([1.0, 0.0], dtype=np.float32))
    assert (found.metric, found.num_examples) == ("loss", 600)
    assert found.value == pytest.approx(np.mean(np.arange(600.0) ** 2))


def test_data_not_declared_public_is_refused(tmp_path: Path) -> None:
    descriptor = DatasetDescriptor(kind="digits", split="public")
    with pytest.raises(ConfigError) as caught:
        open_public(descriptor, tmp_path)
    assert caught.value.code == "evaluation_not_public"
    assert len(open_public(descriptor.model_copy(update={"public": True}), tmp_path).examples) == 360
