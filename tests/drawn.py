"""Micro-batches in which drawn examples come first, in their order, and the first one is the spare row."""

from collections.abc import Iterator

import numpy as np

from raycloak.workers.gradients.clipping import MicroBatch, micro_batches
from raycloak.workers.inputs.datasets import Batch, Dataset
from raycloak.workers.terms.mechanism import Mechanism


def batches_of(
    dataset: Dataset, ids: np.ndarray, mechanism: Mechanism, *, padding: int = 0, spare: Batch | None = None
) -> Iterator[MicroBatch]:
    """Return the micro-batches of ``ids``."""
    places = np.arange(mechanism.micro_batch_size * mechanism.micro_batches)
    held = dataset.batch(np.array([padding])) if spare is None else spare
    padded = np.concatenate([ids, np.full(max(0, len(places) - len(ids)), padding)])[:, None]
    present = (places < len(ids))[:, None]
    return micro_batches(dataset, padded, present, mechanism, places=places, spare=held)


def spare_of(dataset: Dataset) -> Batch:
    """Return the first example, for places that no example was drawn for."""
    return dataset.batch(np.zeros(1, np.int64))
