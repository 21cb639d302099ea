"""The facts that a site's verifiers must not forget: the highest number of each kind of collateral, and the time.

The book is a separate SQLite file beside the states of the site's runs. So a run begins with what earlier runs have
seen. Orchestrators of several runs may write to it at once.
"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.files.sqlite import BUSY_DEADLINE_S, enter_wal
from raycloak.attestation.trust.floors import Fact, Floors

FACTS_FILE: Final = "facts.sqlite"
CLOCK_TOLERANCE_S: Final = 120
"""Seconds by which a clock may be set back before evidence is refused. Time services set clocks back too."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID"
# The database takes the maximum, so that the higher number stays when two processes write at once.
_RAISE = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET number = max(number, excluded.number)"
_NOW: Final = "time of the last appraisal"


class FactBook:
    """A durable map of numbers that only rise.

    Guarantee: a number is on disk when `keep` has returned, whatever becomes of the decision it was for. No later call
    of any process lowers it.

    Args:
        path: the site's book, mode 0600; created if absent.
    """

    def __init__(self, path: Path) -> None:
        # Before SQLite, which would create it readable by others.
        path.touch(mode=0o600)
        self._db = sqlite3.connect(path, timeout=BUSY_DEADLINE_S, isolation_level=None, check_same_thread=False)
        enter_wal(self._db)
        # `keep` promises that its numbers are on disk when it returns.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_SCHEMA)
        self._known: dict[str, int] = {}
        self._version: tuple[int] | None = None

    def close(self) -> None:
        """Close the file; the book cannot be used afterwards."""
        self._db.close()

    def floors(self) -> Floors:
        """Return the highest number seen of each kind of collateral."""
        return {name: number for name, number in self._numbers().items() if name != _NOW}

    def keep(self, facts: Iterable[Fact]) -> None:
        """Raise the floors to the numbers of verified collateral. A lower number changes nothing."""
        # Most appraisals bring nothing new, and a transaction costs a disk write. Numbers read earlier suffice for the
        # comparison: numbers on disk never become lower.
        rising = [(name, number) for name, number in facts if number > self._known.get(name, -1)]
        if rising:
            with closing(self._db.cursor()) as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                cursor.executemany(_RAISE, rising)
                cursor.execute("COMMIT")
            # Own commits leave data_version unchanged, so make the next call read the rows.
            self._version = None

    def check_clock(self, now: int) -> None:
        """Record that an appraisal takes place at unix second ``now``.

        Guarantee: no evidence is appraised more than `CLOCK_TOLERANCE_S` before an earlier appraisal. So setting the
        clock back cannot make expired collateral valid again.

        Raises:
            EvidenceError: ``collateral_stale``.
        """
        last = self._numbers().get(_NOW)
        if last is not None and now < last - CLOCK_TOLERANCE_S:
            refuse(Refusal.COLLATERAL_STALE, f"the verifier's clock says {now}, and said {last} before")
        if last is None or now > last:
            self.keep([(_NOW, now)])

    def _numbers(self) -> dict[str, int]:
        # data_version changes when another connection has committed. Reading it is several times faster than the rows.
        version = self._db.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._known = dict(self._db.execute("SELECT name, number FROM facts").fetchall())
            self._version = version
        return self._known
