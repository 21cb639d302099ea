"""Metrics of the user's own and built-in ones, measured by the driver on a public split.

Hides how a metric is found, named, tried before anything is charged, and called; and which outputs and labels each
built-in one takes, all of which scikit-learn has too. There are two forms. With an output for each class [n, K] and
labels [n], a class is told apart from all others. With as many outputs as labels, each column is a question of its own:
yes or no, or a number. A value over several columns or classes is their mean.

Guarantee: a metric gets the outputs of a released model on a public split and that split's labels, copies of both, and
nothing else. It costs no epsilon: what it gets is public or released already. Not guaranteed: that its process holds
nothing else. It runs in the driver, which has seen a dataset that was given in memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycloak.coordinator.config.sections import metric_name
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.registry import is_identifier
from raycloak.workers.evaluation import Scorer
from raycloak.workers.inputs.datasets import Dataset
from raycloak.workers.inputs.user_code import own_words, resolve, source_digest
from raycloak.workers.terms.manifest import UserCode

Metric = Callable[[Tensor, Tensor], Any]
"""(outputs [n, ...], labels [n, ...]) of a whole split, on the CPU, to one finite number."""


@dataclass(frozen=True, slots=True)
class OwnMetric:
    """A metric of the user's own.

    Attributes:
        name: by which events and verdict show it.
        code: its source, for the manifest.
    """

    name: str
    function: Metric
    code: UserCode

    @classmethod
    def of(cls, metric: str | Metric, base: Path | str) -> Self:
        """Return the built-in metric of that name, the one that ``module:function`` names, or a callable with a name.

        Raises:
            ConfigError: ``module_function``; ``metric_function`` if a callable has no plain name.
        """
        if isinstance(metric, str) and metric in NAMED_METRICS:
            return cls(metric, NAMED_METRICS[metric], UserCode(name=metric, source=b""))
        if isinstance(metric, str):
            code = UserCode(name=metric, source=source_digest(metric, base))
            return cls(metric_name(metric), resolve(metric, base), code)
        name = getattr(metric, "__name__", type(metric).__name__)
        if not is_identifier(name) or not name.isidentifier():
            raise ConfigError("metric_function", f"a metric named '{name}' cannot be shown.", "Give it a name by def.")
        try:
            source = source_digest(metric, base)
        except Exception as error:
            raise ConfigError(
                "metric_function",
                f"the metric {name} has no source to state in the manifest: pickling it fails with {own_words(error)}",
                "Give a plain function.",
            ) from error
        return cls(name, metric, UserCode(name=name, source=source))

    def value(self, outputs: Tensor, labels: Tensor) -> float:
        """Return the metric's value.

        Raises:
            ConfigError: ``metric_function`` if it fails, with its own words: what it saw is public. ``metric_value``
                if it returns anything but one finite number.
        """
        try:
            # Copies, because a metric may sort in place what the next one gets.
            found = self.function(outputs.clone(), labels.clone())
        except ConfigError:
            raise  # a built-in metric's own words
        except Exception as error:
            raise ConfigError(
                "metric_function",
                f"the metric {self.name} fails with {own_words(error)}",
                "It is called with outputs [n, ...] and labels [n, ...] of the whole public split, as torch tensors.",
            ) from error
        if isinstance(found, Tensor | np.ndarray) and found.ndim == 0:
            found = found.item()
        if not isinstance(found, int | float | np.integer | np.floating) or isinstance(found, bool):
            raise ConfigError(
                "metric_value",
                f"the metric {self.name} returned a {type(found).__name__}, not one number.",
                "Return a float.",
            )
        if not math.isfinite(found):
            raise ConfigError(
                "metric_value",
                f"the metric {self.name} is {float(found)}, not a finite number.",
                "Return a number for every model, also for one that predicts a single class.",
            )
        return float(found)


def own_metrics(named: Sequence[str], given: Sequence[Metric], base: Path | str) -> tuple[OwnMetric, ...]:
    """Return the metrics of the configuration and those that were given in Python.

    Raises:
        ConfigError: as :meth:`OwnMetric.of`; ``metric_function`` if two have one name.
    """
    metrics: list[str | Metric] = [*named, *given]
    found = tuple(OwnMetric.of(each, base) for each in metrics)
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("metric_function", f"two metrics are named {name}.", "Rename one of the functions.")
    return found


def try_metrics(metrics: Sequence[OwnMetric], scorer: Scorer, examples: Dataset) -> None:
    """Call each metric on the outputs of the model that ``scorer`` has, for all examples of a public split.

    Guarantee: a metric that cannot be called so is found here, and not when steps are charged.

    Raises:
        ConfigError: as :meth:`OwnMetric.value`.
    """
    if metrics:
        predictions = Predictions()
        scorer.scores(examples, np.arange(len(examples), dtype=np.int64), predictions.add)
        outputs, labels = predictions.whole
        for metric in metrics:
            metric.value(outputs, labels)


class Predictions:
    """The outputs and labels of a split, as they are computed batch by batch."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Keep a batch."""
        self._outputs.append(outputs.cpu())
        self._labels.append(labels.cpu())

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """All outputs and all labels, in the order of the split."""
        return torch.cat(self._outputs), torch.cat(self._labels)


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
