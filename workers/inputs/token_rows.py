"""Tokenised text as examples: a folder that ``datasets`` wrote, or Parquet files with ``input_ids``.

Hides how Hugging Face lays rows out. `datasets` itself is not needed: its folders are Arrow streams, in the order that
``state.json`` gives.

An example is ids [T], with -1 where the attention mask is 0 or the row has ended. Its label is a number [], or one for
each token [T], with -100 beyond the end of the row. Rows are cut or padded to T, whatever their length. A model of the
user's own may take columns by name instead: lists of integers are cut or padded too, any other column is as it is.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.datasets import Arrays, Taken
from raycloak.workers.inputs.file_sets import FileSet, written
from raycloak.workers.inputs.named_inputs import InputSource, outlined, packed
from raycloak.workers.inputs.tables import (
    PARQUET_SUFFIXES,
    column_place,
    is_list,
    label_columns,
    note_units,
    number_column,
    unbroken,
)
from raycloak.workers.inputs.unit_names import require_unit_column
from raycloak.workers.inputs.void import IGNORED, PADDING

if TYPE_CHECKING:
    from raycloak.workers.inputs.descriptor import DatasetDescriptor

_ROWS = 1024
_STATE = "state.json"
_LARGEST_ID = 2**31 - 1


def token_files(path: str, base: Path, hashed: bool) -> FileSet:
    """Return the files of tokenised text, in the order of their rows.

    Raises:
        DatasetError: ``dataset_unreadable``, or ``dataset_array`` for a folder of several splits or of reordered rows.
    """
    folder = written(base / path)
    if "://" in path or not folder.is_dir():
        return FileSet(path, base, (*PARQUET_SUFFIXES, ".arrow"), hashed)
    if (folder / "dataset_dict.json").exists():
        raise DatasetError(
            "dataset_array", f"{folder} holds several splits.", f"Name one of them, such as {path.rstrip('/')}/train."
        )
    if not (folder / _STATE).exists():
        return FileSet(path, base, PARQUET_SUFFIXES, hashed)
    try:
        state = json.loads((folder / _STATE).read_bytes())
        names = tuple(str(Path(each["filename"])) for each in state["_data_files"])
    except OSError as error:
        raise file_error("dataset_unreadable", "read", folder / _STATE, error, DatasetError) from None
    except (ValueError, KeyError, TypeError):
        raise DatasetError(
            "dataset_unreadable", f"{folder} is no folder that datasets wrote.", "Write it with save_to_disk."
        ) from None
    if state.get("_indices_data_files"):
        raise DatasetError(
            "dataset_array", f"{folder} has its rows in another order than its files.", "Call flatten_indices() first."
        )
    return FileSet(path, base, (".arrow",), hashed, names)


def token_rows(files: FileSet, asked: "DatasetDescriptor", taken: Taken) -> Iterator[Arrays]:
    """Yield ids [n, T], int32, or inputs by name, packed; and labels [n, ...]; in chunks.

    Args:
        taken: gets what is read of the files.

    Raises:
        DatasetError: ``dataset_unreadable``, ``dataset_array`` or ``dataset_dtype``.
        ConfigError: ``vocabulary``, as `raycloak.workers.inputs.named_inputs.outlined`.
    """
    assert asked.max_length is not None, "tokenised text comes with a length"
    for where, row_batch in _batches(files, asked):
        found = dict(zip(row_batch.schema.names, row_batch.columns, strict=True))
        unit = None if asked.unit is None else require_unit_column(asked.unit, list(found), where)
        taken.features = tuple(name for name in found if name not in (*asked.label_names, unit))
        note_units(taken, unit, found, where)
        length = asked.max_length
        features = _named(found, asked.inputs, length, where, taken) if asked.inputs else _ids(found, length, where)
        yield features, _labels(found, features, asked, length, where)


def _ids(found: dict[str, Any], length: int, where: str) -> NDArray[np.int32]:
    """Return the ids that the attention mask shows."""
    place = column_place(where, "input_ids")
    lengths, ids = _padded(found["input_ids"], place, length, PADDING)
    if ids.size and ids.max() > _LARGEST_ID:
        raise DatasetError("dataset_array", f"{place} has an id beyond any vocabulary.", "Store tokenised text.")
    mask = found.get("attention_mask")
    if mask is not None:
        place = column_place(where, "attention_mask")
        others, seen = _padded(mask, place, length, 0)
        _require_equal(lengths, others, place)
        ids = np.where(seen != 0, ids, PADDING)
    types = found.get("token_type_ids")
    if types is not None and np.any(np.asarray(types.flatten())):
        raise DatasetError(
            "dataset_array",
            f"{where} has token types other than 0, which have no place in an example.",
            "Join a pair of texts into one, with the tokenizer's separator; or name the columns in dataset.inputs, for "
            "a model of your own that takes them by name.",
        )
    return ids.astype(np.int32)


def _named(
    found: dict[str, Any], inputs: Sequence[InputSource], length: int, where: str, taken: Taken
) -> NDArray[np.int64]:
    """Return the inputs by name, packed."""
    parts = {}
    for each in inputs:
        (name,) = each.features
        place, array = column_place(where, name), found[name]
        if _lists_integers(array):
            values = _padded(array, place, length, each.padding)[1]
        else:
            values = number_column(array, place)
        with np.errstate(all="ignore"):
            parts[each.name] = values.astype(np.float32 if each.vocabulary is None else np.int64)
    taken.inputs = taken.inputs or outlined(parts, {each.name: each.vocabulary for each in inputs}, where)
    return packed(parts, taken.inputs)


def row_lengths(files: FileSet, asked: "DatasetDescriptor") -> NDArray[np.int64]:
    """Return the number of ids of each row, before it is cut or padded; errors as :func:`token_rows`."""
    found = [
        _padded(batch.column(batch.schema.names.index("input_ids")), column_place(where, "input_ids"), 0, PADDING)[0]
        for where, batch in _batches(files, asked)
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


def _labels(
    found: dict[str, Any], features: NDArray[Any], asked: "DatasetDescriptor", length: int, where: str
) -> NDArray[Any]:
    label, *more = asked.label_names
    if label == "input_ids" and not asked.inputs:
        return np.where(features == PADDING, IGNORED, features)
    if more or asked.class_names or not is_list(found[label].type):
        given = [(found[name], column_place(where, name)) for name in asked.label_names]
        return label_columns(given, asked.class_names)
    place = column_place(where, label)
    lengths, labels = _padded(found[label], place, length, IGNORED)
    if "input_ids" in found:
        others, _ = _padded(found["input_ids"], column_place(where, "input_ids"), 0, PADDING)
        _require_equal(lengths, others, place)
    return labels


def _batches(files: FileSet, asked: "DatasetDescriptor") -> Iterator[tuple[str, Any]]:
    """Yield the wanted columns of all files, a few rows at a time."""
    import pyarrow.ipc as ipc
    import pyarrow.parquet as pq

    for where, file in files.opened():
        with unbroken(file, where, "neither Arrow nor Parquet"):
            if where.lower().endswith(".arrow"):
                reader = ipc.open_stream(file)
                wanted = _wanted(reader.schema.names, asked, where)
                for batch in reader:
                    for start in range(0, len(batch), _ROWS):
                        yield where, batch.slice(start, _ROWS).select(wanted)
            else:
                parquet = pq.ParquetFile(file, pre_buffer=False)
                wanted = _wanted(parquet.schema_arrow.names, asked, where)
                for batch in parquet.iter_batches(_ROWS, columns=wanted, use_threads=False):
                    yield where, batch


def _wanted(present: list[str], asked: "DatasetDescriptor", where: str) -> list[str]:
    first, *more = [name for each in asked.inputs for name in each.features] or ["input_ids"]
    more += asked.label_names
    missing = next((name for name in (first, *more) if name not in present), None)
    if missing is not None:
        raise DatasetError(
            "dataset_array",
            f"{where} has no column '{missing}'; it has {', '.join(present)}.",
            "Tokenise first, and set dataset.labels; a model that predicts tokens has labels: input_ids.",
        )
    beside = () if asked.inputs else ("attention_mask", "token_type_ids")
    unit = () if asked.unit is None else (require_unit_column(asked.unit, present, where),)
    return [name for name in dict.fromkeys((first, *beside, *more, *unit)) if name in present]


def _lists_integers(array: Any) -> bool:
    import pyarrow as pa

    kind = array.type
    return is_list(kind) and bool(pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type))


def _padded(array: Any, place: str, length: int, padding: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the length of each row, and the rows [n, length], cut or padded.

    Raises:
        DatasetError: ``dataset_dtype`` unless rows are lists of integers, ``dataset_array`` for missing ones.
    """
    import pyarrow.compute as pc

    if not _lists_integers(array):
        raise DatasetError(
            "dataset_dtype", f"{place} is {array.type} and no list of integers.", "Store tokenised text."
        )
    flat = array.flatten()
    if array.null_count or flat.null_count:
        raise DatasetError("dataset_array", f"{place} has missing values.", "Leave such rows out.")
    lengths = np.asarray(pc.list_value_length(array)).astype(np.int64)
    ends = np.cumsum(lengths)
    within = np.arange(len(flat)) - np.repeat(ends - lengths, lengths)
    rows = np.full((len(array), length), padding, np.int64)
    places = np.arange(length) < np.minimum(lengths, length)[:, None]
    rows[places] = np.asarray(flat)[within < length]
    return lengths, rows


def _require_equal(lengths: NDArray[np.int64], others: NDArray[np.int64], place: str) -> None:
    if not np.array_equal(lengths, others):
        raise DatasetError(
            "dataset_array", f"{place} has rows of other lengths than input_ids.", "Tokenise all columns together."
        )
