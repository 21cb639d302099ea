"""Datasets: random access to examples by id, opened by whoever computes on them.

A :class:`DatasetDescriptor` travels instead of the examples; a worker opens it itself. Every built-in dataset keeps
its arrays in the dtype of the file and converts a batch on access: floating-point features become float32; integer
features become int64, or float32 if a ``scale`` is given; labels become int64 or float32.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from attestation.canonical import digest, length_prefixed
from attestation.messages import Message
from metrics.errors import DatasetError
from workers.dataset_files import read_digits, read_npz, read_parquet
from workers.resolve import resolve

Batch = tuple[NDArray[Any], NDArray[Any]]
DIGITS_TRAIN = 1437
_CHUNK = 1024


@runtime_checkable
class Dataset(Protocol):
    """Examples with ids 0 .. len-1."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Features [n, ...] float32 or int64 and labels [n] or [n, k] int64 or float32 of ``ids`` [n], in order.

        The same id always gives the same bytes, and dtypes and trailing shapes are the same for all ids, also for
        an empty ``ids``.
        """
        ...


class DatasetForm(Message):
    """The public outline of a dataset: what a model must accept.

    Attributes:
        feature_shape, label_shape: of one example.
        feature_dtype, label_dtype: ``float32`` or ``int64``.
    """

    DOMAIN: ClassVar[str] = "raycloak/dataset-form/v1"

    num_examples: int
    feature_shape: tuple[int, ...]
    feature_dtype: Literal["float32", "int64"]
    label_shape: tuple[int, ...]
    label_dtype: Literal["float32", "int64"]


class DatasetDescriptor(Message):
    """Where the examples are and how they are read.

    Attributes:
        kind: ``digits``, ``npz``, ``parquet``, ``module`` or ``sealed``.
        path: file of an npz or parquet dataset, folder of a sealed one, relative to the base folder or absolute.
        function: ``module:function`` without arguments that returns a :class:`Dataset`.
        split: ``train`` or ``public`` part of ``digits``.
        features: array name of npz; column names of parquet. Several scalar columns make a vector.
        labels: array or column name.
        scale: public constant that every feature is divided by.
        public: whether the data is declared to need no protection.
        fingerprint_key: file of the key of `workers.fingerprint`, relative to the base folder or absolute.
    """

    DOMAIN: ClassVar[str] = "raycloak/dataset/v1"

    kind: Literal["digits", "npz", "parquet", "module", "sealed"]
    path: str | None = None
    function: str | None = None
    split: Literal["train", "public"] = "train"
    features: tuple[str, ...] = ("images",)
    labels: str = "labels"
    scale: float = 1.0
    public: bool = False
    fingerprint_key: str | None = None

    def identity_digest(self) -> bytes:
        """SHA-256 of all that says which data this is, but not where: a moved file is the same dataset."""
        return self.model_copy(update={"path": None, "fingerprint_key": None}).digest()

    def open(self, base: Path | str) -> Dataset:
        """Open the dataset; relative paths and ``module:function`` are relative to the folder ``base``.

        Raises:
            DatasetError: ``dataset_unreadable``, ``dataset_empty``, ``dataset_lengths``, ``dataset_array`` or
                ``dataset_dtype``.
            ConfigError: ``module_function``.
        """
        if self.kind == "digits":
            return _open_digits(self.split)
        if self.kind == "module":
            assert self.function is not None, "kind module comes with a function"
            return _open_module(self.function, base)
        assert self.path is not None, "kinds npz, parquet and sealed come with a path"
        path = Path(base) / self.path
        if self.kind == "sealed":
            from workers.sealed_dataset import SealedDataset

            return SealedDataset(path)
        features, labels = (read_npz if self.kind == "npz" else read_parquet)(path, self.features, self.labels)
        return ArrayDataset(features, labels, self.scale, str(path))


class ArrayDataset:
    """Features [N, ...] and labels [N] or [N, k] held in memory.

    Args:
        scale: every feature is divided by it; 1.0 leaves integer features integers.
        name: for error messages.

    Raises:
        DatasetError: ``dataset_empty``, ``dataset_lengths`` or ``dataset_dtype``.
    """

    def __init__(self, features: NDArray[Any], labels: NDArray[Any], scale: float = 1.0, name: str = "dataset") -> None:
        _check_arrays(features, labels, name)
        self._features = features
        self._labels = labels
        self._scale = np.float32(scale)
        as_integer = scale == 1.0 and features.dtype.kind in "iub"
        self._feature_dtype = np.dtype(np.int64 if as_integer else np.float32)
        self._label_dtype = np.dtype(np.int64 if labels.dtype.kind in "iub" else np.float32)

    def __len__(self) -> int:
        return len(self._features)

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """See :class:`Dataset`."""
        # A warning about an overflow would tell something about the examples.
        with np.errstate(all="ignore"):
            features = self._features[ids].astype(self._feature_dtype)
            if self._scale != 1.0:
                features /= self._scale
            return features, self._labels[ids].astype(self._label_dtype)


def dataset_form(dataset: Dataset) -> DatasetForm:
    """Shapes and dtypes of ``dataset``, read without any example.

    Raises:
        DatasetError: ``dataset_empty``, or ``dataset_dtype`` if a batch breaks the :class:`Dataset` contract.
    """
    if len(dataset) == 0:
        raise DatasetError("dataset_empty", "the dataset has no examples.", "Name data that has some.")
    features, labels = dataset.batch(np.empty(0, dtype=np.int64))
    for name, array in (("features", features), ("labels", labels)):
        if array.dtype not in (np.float32, np.int64) or array.ndim < 1 or len(array) != 0:
            raise DatasetError(
                "dataset_dtype",
                f"{name} of an empty batch are {array.dtype} of shape {array.shape}; they must be float32 or int64 "
                "with a first extent of 0.",
                "Let batch(ids) return that for no ids, too.",
            )
    return DatasetForm.model_validate(
        {
            "num_examples": len(dataset),
            "feature_shape": features.shape[1:],
            "feature_dtype": str(features.dtype),
            "label_shape": labels.shape[1:],
            "label_dtype": str(labels.dtype),
        }
    )


def slice_ids(virtual_worker: int, virtual_workers: int, num_examples: int) -> NDArray[np.int64]:
    """Ids of the examples of one virtual worker: those congruent to ``virtual_worker`` modulo V, ascending.

    Raises:
        DatasetError: ``dataset_small`` if there are fewer examples than virtual workers.
    """
    assert 0 <= virtual_worker < virtual_workers, "virtual workers are numbered 0 .. V-1"
    if num_examples < virtual_workers:
        raise DatasetError(
            "dataset_small",
            f"{num_examples} examples cannot be spread over {virtual_workers} virtual workers.",
            "Lower virtual_workers or take a larger dataset.",
        )
    return np.arange(virtual_worker, num_examples, virtual_workers, dtype=np.int64)


def slice_digest(dataset: Dataset, ids: NDArray[np.int64]) -> bytes:
    """SHA-256 over dtype, shape and bytes of the features and labels of ``ids``, in their order.

    Guarantee: changes with any byte, dtype, shape or the order of the examples; independent of how the dataset is
    stored and of the chunks it is read in.
    """
    form = dataset_form(dataset)
    feature_hash, label_hash = hashlib.sha256(), hashlib.sha256()
    for start in range(0, len(ids), _CHUNK):
        features, labels = dataset.batch(ids[start : start + _CHUNK])
        feature_hash.update(np.ascontiguousarray(features).tobytes())
        label_hash.update(np.ascontiguousarray(labels).tobytes())
    outline = form.model_copy(update={"num_examples": len(ids)}).encode()
    return digest(length_prefixed("raycloak/slice/v1", outline, feature_hash.digest(), label_hash.digest()))


def export_in_memory(dataset: Any, path: Path) -> DatasetDescriptor:
    """Write a map-style PyTorch dataset of (x, y) pairs to an npz file of mode 0600 that local workers open.

    The examples pass through this process, so it must be trusted with them; they never enter an object store. An
    existing file is replaced as a whole.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; x and y are tensors, arrays or numbers of one shape each.
        path: absolute path of the file to write.

    Raises:
        DatasetError: ``dataset_array`` if it is not map-style or shapes differ between examples, ``dataset_empty``,
            ``dataset_dtype``.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DatasetError(
            "dataset_array",
            f"a {type(dataset).__name__} is not a map-style dataset.",
            "Give it __len__ and __getitem__.",
        )
    if len(dataset) == 0:
        raise DatasetError("dataset_empty", "the dataset has no examples.", "Name data that has some.")
    try:
        features, labels = (np.stack(part) for part in zip(*map(_pair, _items(dataset)), strict=True))
    except ValueError:
        raise DatasetError(
            "dataset_array",
            "the dataset's examples do not all have one shape.",
            "Pad or crop them, by public constants.",
        ) from None
    _check_arrays(features, labels, "dataset")
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        np.savez(file, features=features, labels=labels)
    partial.replace(path)
    return DatasetDescriptor(kind="npz", path=str(path), features=("features",))


def _items(dataset: Any) -> Iterator[Any]:
    return (dataset[index] for index in range(len(dataset)))


def _pair(item: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DatasetError(
            "dataset_array", "an example of the dataset is not a pair.", "Let each be (features, label)."
        )
    return np.asarray(item[0]), np.asarray(item[1])


def _check_arrays(features: NDArray[Any], labels: NDArray[Any], name: str) -> None:
    for role, array in (("features", features), ("labels", labels)):
        if array.dtype.kind not in "fiub":
            raise DatasetError("dataset_dtype", f"{name}: {role} have dtype {array.dtype}.", "Store them as numbers.")
    if features.ndim < 1 or labels.ndim not in (1, 2):
        raise DatasetError(
            "dataset_array",
            f"{name}: features have shape {features.shape} and labels {labels.shape}.",
            "Features are [N, ...], labels [N] or [N, k].",
        )
    if len(features) != len(labels):
        raise DatasetError(
            "dataset_lengths", f"{name}: {len(features)} features but {len(labels)} labels.", "Give each example both."
        )
    if len(features) == 0:
        raise DatasetError("dataset_empty", f"{name} has no examples.", "Name data that has some.")


def _open_digits(split: Literal["train", "public"]) -> Dataset:
    features, labels = read_digits()
    # A permutation by hash is the same in every version of every library.
    order = sorted(range(len(labels)), key=lambda i: digest(length_prefixed("raycloak/digits/v1", i)))
    chosen = np.asarray(order[:DIGITS_TRAIN] if split == "train" else order[DIGITS_TRAIN:])
    return ArrayDataset(features[chosen].astype(np.uint8), labels[chosen], 16.0, "digits")


def _open_module(function: str, base: Path | str) -> Dataset:
    dataset = resolve(function, base)()
    if not isinstance(dataset, Dataset):
        raise DatasetError(
            "dataset_array",
            f"{function} returned a {type(dataset).__name__}, not a Dataset.",
            "Return an object with __len__ and batch(ids).",
        )
    dataset_form(dataset)
    return dataset
