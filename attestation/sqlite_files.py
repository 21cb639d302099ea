"""Opens SQLite files that several processes write at once, and waits for their locks in one way."""

import sqlite3
import time
from typing import Final

BUSY_DEADLINE_S: Final = 30.0
"""Bounds the wait for another process's lock. A stopped process holds its lock until it is killed."""
_RETRY_S: Final = 0.005


def enter_wal(db: sqlite3.Connection) -> str:
    """Switch a database to write-ahead logging; return the journal mode that its file system allowed.

    The first switch of a file, new or just closed by another process, needs the file alone. SQLite does not wait for
    that by itself.

    Raises:
        sqlite3.OperationalError: if the file stays locked, or for an error that waiting does not cure.
    """
    deadline = time.monotonic() + BUSY_DEADLINE_S
    while True:
        try:
            return str(db.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            # Only a lock is worth waiting for. The low byte is the same for all kinds of BUSY.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)
