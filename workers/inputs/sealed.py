"""Sealed datasets: each slice is encrypted under its own key, and opened separately.

Guarantee: an example is in memory only in a process that was given the key of its slice.
"""

import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.keys.release import key_commitment
from raycloak.attestation.sealed.chunk_stream import read_payload, write_payload
from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.attestation.sealed.sealed_data import (
    HEADER_FILE,
    PAYLOAD,
    SealedHeader,
    Use,
    require_committed,
    slice_file,
    slice_key,
)
from raycloak.metrics.errors import DatasetError, EvidenceError
from raycloak.metrics.file_errors import file_errors
from raycloak.workers.inputs.datasets import Batch, Dataset, DatasetForm, dataset_form, slice_ids
from raycloak.workers.inputs.example_codes import example_marks

# Rows encrypted at once: bounds the memory of sealing.
_CHUNK = 1024
_RESTORE = "Restore the folder as `raycloak data seal` wrote it."


def seal_dataset(
    dataset: Dataset,
    virtual_workers: int,
    policy_digest: bytes,
    dataset_key: Secret,
    folder: Path,
    use: Use = "training",
    demand: SealedDemand | None = None,
) -> SealedHeader:
    """Encrypt ``dataset`` into a new ``folder``, slice by slice; the header is written last.

    Memory: a few thousand examples, for a dataset of any size.

    Args:
        use: the one purpose that its slices may be opened for; see `raycloak.attestation.sealed.sealed_data`.
        demand: the owner's, of every run that trains on it. Training data must have one, an evaluation split none.

    Raises:
        DatasetError: ``dataset_small``, or ``dataset_unreadable`` if the folder exists or cannot be written.
    """
    form = dataset_form(dataset)
    slices = [slice_ids(v, virtual_workers, len(dataset)) for v in range(virtual_workers)]
    header = SealedHeader(
        use=use,
        dataset_id=secrets.token_bytes(16),
        virtual_workers=virtual_workers,
        policy_digest=policy_digest,
        demand=demand,
        form=form.model_dump(mode="json"),
        marks=example_marks(dataset, dataset_key),
        key_commitments=(),
    )
    keys = [slice_key(dataset_key, header, v) for v in range(virtual_workers)]
    with file_errors("dataset_unreadable", "write", folder, DatasetError):
        folder.mkdir(parents=True)
        try:
            payloads = []
            for v, ids in enumerate(slices):
                chunks = [ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)]
                pieces = (
                    np.ascontiguousarray(dataset.batch(chunk)[part]).tobytes() for part in (0, 1) for chunk in chunks
                )
                # Exclusive: two seals must not write into one file.
                with slice_file(folder, v).open("xb") as file:
                    payloads.append(write_payload(file, keys[v], header.context(v), PAYLOAD, pieces))
            commitments = tuple(key_commitment(key) for key in keys)
            sealed = header.model_copy(update={"key_commitments": commitments, "slices": tuple(payloads)})
            # Last: a folder without a header is not a sealed dataset, however far the slices came.
            (folder / HEADER_FILE).write_bytes(sealed.encode())
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return sealed


class Slices:
    """The slices of a dataset: all are open, and no key changes that, unless it is a :class:`SealedDataset`.

    Attributes:
        demand: the owner's, of every run that trains on them; None unless they are sealed training examples.
    """

    demand: SealedDemand | None = None

    def take(self, keys: Mapping[int, Secret], hosted: Collection[int]) -> None:
        """Lock the slices of virtual workers that are not ``hosted``, then open the slices of ``keys``."""


class SealedDataset(Slices):
    """A :class:`raycloak.workers.inputs.datasets.Dataset` whose examples are refused while their slice is locked.

    Args:
        folder: as :func:`seal_dataset` wrote it.
        use: the purpose that this process opens it for.

    Raises:
        ConfigError: ``sealed_data`` if ``folder`` has no sealed dataset, or one that was not sealed for ``use``.
    """

    def __init__(self, folder: Path, use: Use = "training") -> None:
        self.header = SealedHeader.load(folder)
        self.header.require_use(use)
        self.demand = self.header.demand
        self._folder = folder
        self._form = DatasetForm.model_validate_json(canonical_json(self.header.form))
        self.named_inputs = self._form.inputs
        self._open: dict[int, Batch] = {}

    def __len__(self) -> int:
        return self._form.num_examples

    def take(self, keys: Mapping[int, Secret], hosted: Collection[int]) -> None:
        """Lock the slices of virtual workers that are not ``hosted``, then :meth:`unlock` the slices of ``keys``."""
        # Locked first, so that memory never holds the former slices beside the new ones.
        self.lock_all_but(hosted)
        self.unlock(keys)

    def unlock(self, keys: Mapping[int, Secret]) -> None:
        """Decrypt the slices of ``keys`` into memory.

        Raises:
            EvidenceError: ``key_not_committed``.
            DatasetError: ``sealed_changed`` if a file is not what was sealed, ``dataset_unreadable``.
        """
        # Before a file is read: under a wrong key an honest file would look like a changed one.
        require_committed(self.header, sorted(keys.items()))
        for v, key in keys.items():
            if v not in self._open:
                self._open[v] = self._read(v, key)

    def lock_all_but(self, slices: Collection[int]) -> None:
        """Forget the examples of every other slice."""
        self._open = {v: batch for v, batch in self._open.items() if v in slices}

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return the examples of ``ids``, in order; DatasetError ``slice_sealed`` if the slice of one is locked."""
        features, labels = self._form.zeros(len(ids))
        slices = ids % self.header.virtual_workers
        for v in np.unique(slices):
            if int(v) not in self._open:
                raise DatasetError(
                    "slice_sealed",
                    f"slice {v} of the dataset is sealed, and no key was given.",
                    "Ask only for slices that are hosted here.",
                )
            own, places = self._open[int(v)], slices == v
            features[places] = own[0][ids[places] // self.header.virtual_workers]
            labels[places] = own[1][ids[places] // self.header.virtual_workers]
        return features, labels

    def _read(self, v: int, key: Secret) -> Batch:
        features, labels = self._form.zeros(len(slice_ids(v, self.header.virtual_workers, len(self))))
        unreadable = file_errors("dataset_unreadable", "read", f"slice {v}", DatasetError)
        try:
            with unreadable, slice_file(self._folder, v).open("rb") as file:
                content = b"".join(read_payload(file, key, self.header.context(v), self.header.slices[v]))
        except EvidenceError:
            raise DatasetError(
                "sealed_changed", f"slice {v} of the dataset is not what was sealed.", _RESTORE
            ) from None
        # The header's shapes and the encrypted sizes are two statements, and may disagree.
        if len(content) != features.nbytes + labels.nbytes:
            raise DatasetError(
                "sealed_changed", f"slice {v} of the dataset has another size than its header says.", _RESTORE
            )
        features.reshape(-1).view(np.uint8)[:] = np.frombuffer(content[: features.nbytes], np.uint8)
        labels.reshape(-1).view(np.uint8)[:] = np.frombuffer(content[features.nbytes :], np.uint8)
        return features, labels
