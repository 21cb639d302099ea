"""The metrics that have a name: scikit-learn's values, for the forms of outputs and labels that losses have."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, r2_score, roc_auc_score

from raycloak.coordinator.config.sections import METRICS
from raycloak.coordinator.planning.own_metrics import NAMED_METRICS, own_metrics
from raycloak.metrics.errors import ConfigError

ROWS = 300
DRAW = np.random.default_rng(0)
SCORES = DRAW.standard_normal((ROWS, 4)).astype(np.float32)
CLASSES = DRAW.integers(0, 4, ROWS)
BINARY = (SCORES + DRAW.standard_normal((ROWS, 4)) > 1).astype(np.int64)
NUMBERS = (SCORES * [1, 2, 3, 4] + DRAW.standard_normal((ROWS, 4))).astype(np.float32)


def value(name: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    (metric,) = own_metrics([name], (), ".")
    assert (metric.name, metric.code.source) == (name, b"")
    return metric.value(torch.from_numpy(outputs), torch.from_numpy(labels))


def test_the_names_are_those_of_the_configuration() -> None:
    assert tuple(NAMED_METRICS) == METRICS


@pytest.mark.parametrize(("name", "score"), [("auc", roc_auc_score), ("average_precision", average_precision_score)])
def test_classes_and_yes_or_no_are_ranked_as_scikit_learn_ranks_them(name, score) -> None:
    two = SCORES[:, :2]
    assert value(name, two, CLASSES % 2) == pytest.approx(score(CLASSES % 2, two[:, 1] - two[:, 0]))
    one = score(BINARY[:, 0], SCORES[:, 0])
    for outputs in (SCORES[:, :1], SCORES[:, 0]):
        for labels in (BINARY[:, 0], BINARY[:, :1], BINARY[:, 0].astype(np.float32)):
            assert value(name, outputs, labels) == pytest.approx(one)
    assert value(name, SCORES, BINARY) == pytest.approx(score(BINARY, SCORES, average="macro"))
    chances = torch.from_numpy(SCORES).double().softmax(1).numpy()
    rest = [score(each == CLASSES, chances[:, each]) for each in range(4)]
    assert value(name, SCORES, CLASSES) == pytest.approx(np.mean(rest))


def test_a_class_that_no_public_example_has_counts_in_no_mean() -> None:
    """Scikit-learn gives no number at all, and a rare class is missing in many a split."""
    kept = CLASSES != 3
    chances = torch.from_numpy(SCORES[kept]).double().softmax(1).numpy()
    rest = [roc_auc_score(CLASSES[kept] == each, chances[:, each]) for each in range(3)]
    assert value("auc", SCORES[kept], CLASSES[kept]) == pytest.approx(np.mean(rest))
    missing = BINARY.copy()
    missing[:, 2] = 0
    others = [0, 1, 3]
    assert value("auc", SCORES, missing) == pytest.approx(roc_auc_score(BINARY[:, others], SCORES[:, others]))


def test_numbers_are_measured_in_every_column() -> None:
    assert value("r2", SCORES, NUMBERS) == pytest.approx(r2_score(NUMBERS, SCORES))
    assert value("r2", SCORES[:, :1], NUMBERS[:, 0]) == pytest.approx(r2_score(NUMBERS[:, 0], SCORES[:, 0]))
    errors = SCORES - NUMBERS
    assert value("mae", SCORES, NUMBERS) == pytest.approx(np.abs(errors).mean())
    assert value("rmse", SCORES, NUMBERS) == pytest.approx(np.sqrt((errors**2).mean(0)).mean())
    assert value("rmse", SCORES[:, 0], NUMBERS[:, :1]) == pytest.approx(np.sqrt((errors[:, 0] ** 2).mean()))


@pytest.mark.parametrize(
    ("name", "outputs", "labels", "code", "says"),
    [
        ("auc", SCORES, NUMBERS, "metric_function", "needs labels of 0 and 1; the outputs have shape"),
        ("auc", SCORES, NUMBERS[:, 0], "metric_function", r"class numbers \[n\], or one a label"),
        ("auc", SCORES.reshape(ROWS, 2, 2), BINARY[:, :2], "metric_function", r"\[300, 2, 2\], the labels \[300, 2\]"),
        ("r2", SCORES, CLASSES, "metric_function", "r2 needs one output for each label"),
        ("mae", SCORES, CLASSES, "metric_function", "mae needs one output for each label"),
        ("auc", SCORES[:, 0], np.ones(ROWS), "metric_value", "undefined on this public split, which has no examples"),
        ("auc", SCORES, np.zeros(ROWS, np.int64), "metric_value", "which has no examples of two classes"),
        ("r2", SCORES[:, 0], np.ones(ROWS), "metric_value", "which has no labels that differ in every column"),
        ("r2", SCORES[:1, 0], np.ones(1), "metric_value", "which has no labels that differ"),
        ("mae", SCORES[:, 0] * np.float32("nan"), NUMBERS[:, 0], "metric_value", "mae is nan, not a finite number"),
        ("auc", SCORES[:, 0] * np.float32("nan"), BINARY[:, 0], "metric_function", "auc fails with ValueError"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(name, outputs, labels, code, says) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        value(name, outputs, labels)
    assert caught.value.code == code
