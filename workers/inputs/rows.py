"""Rows of examples that a reader gives in chunks, kept for access by id: in memory, or in a scratch file beyond that.

Hides where the rows lie. The rows of a large dataset do not fit into a worker's memory, and Parquet and CSV give a row
only with a whole group of rows. So rows beyond `MEMORY_BYTES` move to a scratch file of fixed-size records.

Guarantee: a scratch file is encrypted and authenticated under a key that only this process's memory holds, and has no
name in the file system. Every read of an id returns the bytes that were read from the dataset, or is refused.

Guarantee: the same examples give the same bytes by id, whether they are in memory or in a scratch file.

Not guaranteed: that a scratch file outlives the process. It takes as much disk as the rows, once per process, in the
folder that ``TMPDIR`` names.
"""

import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.file_errors import file_error, file_errors
from raycloak.workers.inputs.datasets import (
    Accept,
    ArrayDataset,
    Arrays,
    Batch,
    Conversion,
    Dataset,
    Taken,
    check_arrays,
)
from raycloak.workers.inputs.named_inputs import Inputs

MEMORY_BYTES = 256 * 2**20
"""Rows up to this size stay in memory; a worker needs some 600 MB without any."""

# A draw reads one block for each example, so a block is small. Its tag takes 16 bytes.
_BLOCK = 1024
_TAG = 16
# Rows that are looked at together: bounds the memory.
_LOOKED_AT = 1024


def gathered(
    chunks: Iterable[Arrays],
    name: str,
    scale: float = 1.0,
    *,
    numbers: bool = False,
    taken: Taken | None = None,
    accept: Accept | None = None,
    in_memory: bool = False,
) -> Dataset:
    """Return the rows of ``chunks`` as a dataset; ids count them in their order.

    Args:
        chunks: features [n, ...] and labels [n, ...].
        name: for messages.
        scale, numbers: see :class:`raycloak.workers.inputs.datasets.Conversion`.
        taken: of the reader, which says how features by name are packed.
        accept: called with features and labels, a few at a time, as a model gets them; raises where they are void.
        in_memory: whether all rows stay there, however many they are.

    Raises:
        DatasetError: ``dataset_empty``, ``dataset_array``, ``dataset_dtype`` or ``dataset_lengths``;
            ``dataset_scratch`` if the scratch file cannot be written; or what ``accept`` raises.
    """
    waiting = _alike(chunks, name, partial(Conversion, scale=scale, numbers=numbers), accept)
    held: list[Arrays] = []
    size = 0
    for features, labels in waiting:
        held.append((features, labels))
        size += features.nbytes + labels.nbytes
        if size > MEMORY_BYTES and not in_memory:
            # Popped, so that memory does not have them beside the file.
            rows = itertools.chain((held.pop(0) for _ in range(len(held))), waiting)
            inputs = taken.inputs if taken else ()
            return ScratchDataset(rows, name, scale, numbers=numbers, named_inputs=inputs)
    if not held:
        raise DatasetError("dataset_empty", f"{name} has no examples.", "Name a dataset with examples.")
    features, labels = held[0] if len(held) == 1 else map(np.concatenate, zip(*held, strict=True))
    inputs = taken.inputs if taken else ()
    return ArrayDataset(features, labels, scale, name, numbers=numbers, named_inputs=inputs)


def _alike(
    chunks: Iterable[Arrays], name: str, conversion: Callable[..., Conversion], accept: Accept | None
) -> Iterator[Arrays]:
    """Yield the chunks that have rows; refuse what is no examples, rows of another shape than the first, and void ones.

    Args:
        conversion: of the dtypes of features and labels.
    """
    outline = None
    for features, labels in chunks:
        if features.shape[:1] == labels.shape[:1] == (0,):
            continue
        check_arrays(features, labels, name)
        found = [(part.dtype, part.shape[1:]) for part in (features, labels)]
        outline = outline or found
        if found != outline:
            raise DatasetError(
                "dataset_array", f"{name} has examples of different shapes.", "Pad or crop them to one public shape."
            )
        if accept is not None:
            converted = conversion(features.dtype, labels.dtype)
            for start in range(0, len(features), _LOOKED_AT):
                seen = slice(start, start + _LOOKED_AT)
                accept(*converted.of(features[seen], labels[seen]))
        yield features, labels


def in_turn(dataset: Dataset, groups: Sequence[NDArray[np.int64]]) -> Iterator[Batch]:
    """Yield the examples of each group of ids; the next group is read from a scratch file while the caller computes.

    Every other dataset is read when its group is asked for. Memory gives rows at once. Code of a user may share
    torch's generator, a connection or a setting with the model, so it never runs beside it.

    Memory: two groups of a scratch file.

    Raises:
        DatasetError: as the dataset's ``batch``, in the turn of the group that could not be read.
    """
    if not isinstance(dataset, ScratchDataset) or len(groups) < 2:
        yield from map(dataset.batch, groups)
        return
    with ThreadPoolExecutor(1, "raycloak-reader") as reader:
        ahead = reader.submit(dataset.batch, groups[0])
        for group in groups[1:]:
            batch, ahead = ahead.result(), reader.submit(dataset.batch, group)
            yield batch
        yield ahead.result()


class ScratchDataset:
    """A dataset in a scratch file; see the module, and `raycloak.workers.inputs.datasets.Dataset`.

    Memory: the blocks of one batch.
    """

    def __init__(
        self, chunks: Iterable[Arrays], name: str, scale: float, *, numbers: bool, named_inputs: Inputs = ()
    ) -> None:
        self.named_inputs = named_inputs
        rest = iter(chunks)
        features, labels = next(rest)
        self._name = name
        self._conversion = Conversion(features.dtype, labels.dtype, scale, numbers=numbers)
        self._parts = [(part.dtype, part.shape[1:], part[:1].nbytes) for part in (features, labels)]
        self._record = sum(size for _, _, size in self._parts)
        self._rows = max(1, _BLOCK // self._record)
        # A key of this process alone, for blocks that are written once: so a block's number is its nonce.
        self._cipher = AESGCM(AESGCM.generate_key(256))
        self._count = 0
        with file_errors("dataset_scratch", "write", tempfile.gettempdir(), DatasetError):
            self._file = tempfile.TemporaryFile(prefix="raycloak-")  # noqa: SIM115 - it lives as long as the dataset
            weakref.finalize(self, self._file.close)
            self._write(itertools.chain([(features, labels)], rest))

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return the examples of ``ids``, in order.

        Raises:
            DatasetError: ``data_changed`` if the scratch file is not what was written, ``dataset_scratch``.
        """
        if len(ids) and (ids.min() < 0 or ids.max() >= self._count):
            raise IndexError("an id is not one of the dataset's")
        numbers, rows = np.divmod(ids, self._rows)
        asked, places = np.unique(numbers, return_inverse=True)
        blocks = np.frombuffer(self._blocks(asked.tolist()), np.uint8).reshape(len(asked), self._rows, self._record)
        return self._conversion.of(*self._split(blocks[places, rows]))

    def _split(self, records: NDArray[np.uint8]) -> Arrays:
        (first, shape, size), (second, label_shape, _) = self._parts
        features = np.ascontiguousarray(records[:, :size]).view(first).reshape(len(records), *shape)
        labels = np.ascontiguousarray(records[:, size:]).view(second).reshape(len(records), *label_shape)
        return features, labels

    def _write(self, chunks: Iterable[Arrays]) -> None:
        rest = np.empty((0, self._record), np.uint8)
        numbers = itertools.count()
        for features, labels in chunks:
            parts = (np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in (features, labels))
            records = np.concatenate([rest, np.concatenate(list(parts), axis=1)])
            whole = len(records) - len(records) % self._rows
            for start in range(0, whole, self._rows):
                self._append(next(numbers), records[start : start + self._rows])
            rest = records[whole:].copy()
            self._count += len(features)
        if len(rest):
            self._append(next(numbers), rest)
        self._file.flush()

    def _append(self, number: int, records: NDArray[np.uint8]) -> None:
        self._file.write(self._cipher.encrypt(_nonce(number), records.tobytes(), None))

    def _blocks(self, numbers: list[int]) -> bytes:
        """Return the records of the blocks, each as long as a whole one."""
        file, decrypt, record = self._file.fileno(), self._cipher.decrypt, self._rows * self._record
        whole = record + _TAG
        try:
            # One expression: for a block of one row, anything more in Python costs as much as reading or decrypting it.
            # A whole block is asked for: the file ends with the last one, which may be shorter.
            return b"".join(
                [
                    decrypt(_nonce(number), os.pread(file, whole, number * whole), None).ljust(record, b"\0")
                    for number in numbers
                ]
            )
        except OSError as error:
            raise file_error("dataset_scratch", "read", tempfile.gettempdir(), error, DatasetError) from None
        except InvalidTag:
            raise DatasetError(
                "data_changed",
                f"the scratch file of {self._name} is not what was written to it.",
                "Keep others from the folder that TMPDIR names, and check its disk.",
            ) from None


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
