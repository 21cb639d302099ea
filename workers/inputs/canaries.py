"""Canaries behind the examples of a dataset, for an audit: examples of zeros that carry nothing but their number."""

import math

import numpy as np
from numpy.typing import NDArray

from raycloak.workers.inputs.datasets import Batch, Dataset


class CanaryDataset:
    """A dataset with canaries behind its examples; see `raycloak.workers.inputs.datasets.Dataset`.

    Features are flattened. A last column marks examples (0), included canaries (their number, from 1) and excluded
    canaries (-1).
    """

    def __init__(self, examples: Dataset, included: NDArray[np.bool_]) -> None:
        self._examples = examples
        self._count = len(examples)
        numbers = np.arange(1, len(included) + 1)
        self._markers = np.where(included, numbers, -1)

    def __len__(self) -> int:
        return self._count + len(self._markers)

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return examples of the inner dataset; a canary has features and label of zero."""
        canary = ids >= self._count
        features, labels = self._examples.batch(np.where(canary, 0, ids))
        features = features.reshape(len(ids), math.prod(features.shape[1:])).copy()
        labels = labels.copy()
        features[canary], labels[canary] = 0, 0
        markers = np.where(canary, self._markers[np.where(canary, ids - self._count, 0)], 0)
        return np.concatenate([features, markers[:, None].astype(features.dtype)], axis=1), labels
