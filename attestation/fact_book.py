"""What a verifier must not forget: the highest number of every kind of collateral it has seen, and the time.

The book lives in a SQLite database that its owner opens, next to the nonces (`attestation.nonce_book`).
"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from typing import Final

from attestation.evidence import Refusal, refuse
from attestation.floors import Fact, Floors

_SCHEMA = "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID"
_NOW: Final = "time of the last appraisal"

CLOCK_TOLERANCE_S: Final = 120
"""Seconds by which a clock may be set back, as time services do, before evidence is refused."""


class FactBook:
    """Numbers that only rise.

    Args:
        connection: open database. What is written inside a transaction of the owner's is durable when that commits;
            outside of one, at once.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute(_SCHEMA)

    def floors(self) -> Floors:
        """The highest number seen of each kind of collateral."""
        with closing(self._connection.execute("SELECT name, number FROM facts WHERE name <> ?", (_NOW,))) as cursor:
            return dict(cursor.fetchall())

    def keep(self, facts: Iterable[Fact]) -> None:
        """Raise the floors to the numbers of collateral that verified; a lower number changes nothing."""
        nested = self._connection.in_transaction
        self._connection.executemany(
            "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET number = max(number, excluded.number)",
            list(facts),
        )
        if not nested:
            self._connection.commit()

    def check_clock(self, now: int) -> None:
        """Note that an appraisal takes place at unix second ``now``.

        Guarantee: no evidence is appraised at a time that lies more than `CLOCK_TOLERANCE_S` before an earlier
        appraisal, so collateral that has expired cannot become valid again by setting the clock back.

        Raises:
            EvidenceError: ``collateral_stale``.
        """
        last = self._number(_NOW)
        if last is not None and now < last - CLOCK_TOLERANCE_S:
            refuse(Refusal.COLLATERAL_STALE, f"the verifier's clock says {now}, and said {last} before")
        if last is None or now > last:
            self.keep([(_NOW, now)])

    def _number(self, name: str) -> int | None:
        with closing(self._connection.execute("SELECT number FROM facts WHERE name = ?", (name,))) as cursor:
            row = cursor.fetchone()
        return int(row[0]) if row else None
