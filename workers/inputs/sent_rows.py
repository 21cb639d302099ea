"""The examples that a client sends one virtual worker for one step: their places before any of them has come, and as a
worker computes with them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.datasets import Batch, DatasetForm
from raycloak.workers.inputs.void import IGNORED, PADDING


@dataclass(frozen=True, slots=True)
class SentForm:
    """The form of sent examples, and the public ranges of their integers.

    Attributes:
        form: its number of examples is the most of one step.
        vocabulary: features that are integers are ids below it, or the padding of text.
        classes: labels that are integers are below it; None where they are ids too.
        padded: whether the model knows the padding of text, `raycloak.workers.inputs.void.PADDING`.
    """

    form: DatasetForm
    vocabulary: int | None
    classes: int | None
    padded: bool = False

    def decode(self, row: bytes) -> Batch:
        """Return features and label of one example, each without the first extent."""
        assert len(row) == row_bytes(self.form), "rows were checked to have one size"
        form = self.form
        cut = _bytes(form.feature_shape, form.feature_dtype)
        features = np.frombuffer(row[:cut], np.dtype(form.feature_dtype).newbyteorder("<"))
        label = np.frombuffer(row[cut:], np.dtype(form.label_dtype).newbyteorder("<"))
        return features.reshape(form.feature_shape), label.reshape(form.label_shape)

    def in_range(self, features: NDArray[np.generic], label: NDArray[np.generic]) -> bool:
        """Return whether every integer of an example is one that model and loss know."""
        ids = features[features != PADDING] if self.padded else features
        if np.issubdtype(features.dtype, np.integer) and not _below(ids, self.vocabulary):
            return False
        if not np.issubdtype(label.dtype, np.integer):
            return True
        most = self.classes if self.classes is not None else self.vocabulary
        # A label for each token may leave some of them out; a class may not be left out.
        return _below(label[label != IGNORED] if label.ndim else label, most)


def row_bytes(form: DatasetForm) -> int:
    """Return the size of an encoded example: its features in C order, then its label, both little-endian."""
    return _bytes(form.feature_shape, form.feature_dtype) + _bytes(form.label_shape, form.label_dtype)


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _below(values: NDArray[np.generic], most: int | None) -> bool:
    return most is None or bool(((values >= 0) & (values < most)).all())  # type: ignore[operator]


class SentSlots:
    """A dataset with as many places as one step may have examples, all of them empty.

    It has a form, so that a model can be checked and a run planned before a client sends anything.

    Args:
        form: of the examples; its number of them is the most of one step.
    """

    def __init__(self, form: DatasetForm) -> None:
        self._form = form

    def __len__(self) -> int:
        return self._form.num_examples

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return the empty batch of no ``ids``; DatasetError ``not_sent`` for any."""
        if len(ids):
            raise DatasetError(
                "not_sent",
                "the examples of this dataset come from a client, step by step, and none is here.",
                "Read no example before a step has brought it.",
            )
        return self._form.zeros(0)


class SentRows:
    """A :class:`raycloak.workers.inputs.datasets.Dataset` of a step's places, of which one virtual worker's are filled.

    An example with an integer out of its range is left out silently: a code for it would reveal something about an
    example. The client has checked what it sent.

    Args:
        rows: encoded examples, by place.
    """

    def __init__(self, form: SentForm, rows: Mapping[int, bytes]) -> None:
        self._form = form.form
        self._rows: dict[int, Batch] = {}
        for place, row in rows.items():
            features, label = form.decode(row)
            if form.in_range(features, label):
                self._rows[place] = features, label

    def __len__(self) -> int:
        return self._form.num_examples

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return the examples at the places ``ids``, in order; an empty place is all zeros."""
        features, labels = self._form.zeros(len(ids))
        for row, place in enumerate(ids):
            if int(place) in self._rows:
                features[row], labels[row] = self._rows[int(place)]
        return features, labels

    def present(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the places ``ids`` have an example, bool [n]."""
        return np.array([int(place) in self._rows for place in ids], np.bool_)
