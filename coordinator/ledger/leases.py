"""Leases say which instance may charge a run, so that at most one of two live ones is believed.

An instance that is opened to write takes a fencing number above all earlier ones, and a row that identifies it. A run
belongs to the instance with the highest number that registered or charged it. The row of the run names that number. It
is read and written inside the transaction that charges. So the database's lock decides ownership, never a clock. A
lease therefore does not expire: it ends when a newer instance takes the run.
"""

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from raycloak.coordinator.ledger.engine import execute


@dataclass(frozen=True, slots=True)
class Lease:
    """One instance of a ledger that was opened to write. Only its number decides anything; the rest is for people.

    Attributes:
        fencing: higher than that of every instance opened before.
        holder: host and process id.
        opened_at, renewed_at: when it was opened, and when it last took or charged a run; Unix seconds by its clock.
    """

    fencing: int
    holder: str
    opened_at: int
    renewed_at: int


class Leases:
    """The table of leases. Its methods run inside the caller's transaction."""

    def __init__(self, tables: sa.MetaData, integer: sa.types.TypeEngine[int]) -> None:
        self._table = table = sa.Table(
            "leases",
            tables,
            sa.Column("fencing", integer, primary_key=True, autoincrement=False),
            sa.Column("holder", sa.Text, nullable=False),
            sa.Column("opened_at", integer, nullable=False),
            sa.Column("renewed_at", integer, nullable=False),
        )
        self._renew = (
            sa.update(table).where(table.c.fencing == sa.bindparam("number")).values(renewed_at=sa.bindparam("at"))
        )

    def open(self, connection: sa.Connection, fencing: int) -> None:
        """Record that this process opened an instance."""
        at, holder = int(time.time()), f"{socket.gethostname()}/{os.getpid()}"
        values = {"fencing": fencing, "holder": holder, "opened_at": at, "renewed_at": at}
        connection.execute(sa.insert(self._table), values)

    def renew(self, connection: sa.Connection, fencing: int) -> None:
        """Record that an instance took or charged a run."""
        execute(connection, self._renew, {"number": fencing, "at": int(time.time())})

    def of(self, connection: sa.Connection, numbers: Iterable[int]) -> dict[int, Lease]:
        """Return the leases with these fencing numbers."""
        found = connection.execute(sa.select(self._table).where(self._table.c.fencing.in_(sorted(set(numbers)))))
        return {row.fencing: Lease(*row) for row in found}
