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

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.named_inputs import InputSource

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
        left_out: sentences about columns that are taken for no feature although none was named.
    """

    groups: tuple[Group, ...]
    labels: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The feature columns of all groups, in order."""
        return tuple(name for group in self.groups for name in group.columns)

    @property
    def wanted(self) -> list[str]:
        """Every column that is read, once."""
        return list(dict.fromkeys((*self.features, *self.labels)))

    def require(self, present: Sequence[str], where: str) -> None:
        """Require the columns in another file of the table; DatasetError ``dataset_array``."""
        for name in self.wanted:
            if name not in present:
                raise DatasetError(
                    "dataset_array",
                    f"{where} has no column '{name}'; it has {listed(present)}.",
                    "Give all files of a table the same columns.",
                )


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are asked for.

    Attributes:
        features: names, and ranges such as ``f0..f99``; all columns but labels and indexes if empty.
        labels: names and ranges of the label's columns; several make a label [k].
        classes: public list of the text labels; the first counts as 0. Empty for labels that are numbers.
        vocabulary: N, if features are ids 0 .. N-1.
        inputs: features of a model that takes several by name; ``features`` is empty then.
        allow_void: whether a missing value becomes NaN.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    classes: tuple[str, ...] = ()
    vocabulary: int | None = None
    inputs: tuple[InputSource, ...] = ()
    allow_void: bool = False

    def layout(self, present: Sequence[str], where: str, indexes: Collection[str] = ()) -> ColumnLayout:
        """Find them among the columns of a file.

        Args:
            indexes: columns that the file itself says are one.

        Raises:
            DatasetError: ``dataset_array`` if one is not there, is there twice, or has no name.
        """
        _require_names(present, where)
        twice = next((name for name, count in Counter(present).items() if count > 1), None)
        if twice is not None:
            raise DatasetError("dataset_array", f"{where} has two columns '{twice}'.", "Give each its own name.")
        labels = _found(self.labels, present, where)
        if self.inputs:
            sources = ((each, _found(each.features, present, where)) for each in self.inputs)
            return ColumnLayout(tuple(Group(each.name, names, each.vocabulary) for each, names in sources), labels)
        if self.features:
            return ColumnLayout((Group("", _found(self.features, present, where), self.vocabulary),), labels)
        beside = [name for name in present if not name or name in indexes or _INDEX.fullmatch(name)]
        names = tuple(name for name in present if name not in labels and name not in beside)
        if not names:
            raise DatasetError("dataset_array", f"{where} has no column but the label.", "Name a table with features.")
        left_out = tuple(_left_out(name) for name in beside if name not in labels)
        return ColumnLayout((Group("", names, self.vocabulary),), labels, left_out)


def _left_out(name: str) -> str:
    if not name:
        return "the first column is left out: it has no name, as the row numbers that pandas writes"
    return f"column '{name}' is left out: it is an index that was stored beside the data"


def _require_names(present: Sequence[str], where: str) -> None:
    # The first may be an index.
    place = next((place for place, name in enumerate(present) if not name.strip() and (place or name)), None)
    if place is None:
        return
    last = place == len(present) - 1
    ending = ": each line ends in a separator, or the first line is one name short" if last else ""
    raise DatasetError(
        "dataset_array",
        f"{where}: column {place + 1} of {len(present)} has no name{ending}.",
        "Remove the column, or give it a name in the first line.",
    )


def _found(asked: Sequence[str], present: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the asked columns by the names that the file gives them."""
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
