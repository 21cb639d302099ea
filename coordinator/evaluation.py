"""Measuring released parameters on data whose results are declared public, by the driver where it may see the data.

`coordinator/sealed_evaluation.py` measures on data that it may not see.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.config import RunConfig
from coordinator.plan_command import descriptor
from coordinator.sealed_terms import require_public
from workers.datasets import Dataset
from workers.descriptor import DatasetDescriptor
from workers.evaluating import Metric, Scorer, metric_of
from workers.models import ModelSource, build_model, loss_function


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A result that may be shown to everybody.

    Attributes:
        metric: ``accuracy``: share of labels that are the largest output, in [0, 1]; or ``loss``: mean over examples.
        value: of the metric.
        num_examples: how many it was measured on.
    """

    metric: Metric
    value: float
    num_examples: int

    @property
    def accuracy(self) -> float | None:
        """The value if it is an accuracy."""
        return self.value if self.metric == "accuracy" else None

    @property
    def loss(self) -> float | None:
        """The value if it is a loss."""
        return self.value if self.metric == "loss" else None


def open_public(descriptor: DatasetDescriptor, base: Path | str) -> Dataset:
    """Open a dataset that everybody may see, and results on it.

    Raises:
        ConfigError: ``evaluation_not_public``; DatasetError as `DatasetDescriptor.open`.
    """
    require_public(descriptor.kind, descriptor.public)
    return descriptor.open(base)


class Evaluator:
    """Measures parameter vectors of one model in eval mode, on the CPU.

    Args:
        source, loss, base, seed: as in the run.
        dataset: public; see :func:`open_public`.
        every: steps between two evaluations; kept for the caller.

    Raises:
        ModelError, ConfigError: what building the model or finding the loss raises.
    """

    def __init__(
        self, source: ModelSource, loss: str, dataset: Dataset, base: Path | str, seed: int = 0, every: int = 1
    ) -> None:
        self.every = every
        loss_fn, _ = loss_function(loss, base)
        self._metric = metric_of(loss)
        self._scorer = Scorer(build_model(source, base, seed), loss_fn, self._metric)
        self._dataset = dataset

    def measure(self, parameters: NDArray[np.float32]) -> Evaluation:
        """Accuracy under ``cross_entropy``, else the mean loss, of float32 [d] parameters in canonical order."""
        count = len(self._dataset)
        self._scorer.load(parameters)
        total = self._scorer.total(self._dataset, np.arange(count, dtype=np.int64))
        return Evaluation(self._metric, total / count, count)


def public_evaluator(config: RunConfig, model: ModelSource, base: Path | str) -> Evaluator | None:
    """Measures on the split of ``config``; None if there is none, or it is sealed and the workers measure on it.

    Raises:
        ConfigError: as :func:`open_public` and :class:`Evaluator`.
    """
    if config.evaluation is None or config.evaluation.kept == "sealed":
        return None
    dataset = open_public(descriptor(config.evaluation.dataset), base)
    return Evaluator(model, config.loss, dataset, base, config.seed, config.evaluation.every)
