"""Tables as examples: CSV and Parquet files, read in chunks of rows.

Hides how columns become numbers: which columns are meant, which types they may have, and what a text label counts as.

The first file says which columns there are; every other file must have them, with the same types. If no features are
named, all columns except the label are features. Several columns make a vector [k]; one column is a number, or a list
of numbers [k]. An error names all columns that cannot be read, and never a value.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.datasets import Arrays
from raycloak.workers.inputs.file_sets import FileSet

CSV_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIXES = (".parquet",)

# Values of a chunk, and rows where a value is a list of unknown length: bounds the memory beside the rows.
_VALUES = 2**20
_LISTS = 128
_CSV_BLOCK = 4 * 2**20
_RANGE = re.compile(r"(.*?)([0-9]+)\.\.(.*?)([0-9]+)")
# As most programs write a date, with a time or not.
_DATE = r"^[0-9]{1,4}[-/.][0-9]{1,2}[-/.][0-9]{1,4}([ T]|$)"
_SHOWN = 20  # columns of one error
# What programs write for a value that is not there.
_MISSING = ("", "NA", "N/A", "n/a", "null", "NULL", "None")

_LEFT_OUT = "name the columns without it in dataset.features"

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are asked for.

    Attributes:
        features: names, and ranges such as ``f0..f99``; all columns but the label if empty.
        label: name of the label's column.
        classes: public list of the text labels; the first counts as 0. Empty for labels that are numbers.
    """

    features: tuple[str, ...]
    label: str
    classes: tuple[str, ...] = ()

    def of(self, present: list[str], where: str) -> tuple[str, ...]:
        """Return the names of the features among the columns of a file.

        Raises:
            DatasetError: ``dataset_array`` if one is not there, or is there twice.
        """
        counts = Counter(present)
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise DatasetError("dataset_array", f"{where} has two columns '{twice}'.", "Give each its own name.")
        asked = self.features or tuple(name for name in present if name != self.label)
        names = []
        for name in itertools.chain([self.label], *map(_expanded, asked)):
            if name not in counts:
                raise DatasetError(
                    "dataset_array",
                    f"{where} has no column '{name}'; it has {_some(present)}.",
                    "Set dataset.features and dataset.labels.",
                )
            names.append(name)
        del names[0]
        if not names:
            raise DatasetError("dataset_array", f"{where} has no column but the label.", "Name a table with features.")
        return tuple(names)


def _expanded(name: str) -> Iterator[str]:
    """Yield the names of a range ``f0..f99``, both ends included; of anything else the name itself."""
    found = _RANGE.fullmatch(name)
    if not found or found[1] != found[3] or int(found[2]) > int(found[4]):
        yield name
        return
    width = len(found[2]) if found[2].startswith("0") else 1
    for number in range(int(found[2]), int(found[4]) + 1):
        yield f"{found[1]}{number:0{width}d}"


def _some(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def parquet_rows(files: FileSet, columns: Columns, vocabulary: int | None) -> Iterator[Arrays]:
    """Yield the rows of Parquet files, in order.

    Features of several columns are float32, or ids if there is a ``vocabulary`` and all are integers.

    Raises:
        DatasetError: ``dataset_unreadable``, ``dataset_array``, ``dataset_dtype`` or ``dataset_label``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    first: _Outline | None = None
    for where, file in files.opened():
        try:
            parquet = pq.ParquetFile(file, pre_buffer=False)
            schema = parquet.schema_arrow
            names = columns.of(schema.names, where) if first is None else first.names
            outline = _Outline.of(schema, names, columns, where, vocabulary)
            first = outline if first is None else first.require(outline, where)
            # Chunks and not whole row groups: a group may be larger than memory.
            wanted = list(dict.fromkeys((*names, columns.label)))
            for batch in parquet.iter_batches(first.chunk_rows, columns=wanted, use_threads=False):
                yield first.arrays(batch, where)
        except (OSError, pa.ArrowException, ValueError):
            # Not the library's text: it may quote a value.
            raise DatasetError(
                "dataset_unreadable", f"{where} is not a parquet file, or is damaged.", "Write it again."
            ) from None


def csv_rows(files: FileSet, columns: Columns, vocabulary: int | None) -> Iterator[Arrays]:
    """Yield the rows of CSV files with a header, in order; ``.tsv`` has tabs.

    Features are float32, or ids if there is a ``vocabulary``. Labels are integers if all of the first file are.

    Raises:
        DatasetError: as :func:`parquet_rows`.
    """
    names: tuple[str, ...] | None = None
    integers = bool(columns.classes)
    for where, file in files.opened():
        present = _header(file, where)
        if names is None:
            names = columns.of(present, where)
            if not columns.classes:
                integers = _are_integers(file, where, columns.label)
        # A later file may have its columns in another order.
        Columns(names, columns.label).of(present, where)
        wanted = list(dict.fromkeys((*names, columns.label)))
        for batch in _text_batches(file, where, wanted):
            found = {name: batch.column(index) for index, name in enumerate(wanted)}
            reads = [partial(_parsed, found[name], _place(where, name), vocabulary is not None) for name in names]
            label, place = _trimmed(found[columns.label]), _place(where, columns.label)
            classed = partial(class_numbers, label, columns, place)
            *parts, labels = _all_of(
                [*reads, classed if columns.classes else partial(_parsed, label, place, integers)], where
            )
            yield parts[0] if len(parts) == 1 else np.stack(parts, axis=1), labels


@dataclass(frozen=True, slots=True)
class _Outline:
    """The columns of a Parquet file and their types.

    Attributes:
        names: of the features.
        types: of features and label, as Arrow has them.
        stored: dtype of the features as they are kept; what several columns have in common.
    """

    names: tuple[str, ...]
    types: tuple[Any, ...]
    stored: np.dtype[Any]
    columns: Columns

    @classmethod
    def of(
        cls, schema: Any, names: tuple[str, ...], columns: Columns, where: str, vocabulary: int | None
    ) -> "_Outline":
        present = set(schema.names)
        missing = next((name for name in (*names, columns.label) if name not in present), None)
        if missing is not None:
            raise DatasetError(
                "dataset_array", f"{where} has no column '{missing}'.", "Give all files of a table the same columns."
            )
        types = tuple(schema.field(name).type for name in (*names, columns.label))
        reads = [partial(_number_type, kind, _place(where, name)) for name, kind in zip(names, types[:-1], strict=True)]
        if not columns.classes:
            reads.append(partial(_number_type, types[-1], _place(where, columns.label), is_label=True))
        dtypes = _all_of(reads, where)[: len(names)]
        if len(names) > 1 and any(_is_list(kind) for kind in types[:-1]):
            raise DatasetError(
                "dataset_array", f"{where}: of several feature columns one holds lists.", "Name that one alone."
            )
        stored = np.result_type(*dtypes)
        # Floats are kept as a batch gives them. Integers in a table of several columns are quantities.
        if stored.kind == "f" or (len(names) > 1 and vocabulary is None):
            stored = np.dtype(np.float32)
        return cls(names, types, stored, columns)

    def require(self, other: "_Outline", where: str) -> "_Outline":
        """Return this outline, which ``other`` must equal; DatasetError ``dataset_dtype`` names the first column."""
        for name, one, two in zip((*self.names, self.columns.label), self.types, other.types, strict=True):
            if one != two:
                raise DatasetError(
                    "dataset_dtype",
                    f"{where}, column '{name}' is {two}, and {one} in the file before.",
                    "Give all files of a table the same types.",
                )
        return self

    @property
    def chunk_rows(self) -> int:
        """The rows of a chunk."""
        return _LISTS if any(_is_list(kind) for kind in self.types) else max(1, _VALUES // len(self.types))

    def arrays(self, batch: Any, where: str) -> Arrays:
        found = {name: batch.column(index) for index, name in enumerate(batch.schema.names)}
        label, place = found[self.columns.label], _place(where, self.columns.label)
        reads = [partial(number_column, found[name], _place(where, name)) for name in self.names]
        classed = partial(class_numbers, label, self.columns, place)
        *parts, labels = _all_of(
            [*reads, classed if self.columns.classes else partial(number_column, label, place)], where
        )
        with np.errstate(all="ignore"):
            features = (parts[0] if len(parts) == 1 else np.stack(parts, axis=1)).astype(self.stored, copy=False)
        return features, labels


def _all_of(reads: Iterable[Callable[[], _Read]], where: str) -> list[_Read]:
    """Return the results of all reads of the columns of a file.

    Raises:
        DatasetError: one for all reads that fail, with the code of the first: one round mends a table.
    """
    found: list[_Read] = []
    problems: list[DatasetError] = []
    for read in reads:
        try:
            found.append(read())
        except DatasetError as problem:
            problems.append(problem)
    if not problems:
        return found
    # The file once, and not before each column.
    said = [problem.message.removeprefix(f"{where}, ").removesuffix(".") for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        said.append(f"and {len(problems) - _SHOWN} more columns")
    remedies = dict.fromkeys(problem.remedy for problem in problems)
    raise DatasetError(problems[0].code, f"{where}, {'; '.join(said)}.", " ".join(remedies))


def _place(where: str, column: str) -> str:
    return f"{where}, column '{column}'"


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _number_type(kind: Any, place: str, is_label: bool = False) -> np.dtype[Any]:
    """Return numpy's dtype of a column of numbers, or of lists of them; DatasetError ``dataset_dtype`` for others."""
    import pyarrow as pa

    inner = kind.value_type if _is_list(kind) else kind
    if pa.types.is_boolean(inner) or pa.types.is_integer(inner) or pa.types.is_floating(inner):
        found: np.dtype[Any] = np.dtype(inner.to_pandas_dtype())
        return found
    if is_label and _is_text(inner):
        raise DatasetError("dataset_dtype", f"{place} is text.", "List its classes: dataset.classes: [one, two].")
    if pa.types.is_date(inner) or pa.types.is_timestamp(inner):
        raise _dates(place)
    raise DatasetError(
        "dataset_dtype", f"{place} is {inner}, which is no number.", f"Store it as numbers, or {_LEFT_OUT}."
    )


def _dates(place: str) -> DatasetError:
    return DatasetError(
        "dataset_dtype",
        f"{place} holds dates.",
        f"Store dates as numbers, such as days since a public date, or {_LEFT_OUT}.",
    )


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def number_column(array: Any, place: str) -> NDArray[Any]:
    """Return an array of numbers as [n], one of equally long lists of numbers as [n, k].

    Raises:
        DatasetError: ``dataset_array`` if a value is missing or lists differ in length, ``dataset_dtype``.
    """
    import pyarrow.compute as pc

    _number_type(array.type, place)
    if array.null_count:
        raise DatasetError("dataset_array", f"{place} has missing values.", "Fill them with public constants.")
    if not _is_list(array.type):
        return np.asarray(array)
    values = array.flatten()
    if values.null_count:
        raise DatasetError("dataset_array", f"{place} has missing values.", "Fill them with public constants.")
    lengths = np.unique(np.asarray(pc.list_value_length(array)))
    if len(lengths) > 1:
        raise DatasetError(
            "dataset_array", f"{place} has lists of different lengths.", "Pad or crop them to one public length."
        )
    return np.asarray(values).reshape(len(array), lengths[0] if len(lengths) else 0)


def class_numbers(array: Any, columns: Columns, place: str) -> NDArray[np.int64]:
    """Return the place of each text label in the public list of classes.

    Raises:
        DatasetError: ``dataset_dtype`` if labels are no text, ``dataset_array`` if one is missing, ``dataset_label`` if
            one is not in the list.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not _is_text(array.type):
        raise DatasetError(
            "dataset_dtype", f"{place} is {array.type}, and dataset.classes lists names.", "Give their number instead."
        )
    if array.null_count:
        raise DatasetError("dataset_array", f"{place} has missing values.", "Leave rows without a label out.")
    numbers = pc.index_in(array.cast(pa.string()), value_set=pa.array(columns.classes, pa.string()))
    if numbers.null_count and pc.any(pc.is_in(array.filter(numbers.is_null()), pa.array(_MISSING))).as_py():
        raise DatasetError("dataset_array", f"{place} has missing values.", "Leave rows without a label out.")
    if numbers.null_count:
        # Which one it is stays here: it is an example's.
        raise DatasetError(
            "dataset_label", f"{place} has a label that is not in dataset.classes.", "Complete the list."
        )
    return np.asarray(numbers).astype(np.int64)


def _header(file: BinaryIO, where: str) -> list[str]:
    """Return the names in the first line of a CSV file, and go back to its start."""
    import csv

    # A file of S3 has no lines.
    line, _, _ = file.read(_CSV_BLOCK).partition(b"\n")
    file.seek(0)
    try:
        names = next(csv.reader([line.decode("utf-8-sig").rstrip("\r")], delimiter=_delimiter(where)), [])
    except (UnicodeDecodeError, csv.Error):
        raise _not_csv(where) from None
    if not names:
        raise DatasetError("dataset_empty", f"{where} has no examples.", "Name a dataset with examples.")
    other = next((mark for mark in (";", "\t", ",", "|") if mark in names[0]), None)
    if len(names) == 1 and other is not None:
        mark = "a tab" if other == "\t" else f"'{other}'"
        raise DatasetError(
            "dataset_array",
            f"{where} has values that {mark} separates.",
            "Separate them by commas, or by tabs in a file that ends in .tsv, with a point in numbers.",
        )
    if all(_is_number(name) for name in names):
        raise DatasetError(
            "dataset_array", f"{where} starts with numbers.", "Give it a first line with the names of its columns."
        )
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _delimiter(where: str) -> str:
    return "\t" if where.lower().endswith(".tsv") else ","


def _not_csv(where: str) -> DatasetError:
    return DatasetError(
        "dataset_unreadable",
        f"{where} is not a CSV file in UTF-8 with as many values in each line as in the first.",
        "Write it again.",
    )


def _text_batches(file: BinaryIO, where: str, names: list[str]) -> Iterator[Any]:
    """Yield those columns as text, so that no type depends on where a block ends."""
    import pyarrow as pa
    import pyarrow.csv as pacsv

    try:
        reader = pacsv.open_csv(
            file,
            read_options=pacsv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK),
            parse_options=pacsv.ParseOptions(delimiter=_delimiter(where), newlines_in_values=True),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), include_columns=names, strings_can_be_null=False
            ),
        )
        yield from reader
    except (OSError, pa.ArrowException):
        # Not the library's text: it quotes the line.
        raise _not_csv(where) from None


def _are_integers(file: BinaryIO, where: str, label: str) -> bool:
    """Return whether all labels of a file are integers, and go back to its start."""
    batches: Iterable[Any] = _text_batches(file, where, [label])
    found = all(_cast(_trimmed(batch.column(0)), "int64") is not None for batch in batches)
    file.seek(0)
    return found


def _trimmed(array: Any) -> Any:
    import pyarrow.compute as pc

    return pc.utf8_trim_whitespace(array)


def _cast(array: Any, kind: str) -> Any:
    """Return text as numbers; None if a value is none."""
    import pyarrow as pa

    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        return None


def _parsed(array: Any, place: str, integers: bool) -> NDArray[Any]:
    """Return text as int64, or as float32.

    Raises:
        DatasetError: ``dataset_array`` for a missing value, ``dataset_dtype`` for one that is no number.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    text = _trimmed(array)
    # By way of float64, as the values of other files come: one text has one float32.
    numbers = _cast(text, "int64" if integers else "float64")
    if numbers is not None:
        with np.errstate(all="ignore"):
            return np.asarray(numbers) if integers else np.asarray(numbers).astype(np.float32)
    whole = "whole numbers" if integers else "numbers"
    missing = pc.is_in(text, value_set=pa.array(_MISSING))
    if pc.any(missing).as_py():
        rest, fill = "", "Fill them with public constants."
        if _cast(text.filter(pc.invert(missing)), "int64" if integers else "float64") is None:
            # Both at once: one round mends a column.
            rest, fill = f", and others that are no {whole}", f"{fill} Store {whole} alone."
        raise DatasetError("dataset_array", f"{place} has missing values{rest}.", fill)
    some = any(_is_number(value) for value in text.to_pylist())
    if some:
        raise DatasetError("dataset_dtype", f"{place} holds {whole} and something else.", f"Store {whole} alone.")
    if pc.all(pc.match_substring_regex(text, _DATE)).as_py():
        raise _dates(place)
    raise DatasetError(
        "dataset_dtype",
        f"{place} is text.",
        f"Store it as numbers, or {_LEFT_OUT}; for a label, list its classes: dataset.classes: [one, two].",
    )
