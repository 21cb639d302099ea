"""Tables as examples: CSV and Parquet files, read in chunks of rows.

Hides how columns become numbers: which types they may have, and what a text label counts as. Which columns are meant is
in `raycloak.workers.inputs.columns`.

The first file says which columns there are; every other file must have them, with the same types. Several columns make
a vector [k]; one column is a number, or a list of numbers [k]. An error names all columns that cannot be read, and
never a value; for the owner of the data it names rows and lines.
"""

import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.columns import ColumnLayout, Group, layout
from raycloak.workers.inputs.datasets import Arrays, Taken
from raycloak.workers.inputs.file_sets import FileSet, require_unpacked, unzipped
from raycloak.workers.inputs.named_inputs import outlined, packed
from raycloak.workers.inputs.unit_names import unit_names
from raycloak.workers.inputs.void import ALLOW, named_by_check, which

if TYPE_CHECKING:
    from raycloak.workers.inputs.descriptor import DatasetDescriptor

CSV_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
PARQUET_SUFFIXES = (".parquet",)

# Values of a chunk, and rows where a value is a list of unknown length: bounds the memory beside the rows.
_VALUES = 2**20
_LISTS = 128
_CSV_BLOCK = 4 * 2**20
# As most programs write a date, with a time or not.
_DATE = r"^[0-9]{1,4}[-/.][0-9]{1,2}[-/.][0-9]{1,4}([ T]|$)"
_BOOLEAN = "^(?i:true|false)$"
_SHOWN = 20  # columns of one error
# What programs write for a value that is not there.
_MISSING = ("", "NA", "N/A", "n/a", "null", "NULL", "None")

_UNLABELLED = "Leave rows without a label out."
_LEFT_OUT = "name the columns without it in dataset.features"

_Read = TypeVar("_Read")


def parquet_rows(files: FileSet, asked: "DatasetDescriptor", taken: Taken) -> Iterator[Arrays]:
    """Yield the rows of Parquet files, in order.

    Features of several columns are float32, or ids if there is a vocabulary and all are integers.

    Args:
        taken: gets what is read of the files.

    Raises:
        DatasetError: ``dataset_unreadable``, ``dataset_array``, ``dataset_dtype`` or ``dataset_label``.
    """
    import pyarrow.parquet as pq

    columns: ColumnLayout | None = None
    types: dict[str, Any] = {}
    stored: dict[str, np.dtype[Any]] = {}

    def read(array: Any, place: str, group: Group | None, row: int) -> NDArray[Any]:
        if group is None:
            return number_column(array, place, row)
        kept = stored[group.name]
        numbers = number_column(array, place, row, allow_void=asked.allow_void and kept.kind == "f")
        with np.errstate(all="ignore"):
            return numbers.astype(kept, copy=False)

    row = 0
    for where, file in files.opened():
        with unbroken(file, where, "not a parquet file"):
            parquet = pq.ParquetFile(file, pre_buffer=False)
            schema = parquet.schema_arrow
            columns = layout(asked, schema.names, where, _indexes(schema)) if columns is None else columns
            columns.require(schema.names, where)
            found = {name: schema.field(name).type for name in (*columns.features, *columns.labels)}
            types = types or found
            stored = stored or _stored(types, columns, asked, where)
            other = next((name for name in found if found[name] != types[name]), None)
            if other is not None:
                raise DatasetError(
                    "dataset_dtype",
                    f"{column_place(where, other)} is {found[other]}, and {types[other]} in the file before.",
                    "Give all files of a table the same types.",
                )
            # Chunks and not whole row groups: a group may be larger than memory.
            rows = _LISTS if any(map(is_list, types.values())) else max(1, _VALUES // len(types))
            for batch in parquet.iter_batches(rows, columns=columns.wanted, use_threads=False):
                held = dict(zip(batch.schema.names, batch.columns, strict=True))
                note_units(taken, columns.unit, held, where, row)
                yield _chunk(held, columns, asked, where, row, taken, read)
                row += len(batch)


@contextmanager
def unbroken(file: BinaryIO, where: str, what: str) -> Iterator[None]:
    """Refuse a file that something has packed, or that Arrow cannot read; DatasetError ``dataset_unreadable``.

    Args:
        what: a phrase that says which files are read, and that this one is none.
    """
    import pyarrow as pa

    require_unpacked(file, where)
    try:
        yield
    except (OSError, pa.ArrowException, ValueError):
        # Not the library's text: it may quote a value.
        raise DatasetError("dataset_unreadable", f"{where} is {what}, or is damaged.", "Write it again.") from None


def csv_rows(files: FileSet, asked: "DatasetDescriptor", taken: Taken) -> Iterator[Arrays]:
    """Yield the rows of CSV files with a header, in order; ``.tsv`` has tabs, and gzip may have packed them.

    Features are float32, or ids if there is a vocabulary. Labels are integers if all of the first file are.

    Args:
        taken: gets what is read of the files.

    Raises:
        DatasetError: as :func:`parquet_rows`.
    """
    columns: ColumnLayout | None = None
    integers = False

    def read(array: Any, place: str, group: Group | None, row: int) -> NDArray[Any]:
        if group is None:
            return _parsed(array, place, integers, row)
        return _parsed(array, place, group.vocabulary is not None, row, asked.allow_void)

    row = 0
    for where, opened in files.opened():
        file = unzipped(opened, where)
        present = _header(file, where)
        if columns is None:
            columns = layout(asked, present, where)
            if not asked.class_names:
                # All labels are looked at before the first row is read.
                labels: Iterable[Any] = _text_batches(file, where, list(columns.labels))
                integers = all(_cast(_trimmed(each), "int64") is not None for part in labels for each in part.columns)
                file.seek(0)
        # A later file may have its columns in another order.
        columns.require(present, where)
        for batch in _text_batches(file, where, columns.wanted):
            held = {name: _trimmed(each) for name, each in zip(columns.wanted, batch.columns, strict=True)}
            note_units(taken, columns.unit, held, where, row, as_text=True)
            yield _chunk(held, columns, asked, where, row, taken, read)
            row += len(batch)


def _indexes(schema: Any) -> tuple[str, ...]:
    """Return the columns that pandas says are an index; an index of a range is no column."""
    try:
        named = (schema.pandas_metadata or {}).get("index_columns", [])
    # Metadata are another program's text.
    except (ValueError, AttributeError):
        return ()
    return tuple(each for each in named if isinstance(each, str))


def _chunk(
    held: Mapping[str, Any],
    columns: ColumnLayout,
    asked: "DatasetDescriptor",
    where: str,
    row: int,
    taken: Taken,
    read: Callable[[Any, str, Group | None, int], NDArray[Any]],
) -> Arrays:
    """Return features and labels of a chunk: those of every group, then the labels.

    Args:
        held: its columns, as Arrow has them.
        row: rows of the table before it.
        read: gets a column, what an error calls it, its group, or None for a label of numbers, and ``row``.
    """
    taken.features, taken.left_out = columns.features, columns.left_out
    reads = [
        partial(read, held[name], column_place(where, name), group, row)
        for group in columns.groups
        for name in group.columns
    ]
    for name in columns.labels:
        label, place = held[name], column_place(where, name)
        classed = partial(class_numbers, label, asked.class_names, place, row)
        reads.append(classed if asked.class_names else partial(read, label, place, None, row))
    parts = iter(_all_of(reads, where))
    features = {group.name: _side_by_side([next(parts) for _ in group.columns]) for group in columns.groups}
    labels = _side_by_side(list(parts))
    if "" in features:
        return features[""], labels
    if not taken.inputs:
        taken.inputs = outlined(features, {group.name: group.vocabulary for group in columns.groups}, where)
    return packed(features, taken.inputs), labels


def note_units(
    taken: Taken, unit: str | None, held: Mapping[str, Any], where: str, row: int = 0, *, as_text: bool = False
) -> None:
    """Tell ``taken`` the units of the rows of a chunk, if it asks for them; errors as `unit_names`.

    Args:
        unit: the column that names them.
        held: the columns of the chunk, as Arrow has them.
        row, as_text: as of `unit_names`.
    """
    if unit is not None and taken.units is not None:
        taken.units.add(unit_names(held[unit], column_place(where, unit), row, as_text=as_text))


def _side_by_side(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)


def _stored(
    types: Mapping[str, Any], columns: ColumnLayout, asked: "DatasetDescriptor", where: str
) -> dict[str, np.dtype[Any]]:
    """Return the dtype in which the columns of each group are kept: what they have in common.

    Args:
        types: of features and labels, as Arrow has them.
    """
    reads = [partial(_number_type, types[name], column_place(where, name)) for name in columns.features]
    labels = () if asked.class_names else columns.labels
    reads += [partial(_number_type, types[name], column_place(where, name), is_label=True) for name in labels]
    dtypes = iter(_all_of(reads, where))
    stored = {}
    for group in columns.groups:
        common = np.result_type(*(next(dtypes) for _ in group.columns))
        several = len(group.columns) > 1
        if several and any(is_list(types[name]) for name in group.columns):
            raise DatasetError(
                "dataset_array", f"{where}: of several feature columns one holds lists.", "Name that one alone."
            )
        # An input by name, or a table of several columns, holds quantities unless there is a vocabulary.
        quantities = group.vocabulary is None and (group.name != "" or several)
        whole = np.dtype(np.int64) if group.name else common
        stored[group.name] = np.dtype(np.float32) if common.kind == "f" or quantities else whole
    return stored


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


def column_place(where: str, column: str) -> str:
    """Return what a message calls a column."""
    return f"{where}, column '{column}'"


def is_list(kind: Any) -> bool:
    """Return whether the values of a column of this type are lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _number_type(kind: Any, place: str, is_label: bool = False) -> np.dtype[Any]:
    """Return numpy's dtype of a column of numbers, or of lists of them; DatasetError ``dataset_dtype`` for others."""
    import pyarrow as pa

    inner = kind.value_type if is_list(kind) else kind
    if pa.types.is_boolean(inner) or pa.types.is_integer(inner) or pa.types.is_floating(inner):
        found: np.dtype[Any] = np.dtype(inner.to_pandas_dtype())
        return found
    if is_label and _is_text(inner):
        raise DatasetError("dataset_dtype", f"{place} is text.", "List its classes: dataset.classes: [one, two].")
    if pa.types.is_date(inner) or pa.types.is_timestamp(inner):
        raise _dates(place)
    raise DatasetError(
        "dataset_dtype",
        f"{place} is {inner}, which is no number.",
        f"Store it as numbers, or {_LEFT_OUT}.",
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


def number_column(array: Any, place: str, row: int = 0, *, allow_void: bool = False) -> NDArray[Any]:
    """Return an array of numbers as [n], one of equally long lists of numbers as [n, k].

    Args:
        row: rows of the table before it, for what its owner is told.
        allow_void: whether a missing number becomes NaN.

    Raises:
        DatasetError: ``dataset_array`` if a value is missing or lists differ in length, ``dataset_dtype``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    _number_type(array.type, place)
    if array.null_count and (is_list(array.type) or not allow_void):
        raise _missing(place, _rows(array.is_null(), row))
    if not is_list(array.type):
        return np.asarray(array.cast(pa.float64()).fill_null(np.nan) if array.null_count else array)
    lengths = np.asarray(pc.list_value_length(array))
    values = array.flatten()
    if values.null_count and not allow_void:
        lists = np.repeat(np.arange(len(lengths)), lengths)[np.asarray(values.is_null())]
        raise _missing(place, (row + 1 + int(each) for each in np.unique(lists)))
    if len(lengths) and (lengths != lengths[0]).any():
        raise DatasetError(
            "dataset_array",
            f"{place} has lists of different lengths{which(_rows(lengths != lengths[0], row))}.",
            "Pad or crop them to one public length.",
        )
    if values.null_count:
        values = values.cast(pa.float64()).fill_null(np.nan)
    return np.asarray(values).reshape(len(array), lengths[0] if len(lengths) else 0)


def label_columns(columns: Sequence[tuple[Any, str]], classes: tuple[str, ...]) -> NDArray[Any]:
    """Return the labels [n, ...] of one column, or [n, k] of several.

    Args:
        columns: arrays of Arrow, and what an error calls each.
        classes: public list of the classes that labels name; empty for labels that are numbers.

    Raises:
        DatasetError: as :func:`class_numbers` where there is a list, and else as :func:`number_column`.
    """
    read = partial(class_numbers, classes=classes) if classes else number_column
    return _side_by_side([read(array, place=place) for array, place in columns])


def _missing(
    place: str, rows: Iterable[int], remedy: str = f"Fill them with public constants, {ALLOW}."
) -> DatasetError:
    return DatasetError("dataset_array", f"{place} has missing values{which(rows)}.", remedy)


def _rows(mask: Any, row: int) -> Iterator[int]:
    """Yield the numbers of the rows of a mask, from 1; they are counted for nobody but the owner."""
    return (row + 1 + int(place) for place in np.flatnonzero(np.asarray(mask)))


def class_numbers(array: Any, classes: tuple[str, ...], place: str, row: int = 0) -> NDArray[np.int64]:
    """Return the place of each text label in the public list of classes, whatever form of Unicode either is in.

    Args:
        row: rows of the table before it, for what its owner is told.

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
        raise _missing(place, _rows(array.is_null(), row), _UNLABELLED)
    labels = array.cast(pa.string())
    names = pa.array([unicodedata.normalize("NFC", name) for name in classes], pa.string())
    numbers = pc.index_in(pc.utf8_normalize(labels, form="NFC"), value_set=names)
    if numbers.null_count:
        missing = pc.and_(numbers.is_null(), pc.is_in(labels, value_set=pa.array(_MISSING)))
        if pc.any(missing).as_py():
            raise _missing(place, _rows(missing, row), _UNLABELLED)
        # Which one it is stays here: it is an example's.
        raise DatasetError(
            "dataset_label",
            f"{place} has a label that is not in dataset.classes{which(_rows(numbers.is_null(), row))}.",
            "Complete the list.",
        )
    return np.asarray(numbers).astype(np.int64)


def _header(file: BinaryIO, where: str) -> list[str]:
    """Return the names in the first line of a CSV file, and go back to its start."""
    import csv

    try:
        # A file of S3 has no lines.
        line, _, _ = file.read(_CSV_BLOCK).partition(b"\n")
        file.seek(0)
        names = next(csv.reader([line.decode("utf-8-sig").rstrip("\r")], delimiter=_delimiter(where)), [])
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error):
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
    return "\t" if where.lower().removesuffix(".gz").endswith(".tsv") else ","


def _not_csv(where: str, lines: Iterable[int] = ()) -> DatasetError:
    return DatasetError(
        "dataset_unreadable",
        f"{where} is not a CSV file in UTF-8 with as many values in each line as in the first{which(lines, 'line')}.",
        f"Write it again.{named_by_check()}",
    )


def _text_batches(file: BinaryIO, where: str, names: list[str]) -> Iterator[Any]:
    """Yield those columns as text, so that no type depends on where a block ends."""
    import pyarrow as pa
    import pyarrow.csv as pacsv

    broken: list[int] = []

    def noted(line: Any) -> str:
        # Arrow counts the lines of a file where one thread reads it.
        broken.extend([] if line.number is None else [line.number])
        return "error"

    try:
        reader = pacsv.open_csv(
            file,
            read_options=pacsv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK),
            parse_options=pacsv.ParseOptions(
                delimiter=_delimiter(where), newlines_in_values=True, invalid_row_handler=noted
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), include_columns=names, strings_can_be_null=False
            ),
        )
        yield from reader
    except (OSError, EOFError, zlib.error, pa.ArrowException):
        # Not the library's text: it quotes the line.
        raise _not_csv(where, broken) from None


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


def _parsed(text: Any, place: str, integers: bool, row: int, allow_void: bool = False) -> NDArray[Any]:
    """Return text without space around it as int64, or as float32.

    Args:
        row: rows of the table before it, for what its owner is told.
        allow_void: whether a missing number becomes NaN.

    Raises:
        DatasetError: ``dataset_array`` for a missing value, ``dataset_dtype`` for one that is no number.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    # By way of float64, as the values of other files come: one text has one float32.
    kind = "int64" if integers else "float64"
    numbers = _cast(text, kind)
    missing = None if numbers is not None else pc.is_in(text, value_set=pa.array(_MISSING))
    if numbers is None and allow_void and not integers:
        numbers = _cast(pc.if_else(missing, "nan", text), kind)
    if numbers is not None:
        with np.errstate(all="ignore"):
            return np.asarray(numbers) if integers else np.asarray(numbers).astype(np.float32)
    whole = "whole numbers" if integers else "numbers"
    # Each row is looked at for nobody but the owner.
    wrong = which(row + 1 + at for at in range(len(text)) if _cast(text.slice(at, 1), kind) is None)
    if pc.any(missing).as_py():
        rest, fill = "", f"Fill them with public constants, {ALLOW}."
        if _cast(text.filter(pc.invert(missing)), kind) is None:
            # Both at once: one round mends a column.
            rest, fill = f", and others that are no {whole}", f"{fill} Store {whole} alone."
        raise DatasetError("dataset_array", f"{place} has missing values{rest}{wrong}.", fill)
    if any(_is_number(value) for value in text.to_pylist()):
        raise DatasetError(
            "dataset_dtype", f"{place} holds {whole} and something else{wrong}.", f"Store {whole} alone."
        )
    if pc.all(pc.match_substring_regex(text, _DATE)).as_py():
        raise _dates(place)
    if pc.all(pc.match_substring_regex(text, _BOOLEAN)).as_py():
        raise DatasetError("dataset_dtype", f"{place} holds true and false.", "Store them as 1 and 0.")
    raise DatasetError(
        "dataset_dtype",
        f"{place} is text.",
        f"Store it as numbers, or {_LEFT_OUT}; for a label, list its classes: dataset.classes: [one, two].",
    )
