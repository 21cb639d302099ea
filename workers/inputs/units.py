"""Units: which rows of a dataset belong to one person, document, or whatever else its data protects as a whole.

Hides how rows find their unit, and how a step chooses some of a unit's rows. Units are numbered in the order in which
the data first names them. A unit's name never leaves :class:`UnitNumbers`: no message, file, error or log has it, nor
anything that is computed from it. What tells the units of two datasets apart is made under a key of this process alone.
"""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.proof_bounds import require_bound

MOST_CHOSEN = 256
"""The most rows that a step chooses of a unit: operations grow with their square."""
# A product of a word's half and a number of rows fits into 64 bits.
MOST_ROWS = 2**32 - 1
# Of a name, under a key that ends with the process: a billion units collide at odds of 1 in 10^20.
_TAG_BYTES = 16
_TAG_KEY = secrets.token_bytes(32)


@dataclass(frozen=True, eq=False)
class Units:
    """The rows of each unit of a dataset.

    Attributes:
        rows: row ids unit by unit, those of one unit in the order of the data; int64 [R].
        ends: where the rows of each unit end; int64 [N], strictly increasing.
        tags: what tells the units of this process apart, [N] items of 16 bytes; None where no name is known.
    """

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    tags: NDArray[np.void] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_bound(len(self.rows) <= MOST_ROWS, "a draw is uniform over the rows of a unit")
        sizes = np.diff(self.ends, prepend=0)
        require_bound(bool((sizes > 0).all()) and int(sizes.sum()) == len(self.rows), "each unit has rows of its own")

    def __len__(self) -> int:
        return len(self.ends)

    def sizes(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of rows of each of ``units`` [n], int64 [n]."""
        sizes: NDArray[np.int64] = self.ends[units] - self._starts(units)
        return sizes

    def rows_of(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row ids of ``units`` [n], unit by unit; int64 [the sum of their sizes]."""
        sizes = self.sizes(units)
        places = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self.rows_at(np.repeat(units, sizes), places)

    def rows_at(self, units: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each of ``units`` at each of ``places``, from 0; any shapes that broadcast."""
        # The j-th row of a unit lies j places behind its first.
        rows: NDArray[np.int64] = self.rows[self._starts(units) + places]
        return rows

    def chosen(
        self, units: NDArray[np.int64], rows_per_unit: int, words: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return ``rows_per_unit`` = k rows of each unit, chosen without repetition by uniform words.

        Guarantee: every k of a unit's rows are equally likely, up to a bias of at most n_u * 2^-64 in each of the k
        draws from a unit of n_u rows. A unit of at most k rows gives all of them. No shape depends on n_u, and neither
        does the number of operations.

        Args:
            units: int64 [n]; one may appear several times, and then has a choice at each place.
            rows_per_unit: k, at least 1.
            words: uniform, uint64 [n, k].

        Returns:
            row ids int64 [n, k], and which of them are present, bool [n, k]; present ones come first. Where a unit has
            too few rows, its first row stands and is not present.
        """
        require_bound(1 <= rows_per_unit <= MOST_CHOSEN, "so many rows of a unit are chosen")
        require_bound(words.shape == (len(units), rows_per_unit), "each draw has its own word")
        sizes = self.sizes(units)
        present = np.arange(rows_per_unit) < sizes[:, None]
        # A shuffle of 0 .. n_u - 1 of which only the first k places and what was swapped away from them are held:
        # swapped[j] is what lies at place drawn[j] since the j-th swap. A draw is a row here: columns would be strided.
        drawn = np.empty((rows_per_unit, len(units)), np.int64)
        swapped, places = np.empty_like(drawn), np.empty_like(drawn)
        for j in range(rows_per_unit):
            drawn[j] = j + below(np.maximum(sizes - j, 1), words[:, j])
            places[j], swapped[j] = drawn[j], j
            for earlier in range(j):
                np.copyto(places[j], swapped[earlier], where=drawn[earlier] == drawn[j])
                np.copyto(swapped[j], swapped[earlier], where=drawn[earlier] == j)
        return self.rows_at(units[:, None], np.where(present, places.T, 0)), present

    def shared_with(self, other: "Units") -> int | None:
        """Return how many units are also units of ``other``, by their names; None where these are not known."""
        if self.tags is None or other.tags is None:
            return None
        return int(np.isin(self.tags, other.tags).sum())

    def with_more(self, units: int, rows_each: int) -> "Units":
        """Return these units and behind them more, whose rows lie behind all others; without names."""
        added = np.arange(1, units + 1) * rows_each + len(self.rows)
        rows = np.concatenate([self.rows, np.arange(len(self.rows), len(self.rows) + units * rows_each)])
        return Units(rows, np.concatenate([self.ends, added]))

    def _starts(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(units == 0, 0, self.ends[units - 1])


class UnitNumbers:
    """The number of each row's unit, counted while rows are read in their order."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._of_rows: list[NDArray[np.int64]] = []

    def add(self, names: Iterable[str]) -> None:
        """Note the names of the units of the next rows; rows with equal names belong to one unit."""
        numbers = self._numbers
        # A new name gets the next number: the number of names before it.
        self._of_rows.append(np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64))

    def of_rows(self) -> NDArray[np.int64]:
        """Return the number of each row's unit, int64 [R]."""
        return np.concatenate([np.empty(0, np.int64), *self._of_rows])

    def units(self) -> Units:
        """Return the units of all rows."""
        of_rows = self.of_rows()
        # A file's name may have bytes that are no text.
        encoded = (each.encode(errors="surrogatepass") for each in self._numbers)
        hashed = (hashlib.blake2b(each, digest_size=_TAG_BYTES, key=_TAG_KEY) for each in encoded)
        tags = np.frombuffer(b"".join(each.digest() for each in hashed), np.dtype((np.void, _TAG_BYTES)))
        ends = np.cumsum(np.bincount(of_rows, minlength=len(self._numbers)))
        return Units(np.argsort(of_rows, kind="stable"), ends, tags)


def below(bounds: NDArray[np.int64], words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return floor(bound * word / 2^64) for each, exactly: uniform below the bound, with a bias of bound * 2^-64."""
    half, wide = np.uint64(32), bounds.astype(np.uint64)
    low = (words & np.uint64(2**32 - 1)) * wide >> half
    return ((words >> half) * wide + low >> half).astype(np.int64)
