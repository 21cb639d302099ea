"""Sum engines: they turn a virtual worker's examples into one clipped sum, for each query of a run.

    gradient       raycloak.workers.gradients.clipping.GradientEngine
    class_counts   ClassCountEngine
    evaluation     PrivateEvaluationEngine

For every query, a unit adds one bounded vector through :class:`raycloak.workers.gradients.clipping.ClippedSum`: of a
measurement the mean over its rows. Shapes and work depend on public numbers alone: always M micro-batches of m units.
"""

import warnings
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycloak.metrics.errors import ConfigError
from raycloak.workers.gradients.clipping import MAX_ROWS, ClippedSum, MicroBatch
from raycloak.workers.gradients.gradient_parts import named_operations
from raycloak.workers.gradients.kept_state import KeptState
from raycloak.workers.gradients.parts import DensePart
from raycloak.workers.gradients.placement import on_device
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.unit_rows import means
from raycloak.workers.gradients.vocabulary_loss import ModelLosses
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import share_predicted
from raycloak.workers.models.models import LossFn, ModelRuntime, device_of, load_flat
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.public_sums import PublicSums

_CPU = torch.device("cpu")
"""Where measurements are added up: they are small."""


class SumEngine(Protocol):
    """Computes one virtual worker's clipped sum."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of coordinates of each tensor that the sum consists of, in order."""
        ...

    @property
    def counted(self) -> PublicSums | None:
        """Exact sums over the examples of the last clipped sum; None under a private mechanism, and of measurements."""
        ...

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Return the sum over the units of ``batches``, divided by nothing: float64 pieces of whole tensors."""
        ...


class ClassCountEngine:
    """Counts labels.

    Guarantee: a unit adds one vector, the mean over its rows of vectors with a single coordinate that is not zero, at
    most ``LARGEST_NORM``. A label that is no class adds nothing, and no error tells of it. The total changes by at most
    1 in the l2 norm if one unit contributes nothing (:class:`raycloak.workers.gradients.clipping.ClippedSum`).
    """

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self.sizes = (measurement.mechanism.dimension,)
        self.counted: PublicSums | None = None

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Return the sum of one-hot labels times ``unit``, one piece [classes]; the parameters do not matter."""
        measurement = self._measurement
        total = _total(measurement)
        classes = torch.arange(measurement.mechanism.dimension, device=_CPU)
        for _, labels, valid in batches:
            hot = (torch.tensor(labels, device=_CPU)[:, None] == classes).to(torch.float32) * measurement.unit
            _add(total, hot, valid, measurement.mechanism)
        return total.pieces()


class PrivateEvaluationEngine:
    """Sums the loss of every unit, and where there are classes the accuracy and its pairs of label and prediction.

    Guarantee: a unit adds one vector of norm at most 1, the mean over its rows, in which loss, accuracy and the one
    coordinate of a row's pair are scaled by public constants and clipped together. A unit that has a row whose loss is
    not finite adds nothing, and no error tells of it. The total changes by at most 1 in the l2 norm if one unit
    contributes nothing (:class:`raycloak.workers.gradients.clipping.ClippedSum`).

    Args:
        module: becomes this object's own.
        loss_fn: one loss per example.
        device: ``cpu`` or ``cuda``.
        deterministic: see :func:`raycloak.workers.gradients.gradient_parts.named_operations`.
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
        self.sizes = (measurement.mechanism.dimension,)
        self._module = on_device(module, device).eval()
        self._device = device_of(module)
        loss = RowLoss.of(loss_fn)
        self._losses = ModelLosses(self._module, loss)
        self._deterministic = deterministic
        self._state = KeptState(self._module, loss.loss_fn)
        self.counted: PublicSums | None = None

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Return the sum of (loss / B, correct, pairs) times ``unit``, one piece [1, 2 or 2 + K²].

        No warning is shown, since one could depend on an example.

        Raises:
            ModelError: ``nondeterministic_op`` naming the operation; ``buffer_update`` or ``mixing_loss`` if the model
                or the loss kept anything of these examples (:class:`raycloak.workers.gradients.kept_state.KeptState`).
        """
        load_flat(self._module, parameters)
        self._state.parameters_set()
        total = _total(self._measurement)
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), named_operations(self._deterministic):
            for features, labels, valid in batches:
                on_device = torch.tensor(features, device=self._device), torch.tensor(labels, device=self._device)
                _add(total, self._rows(*on_device).cpu(), valid, self._measurement.mechanism)
                # Before the next rows meet what these left behind.
                self._state.check()
        return total.pieces()

    def _rows(self, features: Tensor, labels: Tensor) -> Tensor:
        # Accuracy, which reads logits, is of losses that take logits, too.
        with self._losses.module_form():
            output: Tensor = self._module(features)
        labels = labels.to(output.device)
        bound, losses = self._measurement.loss_bound, self._losses.of(output, labels)
        # Cutting an infinite loss would make it count; as NaN it takes the whole row out.
        columns = [torch.where(losses.isfinite(), losses.clamp(-bound, bound) / bound, torch.nan)]
        if self._measurement.mechanism.dimension >= 2:
            columns.append(share_predicted(output, labels))
        if classes := self._measurement.classes:
            columns.append(_pairs(labels, output.argmax(1), classes))
        return torch.column_stack([column.to(torch.float32) for column in columns]) * self._measurement.unit


def _pairs(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Return a 1 at the pair of each row's label and prediction, [m, classes²]; zeros where one is no class."""
    numbers = torch.arange(classes, device=labels.device)
    return ((labels[:, None] == numbers)[:, :, None] & (predicted[:, None] == numbers)[:, None, :]).flatten(1)


def measurement_engine(measurement: Measurement, runtime: ModelRuntime) -> SumEngine:
    """Return a new engine for ``measurement``; a model that it needs is a twin of the run's."""
    if measurement.query == "class_counts":
        return ClassCountEngine(measurement)
    return PrivateEvaluationEngine(measurement, runtime.twin(), runtime.loss_fn, runtime.device, runtime.deterministic)


def check_measurable(measurement: Measurement, form: DatasetForm) -> None:
    """Refuse a measurement that does not fit the data; a function of public facts only.

    Raises:
        ConfigError: ``measurement_labels`` or ``measurement_too_large``.
    """
    counts = measurement.query == "class_counts"
    # An evaluation takes any data, as the run's own loss is defined on it. Its pairs need one class number an example.
    if (counts or measurement.classes) and (form.label_shape, form.label_dtype) != ((), "int64"):
        field = "measurements.class_counts" if counts else "measurements.evaluation.classes"
        raise ConfigError(
            "measurement_labels",
            f"labels of type {form.label_dtype} and shape {list(form.label_shape)} are not class numbers to count.",
            f"Remove {field}, or give one integer label per example.",
        )
    rows = measurement.mechanism.micro_batches * measurement.mechanism.micro_batch_size
    if rows > MAX_ROWS:
        raise ConfigError(
            "measurement_too_large",
            f"a virtual worker would measure {rows} rows at once, over {MAX_ROWS}, for which the sensitivity is "
            "proved.",
            "Use more virtual workers.",
        )


def _add(total: ClippedSum, rows: Tensor, valid: NDArray[np.bool_], mechanism: Mechanism) -> None:
    """Add the mean over the valid ones of each unit's rows [m * k, n]."""
    present, rows_per_unit = torch.tensor(valid, device=_CPU), mechanism.rows_per_unit
    total.add([DensePart(means(rows, present, rows_per_unit))], present.view(-1, rows_per_unit).any(1))


def _total(measurement: Measurement) -> ClippedSum:
    mechanism = measurement.mechanism
    return ClippedSum([mechanism.dimension], mechanism.max_grad_norm, _CPU)
