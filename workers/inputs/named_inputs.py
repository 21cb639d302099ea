"""Several inputs by name: they travel as one array, and a model gets them back as ``forward(**batch)``.

Hides how the inputs of an example are packed. Sampling, slices, sealing, checks and gradients know one array of
features, and go on to. Its last extent has the numbers of all inputs one after the other: an id as it is, and a float32
as the bits that it consists of. So packing loses nothing, and equal examples have equal bytes.

A packed row has the shape [1, width], so that no one takes it for a text of ids.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import ConfigError, DatasetError


class NamedInput(Message):
    """The public outline of one input.

    Attributes:
        name: of the argument of the model's ``forward``.
        shape: of one example.
        dtype: ``float32`` or ``int64``.
        vocabulary: public number N of the ids 0 .. N-1 that an int64 input is; None for float32.
    """

    DOMAIN: ClassVar[str] = "raycloak/named-input/v1"

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "int64"]
    vocabulary: int | None = None

    @property
    def size(self) -> int:
        """The numbers of one example."""
        return math.prod(self.shape)


Inputs = tuple[NamedInput, ...]


class InputSource(Message):
    """The place of one input in files, as a configuration names it.

    Attributes:
        name: of the argument of the model's ``forward``.
        features: names of columns, ranges of them, or of one array.
        vocabulary: N, if it holds ids 0 .. N-1; numbers otherwise.
        padding: what a row of tokenised text is filled with beyond its end.
    """

    DOMAIN: ClassVar[str] = "raycloak/input-source/v1"

    name: str
    features: tuple[str, ...]
    vocabulary: int | None = None
    padding: int = 0


def outlined(parts: Mapping[str, NDArray[Any]], vocabularies: Mapping[str, int | None], name: str) -> Inputs:
    """Return the outline of inputs by name [n, ...], in the order of their names.

    Args:
        name: of the dataset, for messages.

    Raises:
        DatasetError: ``dataset_array`` for a name that no argument can have, ``dataset_dtype`` for other numbers.
        ConfigError: ``vocabulary`` for integers of which nobody says how many ids there are.
    """
    found = []
    for key, part in sorted(parts.items()):
        if not key.isidentifier():
            raise DatasetError(
                "dataset_array", f"{name}: no argument of forward can be named '{key}'.", "Name an input like one."
            )
        if part.dtype not in (np.float32, np.int64):
            raise DatasetError(
                "dataset_dtype", f"{name}: input '{key}' is {part.dtype}.", "Give it as float32, or ids as int64."
            )
        vocabulary = vocabularies.get(key)
        if part.dtype == np.int64 and vocabulary is None:
            raise ConfigError(
                "vocabulary",
                f"{name}: input '{key}' holds integers, and nothing public says how many ids there are.",
                f"Set dataset.inputs.{key}.vocabulary to N if they are ids 0 .. N-1, or give floating-point numbers.",
            )
        ids = vocabulary if part.dtype == np.int64 else None
        dtype: Literal["float32", "int64"] = "float32" if ids is None else "int64"
        found.append(NamedInput(name=key, shape=part.shape[1:], dtype=dtype, vocabulary=ids))
    return tuple(found)


def packed(parts: Mapping[str, NDArray[Any]], inputs: Inputs) -> NDArray[np.int64]:
    """Return int64 [n, 1, width] of the inputs [n, ...] by name."""
    flat = []
    for each in inputs:
        part = np.ascontiguousarray(parts[each.name])
        rows = part.reshape(len(part), each.size)
        flat.append(rows if each.dtype == "int64" else rows.view(np.int32).astype(np.int64))
    return np.concatenate(flat, axis=1)[:, None]


def unpacked(features: NDArray[np.int64], inputs: Inputs) -> dict[str, NDArray[Any]]:
    """Return the inputs [n, ...] by name that :func:`packed` made ``features`` [n, 1, width] of."""
    parts: dict[str, NDArray[Any]] = {}
    for each, rows in cut(features[:, 0], inputs):
        values = rows if each.dtype == "int64" else rows.astype(np.int32).view(np.float32)
        parts[each.name] = values.reshape(len(features), *each.shape)
    return parts


def cut(rows: Any, inputs: Inputs) -> list[tuple[NamedInput, Any]]:
    """Return each input with its columns of packed rows [n, ...], an array or a tensor."""
    ends = np.cumsum([each.size for each in inputs]).tolist()
    return [(each, rows[:, end - each.size : end]) for each, end in zip(inputs, ends, strict=True)]
