"""Measuring released parameters on data declared public."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metrics.errors import ConfigError
from workers.datasets import Dataset, DatasetDescriptor
from workers.models import ModelSource, build_model, load_flat, loss_function

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A result on a public dataset.

    Attributes:
        metric: ``accuracy``: share of labels that are the largest output, in [0, 1]; or ``loss``: mean over examples.
        value: of the metric.
        num_examples: how many it was measured on.
    """

    metric: Literal["accuracy", "loss"]
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
    """Open a dataset whose results may be shown to everybody.

    Raises:
        ConfigError: ``evaluation_not_public``; DatasetError as `DatasetDescriptor.open`.
    """
    if not descriptor.public:
        raise ConfigError(
            "evaluation_not_public",
            "the evaluation dataset is not declared public, so results on it would leak.",
            "Set evaluation.dataset.public: true if its examples need no protection.",
        )
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
        self._module = build_model(source, base, seed).eval()
        self._loss_fn, _ = loss_function(loss, base)
        self._is_classification = loss == "cross_entropy"
        self._dataset = dataset

    def measure(self, parameters: NDArray[np.float32]) -> Evaluation:
        """Accuracy under ``cross_entropy``, else the mean loss, of float32 [d] parameters in canonical order."""
        load_flat(self._module, parameters)
        count, total = len(self._dataset), 0.0
        with torch.no_grad():
            for start in range(0, count, _BATCH):
                ids = np.arange(start, min(start + _BATCH, count), dtype=np.int64)
                features, labels = self._dataset.batch(ids)
                total += float(self._scores(torch.tensor(features), torch.tensor(labels)).double().sum())
        return Evaluation("accuracy" if self._is_classification else "loss", total / count, count)

    def _scores(self, features: Tensor, labels: Tensor) -> Tensor:
        """One score per example, [n]."""
        output: Tensor = self._module(features)
        if not self._is_classification:
            return self._loss_fn(output, labels)
        return (output.argmax(1) == labels).double().reshape(len(labels), -1).mean(1)
