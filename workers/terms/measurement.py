"""Measurements: Gaussian sums over all examples, released beside the gradient and charged like it.

    class_counts   how many examples each class has, once, before the first step
    evaluation     mean loss and accuracy of the model on the training examples, every so many steps and at the end;
                   on demand the share of examples of each pair of label and predicted class

A measurement is a separate mechanism. Every example contributes (q = 1) one vector of norm at most 1
(`workers/gradients/sum_engines.py`). The rest is the path of a gradient: receipt, keyed noise of each virtual worker,
ring, masks, a sum that is only decoded whole. It does not enter the update of the parameters.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Message
from raycloak.attestation.core.roster import Query
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.mechanism import Mechanism

NORM = 1.0
"""l2 bound of one example's contribution to a measurement."""

LARGEST_NORM = 1.0 - 2.0**-10
"""The norm that a contribution is scaled to at most. It is below what clipping to 1 aims at, so clipping never binds,
and dividing by it gives counts and means without bias. A block of counts is exact in float32, as a power of two is."""


class Measurement(Message):
    """One measurement of a run.

    Attributes:
        mechanism: its own, with ``query``, ``dimension`` and ``steps``, the number of releases.
        every: training steps between two releases; 0 for one release before the first step.
        loss_bound: B; an example's loss is cut to [-B, B]. 0 where no loss is measured.
    """

    DOMAIN: ClassVar[str] = "raycloak/measurement/v1"

    mechanism: Mechanism
    every: int = Field(ge=0)
    loss_bound: float = Field(ge=0)

    @model_validator(mode="after")
    def _counts_every_example_in_full(self) -> Self:
        own = self.mechanism
        if own.query == "gradient" or own.sample_rate != 1 or own.max_grad_norm != NORM:
            raise ValueError("in a measurement every example contributes one vector of norm at most 1")
        if own.micro_batch_size * own.micro_batches < -(-own.num_examples // own.virtual_workers):
            raise ValueError("a measurement holds whole slices")
        return self

    @property
    def query(self) -> Query:
        """The one of the run's queries that this is."""
        return self.mechanism.query

    @property
    def classes(self) -> int:
        """The number of classes whose pairs an evaluation counts; 0 if it counts none."""
        pairs = self.mechanism.dimension - 2 if self.query == "evaluation" else 0
        return math.isqrt(max(pairs, 0))

    @property
    def unit(self) -> float:
        """The largest value of a coordinate of an example's vector, a float32 number; see ``LARGEST_NORM``."""
        # Of the counts of an example one is set; of its evaluation loss, accuracy and one share at most.
        most_set = 1 if self.query == "class_counts" else min(self.mechanism.dimension, 3)
        return float(np.float32(LARGEST_NORM / math.sqrt(most_set)))

    @property
    def scales(self) -> dict[str, float]:
        """By the name of each coordinate, in order, the value that it stands for where the decoded sum is 1."""
        if self.query == "class_counts":
            found = {f"count_{label}": 1.0 for label in range(self.mechanism.dimension)}
        else:
            classes = range(self.classes)
            found = {"loss": self.loss_bound} | ({"accuracy": 1.0} if self.mechanism.dimension >= 2 else {})
            found |= {f"share_{label}_{predicted}": 1.0 for label in classes for predicted in classes}
        return {name: scale / self.unit for name, scale in found.items()}

    def after(self, number: int, planned_steps: int) -> int:
        """Return how many training steps are finished when release ``number`` is made."""
        # A last interval that the plan cuts short is released at the plan's end.
        return min((number + 1) * self.every, planned_steps)

    def due(self, finished_steps: int, planned_steps: int) -> int | None:
        """Return the number of the release that is made after ``finished_steps``; None if there is none."""
        if self.every == 0:
            return 0 if finished_steps == 0 else None
        if finished_steps == 0 or (finished_steps % self.every and finished_steps != planned_steps):
            return None
        return -(-finished_steps // self.every) - 1


class Released(Message):
    """The values of one release of a measurement; noised, so any use of them is free.

    Attributes:
        query, number: which release of which measurement.
        after: training steps that were finished.
        values: by name: ``loss``, ``accuracy`` and ``share_LABEL_PREDICTED``, or ``count_0``, ``count_1``, ...
        deviation: standard deviation of the noise in each value. It says nothing about the data.
    """

    DOMAIN: ClassVar[str] = "raycloak/released/v1"

    query: Query
    number: int
    after: int
    values: dict[str, float]
    deviation: dict[str, float]

    @property
    def f1(self) -> float | None:
        """The macro F1 of the shares, which costs nothing more; None without shares, or if noise left none."""
        shares = [value for name, value in self.values.items() if name.startswith("share_")]
        if not shares:
            return None
        pairs = np.array(shares).reshape(math.isqrt(len(shares)), -1)
        return macro_f1(np.diag(pairs), pairs.sum(0) + pairs.sum(1))


class ReleasedValues(Message):
    """The values that the measurements of a run have released, in the order of release."""

    DOMAIN: ClassVar[str] = "raycloak/released-values/v1"

    releases: tuple[Released, ...] = ()


def released(measurement: Measurement, number: int, planned_steps: int, average: NDArray[np.float64]) -> Released:
    """Name and scale the sum that an aggregator decoded.

    Args:
        average: float64 [d], the decoded sum over the public divisor.
    """
    mechanism = measurement.mechanism
    noise = math.sqrt(mechanism.virtual_workers) * mechanism.sigma * mechanism.gamma / mechanism.expected_batch_size
    scales = measurement.scales
    return Released(
        query=measurement.query,
        number=number,
        after=measurement.after(number, planned_steps),
        values={name: float(value) * scale for (name, scale), value in zip(scales.items(), average, strict=True)},
        deviation={name: noise * scale for name, scale in scales.items()},
    )


def average_of(measurement: Measurement, values: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the sum that :func:`released` named and scaled, from its values; exact, because it has whole ring units.

    Raises:
        ProtocolError: ``malformed`` if the values are not those of a sum of this measurement.
    """
    mechanism, scales = measurement.mechanism, measurement.scales
    # Their order is the layout's here, whatever it was on paper.
    if values.keys() != scales.keys():
        raise ProtocolError("malformed", f"a release of {measurement.query} has other values than its layout")
    scaled = np.array([values[name] / scale for name, scale in scales.items()])
    units = np.rint(scaled * mechanism.expected_batch_size / mechanism.gamma)
    average: NDArray[np.float64] = units * mechanism.gamma / mechanism.expected_batch_size
    return average


def values_digest(query: Query, number: int, average: NDArray[np.float64]) -> bytes:
    """Return the digest by which a release is committed."""
    return digest(length_prefixed("raycloak/measured/v1", query, number, average.tobytes()))


def macro_f1(right: NDArray[Any], either: NDArray[Any]) -> float | None:
    """Return the mean F1 over classes, from counts or shares, noised or not.

    A class that is neither a label nor predicted does not count; None if no class does.

    Args:
        right: of each class, the examples that are predicted rightly, [K].
        either: of each class, the examples that have it as label plus those that have it as prediction, [K].
    """
    found = either > 0
    return float(np.mean(2 * right[found] / either[found])) if found.any() else None
