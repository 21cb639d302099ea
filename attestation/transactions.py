"""Transactions of one SQLite connection, and how long what was read over it holds.

Nobody else commits while a transaction is open, and a reader that knows when one began, and when something was undone,
need not read again what it read or wrote since.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager


class Transactions:
    """The transactions of ``db``, which has nobody else that begins or undoes any.

    Attributes:
        begun: how many there were; what other processes have committed shows from a transaction's beginning on.
        undone: how often a transaction, or a part of one, was undone.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.begun = 0
        self.undone = 0

    @property
    def mark(self) -> tuple[int, int] | None:
        """The same as before only inside one transaction of which nothing was undone since; None outside of one."""
        return (self.begun, self.undone) if self._db.in_transaction else None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the write lock; all of the block is durable when it ends, or none of it exists if it raises.

        Inside another one it is a part of it: undone alone if it raises, durable when the outermost ends.
        """
        is_part = self._db.in_transaction
        end = "RELEASE part" if is_part else "COMMIT"
        self._db.execute("SAVEPOINT part" if is_part else "BEGIN IMMEDIATE")
        self.begun += not is_part
        try:
            yield
            self._db.execute(end)
        except BaseException:
            self.undone += 1
            if self._db.in_transaction:
                self._db.execute("ROLLBACK TO part" if is_part else "ROLLBACK")
                if is_part:
                    self._db.execute("RELEASE part")
            raise
