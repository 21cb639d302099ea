"""Datasets: random access to examples by id, and how the examples are cut into slices.

:class:`ArrayDataset` keeps its arrays in the dtype of the file and converts a batch on access; see :class:`Conversion`.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raycloak.attestation.core.canonical import DIGEST_BYTES, digest, length_prefixed
from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import DatasetError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.inputs.named_inputs import Inputs, outlined, packed
from raycloak.workers.inputs.units import UnitNumbers, Units

Batch = tuple[NDArray[Any], NDArray[Any]]
Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Features and labels as they are stored, before their :class:`Conversion`."""
Accept = Callable[[NDArray[Any], NDArray[Any]], None]
"""Called with features and labels as a model gets them; raises a DatasetError where they are void."""

# Rows read at once while slices are hashed: bounds memory, and changes no digest.
_CHUNK = 1024


@runtime_checkable
class Dataset(Protocol):
    """A dataset: examples with ids 0 .. len-1."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return features [n, ...] and labels [n, ...], each float32 or int64, of ``ids`` [n], in order.

        A user's own dataset may give several features by name, as a mapping; see :class:`NamedDataset`.

        The same id always gives the same bytes. Dtypes and trailing shapes are the same for all ids, also for an empty
        ``ids``.
        """
        ...


class DatasetForm(Message):
    """The public outline of a dataset: what a model must accept.

    Attributes:
        feature_shape, label_shape: of one example.
        feature_dtype, label_dtype: ``float32`` or ``int64``.
        inputs: by name, of features that are packed; see `raycloak.workers.inputs.named_inputs`. Left out of the bytes
            where there are none.
        units: number of units whose rows the examples are; see `raycloak.workers.inputs.units`. None, and left out of
            the bytes, where each example is a unit of its own.
    """

    DOMAIN: ClassVar[str] = "raycloak/dataset-form/v1"

    num_examples: int
    feature_shape: tuple[int, ...]
    feature_dtype: Literal["float32", "int64"]
    label_shape: tuple[int, ...]
    label_dtype: Literal["float32", "int64"]
    inputs: Inputs = Field(default=(), exclude_if=lambda inputs: not inputs)
    units: int | None = Field(default=None, exclude_if=lambda units: units is None)

    @property
    def population(self) -> int:
        """The number of units that steps are sampled from: N of the mechanism."""
        return self.num_examples if self.units is None else self.units

    def zeros(self, count: int) -> Batch:
        """Return features and labels of ``count`` examples, all of them zero."""
        features = np.zeros((count, *self.feature_shape), self.feature_dtype)
        return features, np.zeros((count, *self.label_shape), self.label_dtype)


@dataclass(slots=True)
class Taken:
    """The part of its files that a reader takes, filled in while it reads.

    Attributes:
        features: names of the columns or arrays that are features, in their order; empty where they have none.
        left_out: sentences about what is there and is no part of an example, with its name and count.
        inputs: how features by name are packed.
        units: gets the unit of every row that is read; None where each row is a unit of its own.
    """

    features: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    inputs: Inputs = ()
    units: UnitNumbers | None = None


class Conversion:
    """The step from stored values to those of a :class:`Dataset`.

    Floating-point features become float32. Integer features become int64, or float32 if a ``scale`` is given or they
    are ``numbers``. Labels become int64 or float32.

    Args:
        features, labels: dtypes as stored.
        scale: every feature is divided by it; 1.0 leaves integer features integers.
        numbers: whether integer features are quantities and no ids.
    """

    def __init__(self, features: np.dtype[Any], labels: np.dtype[Any], scale: float, *, numbers: bool = False) -> None:
        self._scale = np.float32(scale)
        as_integer = scale == 1.0 and features.kind in "iub" and not numbers
        self._features = np.dtype(np.int64 if as_integer else np.float32)
        self._labels = np.dtype(np.int64 if labels.kind in "iub" else np.float32)

    def of(self, features: NDArray[Any], labels: NDArray[Any]) -> Batch:
        """Return a batch of stored values, converted."""
        # A warning about an overflow would tell something about the examples, and reach the log.
        with np.errstate(all="ignore"):
            features = features.astype(self._features)
            if self._scale != 1.0:
                features /= self._scale
            return features, labels.astype(self._labels)


class ArrayDataset:
    """A dataset of features [N, ...] and labels [N, ...], held in memory.

    Args:
        scale, numbers: see :class:`Conversion`.
        name: for error messages.
        named_inputs: of features that are packed.

    Raises:
        DatasetError: ``dataset_empty``, ``dataset_lengths`` or ``dataset_dtype``.
    """

    def __init__(
        self,
        features: NDArray[Any],
        labels: NDArray[Any],
        scale: float = 1.0,
        name: str = "dataset",
        *,
        numbers: bool = False,
        named_inputs: Inputs = (),
    ) -> None:
        check_arrays(features, labels, name)
        self.named_inputs = named_inputs
        self._features = features
        self._labels = labels
        self._conversion = Conversion(features.dtype, labels.dtype, scale, numbers=numbers)

    def __len__(self) -> int:
        return len(self._features)

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return the examples of ``ids``, converted; see :class:`Dataset`."""
        return self._conversion.of(self._features[ids], self._labels[ids])


class NamedDataset:
    """A dataset whose ``batch(ids)`` gives features as a mapping of names to arrays [n, ...], packed into one array.

    Attributes:
        named_inputs: how they are packed.

    Args:
        vocabularies: public numbers of ids by name, of inputs that are integers.
        name: for error messages.

    Raises:
        DatasetError, ConfigError: as `raycloak.workers.inputs.named_inputs.outlined`; ``dataset_array`` for inputs of
            which one is no array with a row per example.
    """

    def __init__(self, dataset: Any, vocabularies: Mapping[str, int | None], name: str) -> None:
        self._dataset, self._name = dataset, name
        features, _ = dataset.batch(np.empty(0, dtype=np.int64))
        self.named_inputs: Inputs = outlined(self._arrays(features, 0), vocabularies, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return the examples of ``ids``, packed; see :class:`Dataset`."""
        features, labels = self._dataset.batch(ids)
        parts = self._arrays(features, len(ids))
        found = {key: (part.dtype.name, part.shape[1:]) for key, part in parts.items()}
        if found != {each.name: (each.dtype, each.shape) for each in self.named_inputs}:
            raise DatasetError(
                "dataset_array",
                f"{self._name} gives inputs of other names, types or shapes than for no ids.",
                "Let batch(ids) always return the same.",
            )
        return packed(parts, self.named_inputs), labels

    def _arrays(self, features: Any, count: int) -> dict[str, NDArray[Any]]:
        parts = {str(key): np.asarray(part) for key, part in features.items()} if isinstance(features, Mapping) else {}
        if not parts or any(part.ndim < 1 or len(part) != count for part in parts.values()):
            raise DatasetError(
                "dataset_array",
                f"{self._name} gives no mapping of names to arrays with a row per example.",
                "Let batch(ids) return it, and the labels.",
            )
        return parts


class SteadyDataset:
    """A dataset of user code that must keep giving the bytes that it gave first.

    Such a dataset may read a file, or compute, at each access. Its commitment and fingerprint are of the first read;
    the examples that are trained on come from a later one.

    Guarantee: every read of an id returns the bytes, dtypes and shapes of its first read, or is refused.

    Memory: 33 bytes for each example.

    Args:
        accept: called with features and labels of the first read of examples; raises where they are void.
    """

    def __init__(self, dataset: Dataset, accept: Accept | None = None) -> None:
        self._dataset, self._accept = dataset, accept
        self.named_inputs = named_inputs_of(dataset)
        self._count = len(dataset)
        self._digests = np.zeros((self._count, DIGEST_BYTES), np.uint8)
        self._known = np.zeros(self._count, np.bool_)

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return the examples of ``ids``; see :class:`Dataset`.

        Raises:
            DatasetError: ``data_changed`` if one is not what it was when it was first read.
        """
        # A copy: what the user's code returned may still be a view of a file.
        features, labels = (np.array(part, order="C") for part in self._dataset.batch(ids))
        digests = _row_digests(features, labels)
        if (new := ~self._known[ids]).any():
            if self._accept is not None:
                self._accept(features[new], labels[new])
            self._digests[ids[new]] = digests[new]
            self._known[ids[new]] = True
        # Which example it is stays here: an error leaves the worker.
        if not np.array_equal(self._digests[ids], digests):
            raise DatasetError(
                "data_changed",
                "the dataset no longer gives an example as it gave it first.",
                "Let batch(ids) always return the same bytes for an id, and change no file under a run.",
            )
        return features, labels

    def read_rest(self) -> None:
        """Read every example that was not read before; errors as :meth:`batch`."""
        rest = np.flatnonzero(~self._known)
        for start in range(0, len(rest), _CHUNK):
            self.batch(rest[start : start + _CHUNK])


class CanaryDataset:
    """A dataset with canaries behind its examples, for an audit: examples of zeros that carry nothing but their number.

    Features are flattened. A last column marks examples (0), included canaries (their number, from 1) and excluded
    canaries (-1).

    Args:
        included: one coin for each canary.
        rows_each: rows of each canary, one behind the other: as many as a unit has in a step at most.
    """

    def __init__(self, examples: Dataset, included: NDArray[np.bool_], rows_each: int = 1) -> None:
        self._examples = examples
        self._count = len(examples)
        self._markers = np.repeat(np.where(included, np.arange(1, len(included) + 1), -1), rows_each)

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


def named_inputs_of(dataset: Dataset) -> Inputs:
    """Return how the features of a dataset are packed; nothing where they are not."""
    found: Inputs = getattr(dataset, "named_inputs", ())
    return found


def _row_digests(features: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return [n, 32], a SHA-256 for each example."""
    outline = [(part.dtype.str, part.shape[1:]) for part in (features, labels)]
    start = hashlib.sha256(length_prefixed("raycloak/row/v1", repr(outline)))
    rows = np.empty((len(features), DIGEST_BYTES), np.uint8)
    for row, (one, label) in enumerate(zip(features, labels, strict=True)):
        hashed = start.copy()
        hashed.update(one)
        hashed.update(label)
        rows[row] = np.frombuffer(hashed.digest(), np.uint8)
    return rows


def check_arrays(features: NDArray[Any], labels: NDArray[Any], name: str) -> None:
    """Refuse arrays that are not features [N, ...] and labels [N, ...], all of them numbers.

    Raises:
        DatasetError: ``dataset_array``, ``dataset_empty``, ``dataset_lengths`` or ``dataset_dtype``.
    """
    for role, array in (("features", features), ("labels", labels)):
        if array.dtype.kind not in "fiub":
            raise DatasetError("dataset_dtype", f"{name}: {role} have dtype {array.dtype}.", "Store them as numbers.")
    if features.ndim < 1 or labels.ndim < 1:
        raise DatasetError(
            "dataset_array",
            f"{name}: features have shape {features.shape} and labels {labels.shape}.",
            "Features are [N, ...], labels [N, ...].",
        )
    if len(features) != len(labels):
        raise DatasetError(
            "dataset_lengths",
            f"{name}: {len(features)} features but {len(labels)} labels.",
            "Give each example features and a label.",
        )
    if len(features) == 0:
        raise DatasetError("dataset_empty", f"{name} has no examples.", "Name a dataset with examples.")


def dataset_form(dataset: Dataset) -> DatasetForm:
    """Return the shapes and dtypes of ``dataset``, read without any example.

    Raises:
        DatasetError: ``dataset_empty``, or ``dataset_dtype`` if a batch breaks the :class:`Dataset` contract.
    """
    if len(dataset) == 0:
        raise DatasetError("dataset_empty", "the dataset has no examples.", "Name a dataset with examples.")
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
            "inputs": named_inputs_of(dataset),
        }
    )


def slice_ids(virtual_worker: int, virtual_workers: int, population: int) -> NDArray[np.int64]:
    """Return the ids of one virtual worker's units: all that equal ``virtual_worker`` modulo V, ascending.

    Args:
        population: N, the number of units; of examples where each is a unit of its own.

    Raises:
        DatasetError: ``dataset_small`` if there are fewer units than virtual workers.
    """
    require_bound(0 <= virtual_worker < virtual_workers, "virtual workers are numbered 0 .. V-1")
    if population < virtual_workers:
        raise DatasetError(
            "dataset_small",
            f"{population} examples, or units of them, cannot be spread over {virtual_workers} virtual workers.",
            "Lower virtual_workers or take a larger dataset.",
        )
    return np.arange(virtual_worker, population, virtual_workers, dtype=np.int64)


def slice_digest(dataset: Dataset, ids: NDArray[np.int64], units: Units | None = None) -> bytes:
    """Return a SHA-256 over dtype, shape and bytes of the features and labels of ``ids``, in their order.

    Guarantee: changes with any byte, dtype, shape or the order of the examples, and with the number of rows of any
    unit; independent of how the dataset is stored and of the chunks it is read in.

    Args:
        ids: of units if there are any, and else of examples.
        units: whose rows the examples are; None where each is a unit of its own.
    """
    form, sizes = dataset_form(dataset), []
    if units is not None:
        ids, sizes, form = units.rows_of(ids), [units.sizes(ids)], form.model_copy(update={"units": len(ids)})
    feature_hash, label_hash = hashlib.sha256(), hashlib.sha256()
    for start in range(0, len(ids), _CHUNK):
        features, labels = dataset.batch(ids[start : start + _CHUNK])
        feature_hash.update(np.ascontiguousarray(features).tobytes())
        label_hash.update(np.ascontiguousarray(labels).tobytes())
    outline = form.model_copy(update={"num_examples": len(ids)}).encode()
    cuts = (digest(each.astype("<i8").tobytes()) for each in sizes)
    return digest(length_prefixed("raycloak/slice/v1", outline, feature_hash.digest(), label_hash.digest(), *cuts))
