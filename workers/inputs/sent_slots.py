"""The places of the examples that a client sends step by step, before any of them has come."""

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.datasets import Batch, DatasetForm


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
        form = self._form
        return (
            np.empty((0, *form.feature_shape), form.feature_dtype),
            np.empty((0, *form.label_shape), form.label_dtype),
        )
