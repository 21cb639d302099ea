"""Sealed datasets: each slice is encrypted under its own key, and opened separately.

Guarantee: an example is in memory only in a process that was given the key of its slice.

Guarantee: all rows of a unit are in one slice. How many rows it has is encrypted with them. The header shows how many
rows and how many units a slice has.
"""

import itertools
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from raycloak.metrics.errors import ConfigError, DatasetError, EvidenceError
from raycloak.metrics.file_errors import file_errors
from raycloak.workers.inputs.datasets import Batch, Dataset, DatasetForm, dataset_form, slice_ids
from raycloak.workers.inputs.example_codes import example_marks
from raycloak.workers.inputs.units import Units

# Rows encrypted at once: bounds the memory of sealing.
_CHUNK = 1024
# Of a unit, in front of the rows of a slice.
_SIZE = np.dtype("<i8")
_RESTORE = "Restore the folder as `raycloak data seal` wrote it."


def seal_dataset(
    dataset: Dataset,
    virtual_workers: int,
    policy_digest: bytes,
    dataset_key: Secret,
    folder: Path,
    use: Use = "training",
    demand: SealedDemand | None = None,
    units: tuple[str, Units] | None = None,
) -> SealedHeader:
    """Encrypt ``dataset`` into a new ``folder``, slice by slice; the header is written last.

    Memory: a few thousand examples, for a dataset of any size.

    Args:
        use: the one purpose that its slices may be opened for; see `raycloak.attestation.sealed.sealed_data`.
        demand: the owner's, of every run that trains on it. Training data must have one, an evaluation split none.
        units: whose rows the examples are, and the public name of what they are; None where each example is a unit of
            its own.

    Raises:
        DatasetError: ``dataset_small``, or ``dataset_unreadable`` if the folder exists or cannot be written.
    """
    form, unit = dataset_form(dataset), None
    if units is not None:
        unit, of_units = units
        form = form.model_copy(update={"units": len(of_units)})
    slices = [slice_ids(v, virtual_workers, form.population) for v in range(virtual_workers)]
    cuts = [b""] * virtual_workers
    if units is not None:
        cuts = [of_units.sizes(own).astype(_SIZE).tobytes() for own in slices]
        slices = [of_units.rows_of(own) for own in slices]
    header = SealedHeader(
        use=use,
        dataset_id=secrets.token_bytes(16),
        virtual_workers=virtual_workers,
        policy_digest=policy_digest,
        demand=demand,
        form=form.model_dump(mode="json"),
        unit=unit,
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
                rows = (
                    np.ascontiguousarray(dataset.batch(chunk)[part]).tobytes() for part in (0, 1) for chunk in chunks
                )
                pieces = itertools.chain([cuts[v]] if cuts[v] else [], rows)
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
        self._open: dict[int, _OpenSlice] = {}
        self._slices = range(self.header.virtual_workers)
        self.units = None if self._form.units is None else _SealedUnits(self)
        if self.units is not None:
            # The first row of each slice, and behind the last the number of all rows.
            self._starts = np.cumsum([0, *map(self._rows_of_slice, self._slices)])
            if self._starts[-1] != len(self):
                raise ConfigError("sealed_data", f"{folder} has slices of other sizes than its header says.", _RESTORE)

    def __len__(self) -> int:
        return self._form.num_examples

    @property
    def population(self) -> int:
        """The number of units; of examples where each is a unit of its own."""
        return self._form.population

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
        if self.units is None:
            slices, rows = ids % len(self._slices), ids // len(self._slices)
        else:
            slices = np.searchsorted(self._starts, ids, "right") - 1
            rows = ids - self._starts[slices]
        for v in np.unique(slices):
            own, places = self._opened(int(v)), slices == v
            features[places] = own.features[rows[places]]
            labels[places] = own.labels[rows[places]]
        return features, labels

    def _opened(self, v: int) -> "_OpenSlice":
        if v not in self._open:
            raise DatasetError(
                "slice_sealed",
                f"slice {v} of the dataset is sealed, and no key was given.",
                "Ask only for slices that are hosted here.",
            )
        return self._open[v]

    def _units_of_slice(self, v: int) -> int:
        return 0 if self._form.units is None else len(slice_ids(v, len(self._slices), self._form.units))

    def _rows_of_slice(self, v: int) -> int:
        if self._form.units is None:
            return len(slice_ids(v, len(self._slices), len(self)))
        # A form whose examples are empty is none that a seal writes.
        row = max(1, sum(part.nbytes for part in self._form.zeros(1)))
        return max(0, self.header.slices[v].plain_bytes - self._units_of_slice(v) * _SIZE.itemsize) // row

    def spans(self, units: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first row and the number of rows of each of ``units`` [n], whose slices must be open."""
        slices, places = units % len(self._slices), units // len(self._slices)
        starts, sizes = np.empty(units.shape, np.int64), np.empty(units.shape, np.int64)
        for v in np.unique(slices):
            own, here = self._opened(int(v)), slices == v
            sizes[here] = own.sizes[places[here]]
            starts[here] = self._starts[v] + own.starts[places[here]]
        return starts, sizes

    def _read(self, v: int, key: Secret) -> "_OpenSlice":
        features, labels = self._form.zeros(self._rows_of_slice(v))
        sizes = np.zeros(self._units_of_slice(v), _SIZE)
        unreadable = file_errors("dataset_unreadable", "read", f"slice {v}", DatasetError)
        try:
            with unreadable, slice_file(self._folder, v).open("rb") as file:
                content = b"".join(read_payload(file, key, self.header.context(v), self.header.slices[v]))
        except EvidenceError:
            raise DatasetError(
                "sealed_changed", f"slice {v} of the dataset is not what was sealed.", _RESTORE
            ) from None
        # The header's shapes and the encrypted sizes are two statements, and may disagree.
        if len(content) != sum(part.nbytes for part in (sizes, features, labels)):
            raise DatasetError(
                "sealed_changed", f"slice {v} of the dataset has another size than its header says.", _RESTORE
            )
        start = 0
        for part in (sizes, features, labels):
            part.reshape(-1).view(np.uint8)[:] = np.frombuffer(content[start : start + part.nbytes], np.uint8)
            start += part.nbytes
        if len(sizes) and ((sizes < 1).any() or sizes.sum() != len(features)):
            raise DatasetError("sealed_changed", f"slice {v} of the dataset has other units than rows.", _RESTORE)
        sizes = sizes.astype(np.int64)
        return _OpenSlice(features, labels, sizes, np.cumsum(sizes) - sizes)


@dataclass(frozen=True, slots=True)
class _OpenSlice:
    """The examples of an open slice; of each of its units, if there are any, the number of rows and the first."""

    features: NDArray[Any]
    labels: NDArray[Any]
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]


class _SealedUnits(Units):
    """The units of a sealed dataset; DatasetError ``slice_sealed`` for one whose slice is locked."""

    def __init__(self, dataset: SealedDataset) -> None:
        # No row is listed: which ones a unit has is sealed.
        super().__init__(np.empty(0, np.int64), np.empty(0, np.int64))
        self._dataset = dataset

    def __len__(self) -> int:
        return self._dataset.population

    def sizes(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._dataset.spans(units)[1]

    def rows_at(self, units: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._dataset.spans(units)[0] + places
