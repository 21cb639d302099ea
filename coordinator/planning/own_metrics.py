"""Metrics of the user's own and built-in ones, measured by the driver on a public split.

Hides how a metric is found, named, tried before anything is charged, and called.

Guarantee: a metric gets the outputs of a released model on a public split and that split's labels, copies of both, and
nothing else. It costs no epsilon: what it gets is public or released already. Not guaranteed: that its process holds
nothing else. It runs in the driver, which has seen a dataset that was given in memory.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from raycloak.coordinator.config.sections import metric_name
from raycloak.coordinator.planning.named_metrics import NAMED_METRICS
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
