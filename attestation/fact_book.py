"""What a site's verifiers must not forget: the highest number of every kind of collateral they saw, and the time.

The book is a SQLite file of its own beside the states of the site's runs, so that a run begins with what the runs
before it have seen. Orchestrators of several runs may write to it at once.
"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from attestation.evidence import Refusal, refuse
from attestation.floors import Fact, Floors
from attestation.sqlite_files import BUSY_DEADLINE_S, enter_wal

FACTS_FILE: Final = "facts.sqlite"
CLOCK_TOLERANCE_S: Final = 120
"""Seconds by which a clock may be set back, as time services do, before evidence is refused."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID"
# The highest number is chosen by the database, so that of two processes that write at once the higher number stays.
_RAISE = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET number = max(number, excluded.number)"
_NOW: Final = "time of the last appraisal"


class FactBook:
    """Numbers that only rise.

    Guarantee: what was kept is on the disk when `keep` has returned, whatever becomes of the decision that it was for,
    and no later call of any process lowers it.

    Args:
        path: the site's book, mode 0600; created if absent.
    """

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)
        self._db = sqlite3.connect(path, timeout=BUSY_DEADLINE_S, isolation_level=None, check_same_thread=False)
        enter_wal(self._db)
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_SCHEMA)
        self._known: dict[str, int] = {}
        self._version: tuple[int] | None = None

    def close(self) -> None:
        """Close the file; the book cannot be used afterwards."""
        self._db.close()

    def floors(self) -> Floors:
        """The highest number seen of each kind of collateral."""
        return {name: number for name, number in self._numbers().items() if name != _NOW}

    def keep(self, facts: Iterable[Fact]) -> None:
        """Raise the floors to the numbers of collateral that verified; a lower number changes nothing."""
        # Most appraisals bring nothing new, and a transaction costs a write to the disk. What was read earlier will do:
        # numbers that were on the disk then have not become lower.
        rising = [(name, number) for name, number in facts if number > self._known.get(name, -1)]
        if rising:
            with closing(self._db.cursor()) as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                cursor.executemany(_RAISE, rising)
                cursor.execute("COMMIT")
            self._version = None

    def check_clock(self, now: int) -> None:
        """Note that an appraisal takes place at unix second ``now``.

        Guarantee: no evidence is appraised at a time that lies more than `CLOCK_TOLERANCE_S` before an earlier
        appraisal, so collateral that has expired cannot become valid again by setting the clock back.

        Raises:
            EvidenceError: ``collateral_stale``.
        """
        last = self._numbers().get(_NOW)
        if last is not None and now < last - CLOCK_TOLERANCE_S:
            refuse(Refusal.COLLATERAL_STALE, f"the verifier's clock says {now}, and said {last} before")
        if last is None or now > last:
            self.keep([(_NOW, now)])

    def _numbers(self) -> dict[str, int]:
        # It changes when another connection has committed, and is read several times faster than the numbers.
        version = self._db.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._known = dict(self._db.execute("SELECT name, number FROM facts").fetchall())
            self._version = version
        return self._known
