"""Arrays that are read whole: scikit-learn's digits, and npz archives.

A file that is damaged or of another kind is a DatasetError that says so, whatever the reading library raises.
"""

import zipfile
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.file_errors import file_error, file_errors
from raycloak.workers.inputs.datasets import Arrays, Taken, check_arrays
from raycloak.workers.inputs.file_sets import ZIP, FileSet, require_unpacked
from raycloak.workers.inputs.named_inputs import outlined, packed
from raycloak.workers.inputs.unit_names import require_unit_column, unit_names

if TYPE_CHECKING:
    from raycloak.workers.inputs.descriptor import DatasetDescriptor

_NPZ = "Write it with numpy.savez, with names for features and labels."
# All that numpy was seen to raise on torn or foreign archives.
_BROKEN = (ValueError, EOFError, zipfile.BadZipFile, zlib.error)


def read_digits() -> Arrays:
    """Return what ``sklearn.datasets.load_digits`` reads, without a second of CPU for importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None, "it is a dependency"
    assert package.origin is not None, "it is a package of files"
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with file_errors("dataset_unreadable", "read", path, DatasetError):
        rows = np.loadtxt(path, delimiter=",", dtype=np.int64)
    return rows[:, :-1], rows[:, -1]


def npz_rows(files: FileSet, asked: "DatasetDescriptor", taken: Taken) -> Iterator[Arrays]:
    """Yield features and labels of each archive by the names of its arrays; several arrays [N] make a label [k].

    Args:
        taken: gets what is read of the files.

    Raises:
        DatasetError: ``dataset_unreadable``, ``dataset_array`` if there is no such array, ``dataset_dtype`` if one
            holds objects; ``dataset_lengths``.
        ConfigError: ``vocabulary``, as `raycloak.workers.inputs.named_inputs.outlined`.
    """
    for where, file in files.opened():
        require_unpacked(file, where, ZIP)
        yield _read_npz(file, where, asked, taken)


def _read_npz(file: BinaryIO, where: str, asked: "DatasetDescriptor", taken: Taken) -> Arrays:
    inputs = asked.inputs
    names = [each.features for each in inputs] if inputs else [asked.features]
    if any(len(each) != 1 for each in names):
        raise DatasetError(
            "dataset_array",
            f"{where}: an npz dataset has its features in one array.",
            "Name that array as dataset.features. For a model that takes several arrays by name, set dataset.inputs.",
        )
    wanted = [*(each for (each,) in names), *asked.label_names]
    found = _arrays(file, where, wanted, asked.unit)
    arrays, columns = found[: len(names)], found[len(names) : len(wanted)]
    if taken.units is not None:
        named = unit_names(found[-1], f"{where}, array '{asked.unit}'")
        if len(named) != len(arrays[0]):
            raise DatasetError(
                "dataset_unit",
                f"{where}: {len(arrays[0])} examples, and array '{asked.unit}' names the units of {len(named)}.",
                "Give each example the name of its unit.",
            )
        taken.units.add(named)
    if len(columns) > 1 and {each.shape for each in columns} != {columns[0].shape[:1]}:
        raise DatasetError(
            "dataset_array", f"{where}: of several arrays of labels one is not [N].", "Give them as one array [N, k]."
        )
    target = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    taken.features = tuple(each.name for each in inputs) or asked.features
    if not inputs:
        return arrays[0], target
    parts = {}
    for each, array in zip(inputs, arrays, strict=True):
        check_arrays(array, target, f"{where}, array '{each.features[0]}'")
        with np.errstate(all="ignore"):
            parts[each.name] = array.astype(np.float32 if each.vocabulary is None else np.int64)
    taken.inputs = outlined(parts, {each.name: each.vocabulary for each in inputs}, where)
    return packed(parts, taken.inputs), target


def _arrays(file: BinaryIO, where: str, names: list[str], unit: str | None) -> list[NDArray[Any]]:
    """Return the arrays of those names, and behind them the one that names the unit of each row, if one does."""
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DatasetError("dataset_unreadable", f"{where} holds one array, not several.", _NPZ)
        with archive:
            more = () if unit is None else (require_unit_column(unit, sorted(archive.files), where),)
            return [_array(archive, name, where) for name in (*names, *more)]
    except OSError as error:
        raise file_error("dataset_unreadable", "read", where, error, DatasetError) from None
    except _BROKEN as error:
        if "allow_pickle" in str(error) and zipfile.is_zipfile(file):
            raise DatasetError(
                "dataset_dtype", f"{where}: an array holds Python objects.", "Store it as numbers."
            ) from None
        raise DatasetError("dataset_unreadable", f"{where} is not an npz archive, or is damaged.", _NPZ) from None


def _array(archive: Any, name: str, where: str) -> NDArray[Any]:
    if name not in archive:
        raise DatasetError(
            "dataset_array",
            f"{where} has no array '{name}'; it has {', '.join(sorted(archive.files))}.",
            "Set dataset.features and dataset.labels.",
        )
    found: NDArray[Any] = archive[name]
    return found
