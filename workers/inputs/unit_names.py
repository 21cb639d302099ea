"""The names of units, as the kinds of data have them: a column, an array, a folder, or what a function says.

A name is a whole number or a text, and a number is the text of its digits: 7 in one file and "7" in another are one.
Text is compared in one form of Unicode, without space around it, so that no spelling makes two units of one. An error
names the column and never a value; for the owner of the data it names rows.
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.units import UnitNumbers
from raycloak.workers.inputs.void import which

# As programs write a value that is not there: rows that share one would be one unit, and parts of other units.
_MISSING = ("", "na", "n/a", "nan", "null", "none", "<na>")


def require_unit_column(name: str, present: Sequence[str], where: str) -> str:
    """Return the column or array of units by the file's own name for it; DatasetError ``dataset_unit`` without one."""
    asked = unicodedata.normalize("NFC", name)
    found = next((each for each in present if unicodedata.normalize("NFC", each) == asked), None)
    if found is None:
        raise DatasetError(
            "dataset_unit",
            f"{where} has no '{name}' for dataset.unit; it has {listed(present)}.",
            "Name the column, or the array of an npz file, that says whose each row is.",
        )
    return found


def unit_names(column: Any, place: str, row: int = 0, *, as_text: bool = False) -> list[str]:
    """Return the name of each row's unit.

    Args:
        column: an array of Arrow, or what becomes one.
        place: what an error calls it.
        row: rows before it, for what the owner is told.
        as_text: whether the column is from a file in which every value is text, where a column of numbers with a point
            is one of floats.

    Raises:
        DatasetError: ``dataset_unit`` if a name is missing, or is neither a whole number nor text.
    """
    import pyarrow as pa

    array = _as_arrow(column, place)
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not text and not pa.types.is_integer(kind) and not pa.types.is_null(kind):
        raise _no_names(place, f"is {kind}")
    names = [unicodedata.normalize("NFC", str(each)).strip() for each in array.to_pylist()]
    missing = np.asarray(array.is_null()) | np.array([each.lower() in _MISSING for each in names], np.bool_)
    if missing.any():
        raise DatasetError(
            "dataset_unit",
            f"{place} has rows without a name of their unit{which(_numbered(missing, row))}.",
            "Leave such rows out, or give each the name of the person that it is of.",
        )
    if as_text and _are_floats(names):
        raise _no_names(place, "holds numbers with a point")
    return names


def units_told(tell: Callable[[int], Any], count: int, place: str) -> UnitNumbers:
    """Ask code of the user's own for the unit of each example, once; what it says later changes nothing.

    Raises:
        DatasetError: as :func:`unit_names`; all that ``tell`` raises is raised.
    """
    numbers = UnitNumbers()
    numbers.add(unit_names([tell(index) for index in range(count)], f"{place}, unit(index)"))
    return numbers


def _as_arrow(column: Any, place: str) -> Any:
    import pyarrow as pa

    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if isinstance(column, np.ndarray) and column.ndim != 1:
        raise _no_names(place, f"has {column.ndim} dimensions")
    try:
        return pa.array(column)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise _no_names(place, "mixes types") from None


def _no_names(place: str, what: str) -> DatasetError:
    # A float is no name: rounding makes two units of one, or one of two.
    return DatasetError(
        "dataset_unit",
        f"{place} {what}, and a unit is named by a whole number or by text.",
        "Store it as whole numbers or as text, without missing values.",
    )


def _are_floats(names: Sequence[str]) -> bool:
    try:
        found = [float(each) for each in names]
    except ValueError:
        return False
    return bool(found) and not all(each.lstrip("+-").isdigit() for each in names)


def _numbered(missing: Any, row: int) -> Iterable[int]:
    return (row + 1 + int(at) for at in np.flatnonzero(missing))
