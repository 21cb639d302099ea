"""SQLite files that several processes open and write at once: what all of ours wait for in the same way."""

import sqlite3
import time
from typing import Final

BUSY_DEADLINE_S: Final = 30.0
"""How long to wait for another process's lock: one that was stopped holds it until it is killed."""
_RETRY_S: Final = 0.005


def enter_wal(db: sqlite3.Connection) -> str:
    """Have a database write ahead to a log; returns the journal mode that its file system allowed.

    The first switch of a new file, or of one that another process has just closed, needs the file alone, and SQLite
    does not wait for that by itself.

    Raises:
        sqlite3.OperationalError: if the file stays locked, or for what waiting does not mend.
    """
    deadline = time.monotonic() + BUSY_DEADLINE_S
    while True:
        try:
            return str(db.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)
