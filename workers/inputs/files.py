"""Files of examples that are read whole: scikit-learn's digits, npz archives, and columns of one parquet table.

A reader takes the file that :func:`open_examples` opened, and opens no path again. A file that is damaged or of another
kind is a DatasetError that says so, whatever the reading library raises.
"""

import zipfile
import zlib
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.datasets import Arrays, Taken, check_arrays
from raycloak.workers.inputs.file_sets import content_digest
from raycloak.workers.inputs.named_inputs import InputSource, outlined, packed

_NPZ = "Write it with numpy.savez, with names for features and labels."
# All that numpy was seen to raise on torn or foreign archives.
_BROKEN = (ValueError, EOFError, zipfile.BadZipFile, zlib.error)


def open_examples(path: Path, hashed: bool) -> tuple[BinaryIO, bytes]:
    """Open a file of examples; return it with the digest of its bytes, which is empty unless ``hashed``.

    Guarantee: the digest is that of the bytes that a reader gets, whatever happens to the file meanwhile.

    Memory: the whole file, if it is ``hashed``.

    Raises:
        DatasetError: ``dataset_unreadable``.
    """
    try:
        file = path.open("rb")
        if not hashed:
            return file, b""
        # A second read, even of the same open file, could meet bytes that were written in between.
        with file:
            content = file.read()
    except OSError as error:
        raise file_error("dataset_unreadable", "read", path, error, DatasetError) from None
    return BytesIO(content), content_digest(content)


def read_digits() -> Arrays:
    """Return what ``sklearn.datasets.load_digits`` reads, without a second of CPU for importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None, "it is a dependency"
    assert package.origin is not None, "it is a package of files"
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        rows = np.loadtxt(path, delimiter=",", dtype=np.int64)
    except OSError as error:
        raise file_error("dataset_unreadable", "read", path, error, DatasetError) from None
    return rows[:, :-1], rows[:, -1]


def read_npz(
    file: BinaryIO,
    path: Path,
    features: tuple[str, ...],
    labels: tuple[str, ...],
    inputs: tuple[InputSource, ...] = (),
    taken: Taken | None = None,
) -> Arrays:
    """Return features and labels by the names of their arrays.

    Args:
        path: of ``file``, for error messages.
        labels: several arrays [N] make a label [k].
        inputs: arrays that a model takes by name, in the place of ``features``.
        taken: gets what is read of the file.

    Raises:
        DatasetError: ``dataset_unreadable``, ``dataset_array`` if there is no such array, ``dataset_dtype`` if one
            holds objects; ``dataset_lengths``.
        ConfigError: ``vocabulary``, as `raycloak.workers.inputs.named_inputs.outlined`.
    """
    names = [each.features for each in inputs] if inputs else [features]
    if any(len(each) != 1 for each in names):
        raise DatasetError(
            "dataset_array",
            f"{path}: an npz dataset has its features in one array.",
            "Name that array as dataset.features. For a model that takes several arrays by name, set dataset.inputs.",
        )
    arrays, columns = _arrays(file, path, [each for (each,) in names], labels)
    if len(columns) > 1 and {each.shape for each in columns} != {columns[0].shape[:1]}:
        raise DatasetError(
            "dataset_array", f"{path}: of several arrays of labels one is not [N].", "Give them as one array [N, k]."
        )
    target = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    taken = taken or Taken()
    taken.features = tuple(each.name for each in inputs) or features
    if not inputs:
        return arrays[0], target
    parts = {}
    for each, array in zip(inputs, arrays, strict=True):
        check_arrays(array, target, f"{path}, array '{each.features[0]}'")
        with np.errstate(all="ignore"):
            parts[each.name] = array.astype(np.float32 if each.vocabulary is None else np.int64)
    taken.inputs = outlined(parts, {each.name: each.vocabulary for each in inputs}, str(path))
    return packed(parts, taken.inputs), target


def _arrays(
    file: BinaryIO, path: Path, features: list[str], labels: tuple[str, ...]
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DatasetError("dataset_unreadable", f"{path} holds one array, not several.", _NPZ)
        with archive:
            return [_array(archive, name, path) for name in features], [_array(archive, each, path) for each in labels]
    except OSError as error:
        raise file_error("dataset_unreadable", "read", path, error, DatasetError) from None
    except _BROKEN as error:
        if "allow_pickle" in str(error) and zipfile.is_zipfile(file):
            raise DatasetError(
                "dataset_dtype", f"{path}: an array holds Python objects.", "Store it as numbers."
            ) from None
        raise DatasetError("dataset_unreadable", f"{path} is not an npz archive, or is damaged.", _NPZ) from None


def _array(archive: Any, name: str, path: Path) -> NDArray[Any]:
    if name not in archive:
        raise DatasetError(
            "dataset_array",
            f"{path} has no array '{name}'; it has {', '.join(sorted(archive.files))}.",
            "Set dataset.features and dataset.labels.",
        )
    found: NDArray[Any] = archive[name]
    return found


def parquet_table(file: BinaryIO, path: Path, columns: tuple[str, ...]) -> Any:
    """Return those columns of a parquet file as a `pyarrow.Table`.

    Raises:
        DatasetError: ``dataset_unreadable``, ``dataset_empty``, or ``dataset_array`` if there is no such column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
        present = parquet.schema_arrow.names
        missing = [name for name in columns if name not in present]
        if missing:
            raise DatasetError(
                "dataset_array",
                f"{path} has no column '{missing[0]}'; it has {', '.join(present)}.",
                "Set dataset.features and dataset.labels.",
            )
        table = parquet.read(columns=list(columns))
    except (OSError, pa.ArrowException, ValueError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise file_error("dataset_unreadable", "read", path, error, DatasetError) from None
        why = str(error).splitlines()[0].removesuffix(".")
        raise DatasetError(
            "dataset_unreadable", f"cannot read {path}: {why}.", "Check that it is a parquet file."
        ) from None
    if len(table) == 0:
        raise DatasetError("dataset_empty", f"{path} has no examples.", "Name a dataset with examples.")
    return table
