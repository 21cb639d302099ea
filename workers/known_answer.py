"""The known answer: the vector that this machine computes from a public synthetic batch, with public keys.

Machines of one numerics class agree on it. A machine that differs could put two different gradients under the same
noise, so it is refused at admission.
"""

import numpy as np

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.keys.release import VirtualWorkerKeys
from raycloak.workers.gradients.sum_engines import SumEngine
from raycloak.workers.inputs.datasets import Dataset
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.streams import KeyStream
from raycloak.workers.virtual_worker import VirtualWorkerComputer

# Known to everybody: the answer must be reproducible, and there is nothing to protect in a synthetic batch.
_PUBLIC_KEY = Secret(bytes(32))


class _SyntheticDataset:
    """A dataset of public examples in the form of ``template``: features in [0, 1) or {0, 1}, labels in {0, 1}."""

    def __init__(self, template: Dataset, count: int) -> None:
        features, labels = template.batch(np.empty(0, np.int64))
        self._features = _fill(features, count, "features")
        self._labels = _fill(labels, count, "labels")

    def __len__(self) -> int:
        return len(self._features)

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._features[ids], self._labels[ids]


def _fill(template: np.ndarray, count: int, name: str) -> np.ndarray:
    shape = (count, *template.shape[1:])
    stream = KeyStream(derive(_PUBLIC_KEY, Purpose.KNOWN_ANSWER, name)).bytes(int(np.prod(shape)))
    octets = np.frombuffer(stream, np.uint8).reshape(shape)
    if np.issubdtype(template.dtype, np.floating):
        return (octets / 256).astype(template.dtype)
    return (octets % 2).astype(template.dtype)


def known_answer(mechanism: Mechanism, engine: SumEngine, dataset: Dataset, parameters: np.ndarray) -> bytes:
    """Return the digest of the encoded, noised vector of one synthetic virtual worker.

    Args:
        dataset: read for shapes and dtypes only.
        parameters: the run's initial parameters, float32[d].

    Returns:
        32 bytes.
    """
    # A full batch: every row of every micro-batch is computed, and none is padding.
    count = mechanism.micro_batch_size * mechanism.micro_batches
    public = mechanism.model_copy(update={"num_examples": count, "virtual_workers": 1, "sample_rate": 1.0})
    computer = VirtualWorkerComputer(public, engine, _SyntheticDataset(dataset, count))
    keys = VirtualWorkerKeys(stream=_PUBLIC_KEY, data=_PUBLIC_KEY)
    return digest(computer.vector(0, keys, 0, bytes(32), bytes(32), parameters).values.data)
