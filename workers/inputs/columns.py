"""Columns of a table: which are features, inputs and labels, and which a tool stored beside the data.

If no features are named, all columns are features but the labels and the indexes: the numbers of rows that pandas
writes with a table. Names are compared in one form of Unicode, and a file's own form is what is read.
"""

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.unit_names import require_unit_column

if TYPE_CHECKING:
    from raycloak.workers.inputs.descriptor import DatasetDescriptor

_RANGE = re.compile(r"(.*?)([0-9]+)\.\.(.*?)([0-9]+)")
# As pandas names an index that it writes with a table, and the nameless column that it reads such an index back as.
_INDEX = re.compile(r"__index_level_[0-9]+__|Unnamed: [0-9]+(_level_[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Group:
    """The columns that make the features, or one input of several.

    Attributes:
        name: of the input; empty for features without one.
        columns: as the file names them; several make a vector.
        vocabulary: N, if they hold ids 0 .. N-1.
    """

    name: str
    columns: tuple[str, ...]
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """The columns of a file that are read.

    Attributes:
        groups: of features.
        labels: as the file names them.
        unit: the column that says which unit a row belongs to; None without.
        left_out: sentences about columns that are taken for no feature although none was named.
    """

    groups: tuple[Group, ...]
    labels: tuple[str, ...]
    unit: str | None
    left_out: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The feature columns of all groups, in order."""
        return tuple(name for group in self.groups for name in group.columns)

    @property
    def wanted(self) -> list[str]:
        """Every column that is read, once."""
        unit = () if self.unit is None else (self.unit,)
        return list(dict.fromkeys((*self.features, *self.labels, *unit)))

    def require(self, present: Sequence[str], where: str) -> None:
        """Require the columns in another file of the table; DatasetError ``dataset_array``."""
        for name in self.wanted:
            if name not in present:
                raise DatasetError(
                    "dataset_array",
                    f"{where} has no column '{name}'; it has {listed(present)}.",
                    "Give all files of a table the same columns.",
                )


def layout(
    asked: "DatasetDescriptor", present: Sequence[str], where: str, indexes: Collection[str] = ()
) -> ColumnLayout:
    """Find the columns that a descriptor asks for among those of a file.

    Args:
        indexes: columns that the file itself says are one.

    Raises:
        DatasetError: ``dataset_array`` if one is not there, is there twice, or has no name.
    """
    # The first may be an index.
    nameless = next((place for place, name in enumerate(present) if not name.strip() and (place or name)), None)
    if nameless is not None:
        last = nameless == len(present) - 1
        ending = ": each line ends in a separator, or the first line is one name short" if last else ""
        raise DatasetError(
            "dataset_array",
            f"{where}: column {nameless + 1} of {len(present)} has no name{ending}.",
            "Remove the column, or give it a name in the first line.",
        )
    twice = next((name for name, count in Counter(present).items() if count > 1), None)
    if twice is not None:
        raise DatasetError("dataset_array", f"{where} has two columns '{twice}'.", "Give each its own name.")
    unit = None if asked.unit is None else require_unit_column(asked.unit, present, where)
    labels = found_columns(asked.label_names, present, where)
    if asked.inputs:
        sources = ((each, found_columns(each.features, present, where)) for each in asked.inputs)
        return ColumnLayout(tuple(Group(each.name, names, each.vocabulary) for each, names in sources), labels, unit)
    if asked.features:
        names = found_columns(asked.features, present, where)
        return ColumnLayout((Group("", names, asked.vocabulary),), labels, unit)
    beside = [name for name in present if not name or name in indexes or _INDEX.fullmatch(name)]
    names = tuple(name for name in present if name not in (*labels, unit, *beside))
    if not names:
        known = "the label" if unit is None else "the label and the unit"
        raise DatasetError("dataset_array", f"{where} has no column but {known}.", "Name a table with features.")
    left_out = tuple(_left_out(name) for name in beside if name not in (*labels, unit))
    return ColumnLayout((Group("", names, asked.vocabulary),), labels, unit, left_out)


def _left_out(name: str) -> str:
    if not name:
        return "the first column is left out: it has no name, as the row numbers that pandas writes"
    return f"column '{name}' is left out: it is an index that was stored beside the data"


def found_columns(asked: Sequence[str], present: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the asked columns and ranges of them, by the names that the file gives them; DatasetError
    ``dataset_array`` for one that is not there."""
    own = {unicodedata.normalize("NFC", name): name for name in present} | {name: name for name in present}
    found = []
    # One by one: a range may have more names than memory.
    for name in itertools.chain.from_iterable(map(_expanded, asked)):
        there = own.get(name, own.get(unicodedata.normalize("NFC", name)))
        if there is None:
            raise DatasetError(
                "dataset_array",
                f"{where} has no column '{name}'; it has {listed(present)}.",
                "Set dataset.features and dataset.labels.",
            )
        found.append(there)
    return tuple(found)


def _expanded(name: str) -> Iterator[str]:
    """Yield the names of a range ``f0..f99``, both ends included; of anything else the name itself."""
    found = _RANGE.fullmatch(name)
    if not found or found[1] != found[3] or int(found[2]) > int(found[4]):
        yield name
        return
    width = len(found[2]) if found[2].startswith("0") else 1
    for number in range(int(found[2]), int(found[4]) + 1):
        yield f"{found[1]}{number:0{width}d}"
