"""The metrics that have a name, as scikit-learn computes them from outputs and labels of a public split.

Hides which outputs and labels each one takes. There are two forms. With an output for each class [n, K] and labels [n],
a class is told apart from all others. With as many outputs as labels, each column is a question of its own: yes or no,
or a number. A value over several columns or classes is their mean.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycloak.metrics.errors import ConfigError

Columns = tuple[NDArray[Any], NDArray[Any]]
"""Scores and labels, float64 [n, k]."""


def _r2(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of the labels' variance that the outputs explain; below 0 if their mean would do better."""
    from sklearn.metrics import r2_score

    scores, targets = _numbers("r2", outputs, labels)
    if not (np.ptp(targets, axis=0) > 0).all():
        raise _undefined("r2", "labels that differ in every column")
    return float(r2_score(targets, scores))


def _error(name: str, measure: Callable[[NDArray[Any]], NDArray[Any]], outputs: Tensor, labels: Tensor) -> float:
    """Return a mean over columns of a measure of their errors, in units of the label."""
    scores, targets = _numbers(name, outputs, labels)
    return float(measure(scores - targets).mean())


def _mean_over_columns(name: str, score: str, outputs: Tensor, labels: Tensor) -> float:
    """Return the mean of a score of scikit-learn over questions with yes or no."""
    from sklearn import metrics

    scores, targets = _questions(name, outputs, labels)
    # A class that no example has, or that all have, cannot be told from others.
    asked = [column for column in range(targets.shape[1]) if 0 < targets[:, column].sum() < len(targets)]
    if not asked:
        raise _undefined(name, "examples of two classes")
    each = [getattr(metrics, score)(targets[:, column], scores[:, column]) for column in asked]
    return float(np.mean(each))


def _questions(name: str, outputs: Tensor, labels: Tensor) -> Columns:
    """Return scores and labels of questions with yes or no: one for two classes, else one for each class or column."""
    if outputs.numel() == labels.numel():
        scores, targets = _as_columns(outputs, labels)
        if not np.isin(targets, (0, 1)).all():
            raise _unfit(name, outputs, labels, "labels of 0 and 1")
        return scores, targets
    if outputs.ndim != 2 or labels.shape != (len(outputs),) or labels.is_floating_point():
        raise _unfit(name, outputs, labels, "an output for each class [n, K] and class numbers [n], or one a label")
    logits = outputs.double()
    if outputs.shape[1] == 2:
        return (logits[:, 1:] - logits[:, :1]).numpy(), (labels == 1).double()[:, None].numpy()
    hot = labels[:, None] == torch.arange(outputs.shape[1])
    return logits.softmax(1).numpy(), hot.double().numpy()


def _numbers(name: str, outputs: Tensor, labels: Tensor) -> Columns:
    if outputs.numel() != labels.numel():
        raise _unfit(name, outputs, labels, "one output for each label")
    return _as_columns(outputs, labels)


def _as_columns(outputs: Tensor, labels: Tensor) -> Columns:
    count = len(labels)
    return outputs.double().reshape(count, -1).numpy(), labels.double().reshape(count, -1).numpy()


def _unfit(name: str, outputs: Tensor, labels: Tensor, needs: str) -> ConfigError:
    return ConfigError(
        "metric_function",
        f"the metric {name} needs {needs}; the outputs have shape {list(outputs.shape)}, the labels "
        f"{list(labels.shape)} ({str(labels.dtype).removeprefix('torch.')}).",
        "Take a metric that fits loss and labels (docs/configuration.md), or write one: module:function.",
    )


def _undefined(name: str, needs: str) -> ConfigError:
    return ConfigError(
        "metric_value",
        f"the metric {name} is undefined on this public split, which has no {needs}.",
        "Evaluate on a split that has them, or leave the metric out.",
    )


NAMED_METRICS: Mapping[str, Callable[[Tensor, Tensor], float]] = MappingProxyType(
    {
        # How often a positive has a higher score than a negative, ties by half.
        "auc": partial(_mean_over_columns, "auc", "roc_auc_score"),
        # The precision averaged over the recalls that positives reach, as it is told where they are rare.
        "average_precision": partial(_mean_over_columns, "average_precision", "average_precision_score"),
        "r2": _r2,
        "mae": partial(_error, "mae", np.abs),
        "rmse": partial(_error, "rmse", lambda errors: np.sqrt(np.square(errors).mean(axis=0))),
    }
)
"""Each is a function of (outputs [n, ...], labels [n, ...]) of a whole split, on the CPU."""
