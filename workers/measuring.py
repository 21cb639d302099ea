"""What an example contributes to a measurement: a vector of norm at most 1, clipped by the code that clips gradients.

As for gradients, shapes and work depend on public numbers alone: always M micro-batches of m rows.
"""

import warnings
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from metrics.errors import ConfigError
from workers.clipping import MAX_ROWS, ClippedSum, MicroBatch, named_operations
from workers.datasets import DatasetForm
from workers.measurement import Measurement
from workers.models import LossFn, load_flat


class SumEngine(Protocol):
    """Computes one virtual worker's clipped sum."""

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> NDArray[np.float64]:
        """Sum over the valid rows of ``batches``, float64 [d], divided by nothing."""
        ...


class ClassCounts:
    """Counts labels.

    Guarantee: an example adds one vector with a single coordinate that is not zero, at most ``LARGEST_NORM``; a label
    that is no class adds nothing, and nothing is said of it. The total changes by at most 1 in the l2 norm if one
    example contributes nothing (:class:`workers.clipping.ClippedSum`).
    """

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> NDArray[np.float64]:
        """Sum of one-hot labels times ``unit``, float64 [classes]; the parameters do not matter."""
        measurement = self._measurement
        total = _total(measurement)
        classes = torch.arange(measurement.mechanism.dimension)
        for _, labels, valid in batches:
            hot = (torch.tensor(labels)[:, None] == classes).to(torch.float32) * measurement.unit
            total.add([hot], torch.tensor(valid))
        return total.total()


class PrivateEvaluation:
    """Loss, and accuracy where there are classes, of every example.

    Guarantee: an example adds one vector of norm at most 1, in which loss and accuracy are scaled by public constants
    and clipped together; one whose loss is not finite adds nothing, and nothing is said of it. The total changes by
    at most 1 in the l2 norm if one example contributes nothing (:class:`workers.clipping.ClippedSum`).

    Args:
        module: becomes this object's own.
        loss_fn: one loss per example.
        device: ``cpu`` or ``cuda``.
        deterministic: see :func:`workers.clipping.named_operations`.
    """

    def __init__(
        self,
        measurement: Measurement,
        module: nn.Module,
        loss_fn: LossFn,
        device: str | torch.device = "cpu",
        deterministic: bool = True,
    ) -> None:
        self._measurement = measurement
        self._device = torch.device(device)
        self._module = module.to(self._device).eval()
        self._loss_fn = loss_fn
        self._deterministic = deterministic

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> NDArray[np.float64]:
        """Sum of (loss / B, correct) times ``unit``, float64 [1 or 2].

        No warning is shown, since one could depend on an example.

        Raises:
            ModelError: ``nondeterministic_op`` naming the operation.
        """
        load_flat(self._module, parameters)
        total = _total(self._measurement)
        with warnings.catch_warnings(), torch.no_grad(), named_operations(self._deterministic):
            warnings.simplefilter("ignore")
            for features, labels, valid in batches:
                on_device = torch.tensor(features, device=self._device), torch.tensor(labels, device=self._device)
                total.add([self._rows(*on_device).cpu()], torch.tensor(valid))
        return total.total()

    def _rows(self, features: Tensor, labels: Tensor) -> Tensor:
        output: Tensor = self._module(features)
        bound, losses = self._measurement.loss_bound, self._loss_fn(output, labels)
        # Cutting an infinite loss would make it count; as NaN it takes the whole row out.
        columns = [torch.where(losses.isfinite(), losses.clamp(-bound, bound) / bound, torch.nan)]
        if self._measurement.mechanism.dimension == 2:
            columns.append((output.argmax(1) == labels).to(torch.float32).reshape(len(labels), -1).mean(1))
        return torch.stack([column.to(torch.float32) for column in columns], 1) * self._measurement.unit


def _total(measurement: Measurement) -> ClippedSum:
    mechanism = measurement.mechanism
    return ClippedSum([mechanism.dimension], mechanism.max_grad_norm, torch.device("cpu"))


def check_measurable(measurement: Measurement, form: DatasetForm) -> None:
    """Refuse a measurement that does not fit the data; a function of public facts only.

    Raises:
        ConfigError: ``measurement_labels`` or ``measurement_too_large``.
    """
    mechanism = measurement.mechanism
    if measurement.query == "class_counts" and (form.label_shape, form.label_dtype) != ((), "int64"):
        raise ConfigError(
            "measurement_labels",
            f"labels of type {form.label_dtype} and shape {list(form.label_shape)} are no class numbers to count.",
            "Remove measurements.class_counts, or give one integer label an example.",
        )
    if mechanism.micro_batches * mechanism.micro_batch_size > MAX_ROWS:
        raise ConfigError(
            "measurement_too_large",
            f"a virtual worker would measure {mechanism.micro_batches * mechanism.micro_batch_size} rows at once, over "
            f"{MAX_ROWS}, for which the sensitivity is proved.",
            "Use more virtual workers.",
        )
