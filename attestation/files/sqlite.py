"""SQLite files that several processes write at once: opening them, and their transactions.

Nobody else commits while a transaction is open. A reader that knows when a transaction began, and when one was undone,
need not read again what it has read or written since.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final


class Transactions:
    """The transactions of ``db``. No other code may begin or undo any on it.

    Attributes:
        begun: number of transactions. A transaction's beginning is when other processes' commits become visible.
        undone: number of transactions, or parts of them, that were undone.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.begun = 0
        self.undone = 0

    @property
    def mark(self) -> tuple[int, int] | None:
        """A value that is unchanged only inside one transaction of which nothing was undone; None outside of one."""
        return (self.begun, self.undone) if self._db.in_transaction else None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the write lock. All of the block is durable when it ends, or none of it exists if it raises.

        Inside another transaction it is a part of it: undone alone if it raises, durable when the outermost ends.
        """
        is_part = self._db.in_transaction
        end = "RELEASE part" if is_part else "COMMIT"
        # IMMEDIATE takes the write lock now. Taken later, it could be refused after another process's commit.
        self._db.execute("SAVEPOINT part" if is_part else "BEGIN IMMEDIATE")
        self.begun += not is_part
        try:
            yield
            self._db.execute(end)
        except BaseException:
            # A failed COMMIT ends here too.
            self.undone += 1
            if self._db.in_transaction:
                self._db.execute("ROLLBACK TO part" if is_part else "ROLLBACK")
                if is_part:
                    # ROLLBACK TO keeps the savepoint open.
                    self._db.execute("RELEASE part")
            raise


BUSY_DEADLINE_S: Final = 30.0
"""Bounds the wait for another process's lock. A stopped process holds its lock until it is killed."""
# The file is needed alone for milliseconds only.
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
