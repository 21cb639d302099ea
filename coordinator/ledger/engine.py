"""Database engines of the ledger: SQLite with WAL, full sync and immediate transactions, or PostgreSQL.

The parts for a server are in `raycloak.coordinator.ledger.postgres`.
"""

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Protocol
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError, ProgrammingError
from sqlalchemy.sql.compiler import SQLCompiler

from raycloak.attestation.files.sqlite import enter_wal
from raycloak.coordinator.ledger.location import prepare_file, usable_url
from raycloak.coordinator.ledger.postgres import begin_write, check_logged, postgres_engine
from raycloak.metrics.errors import BudgetError

# A stopped writer holds its lock until it is killed, so the wait for it has to end.
LOCK_DEADLINE_S = 30.0
_BUSY_MS = 30_000  # for other reasons why the file may be busy: recovery, and the last connection's checkpoint
_RETRY_S = 0.001  # processes that race for the lock wait half as long as with SQLite's own pauses
_FULL = 2  # SQLite's number for full synchronisation
_NO_RIGHT = "42501"  # PostgreSQL's insufficient_privilege
_OTHER_TABLES = ("42703", "42P01")
"""PostgreSQL's codes for a missing column and a missing table."""


def open_engine(url: str, create: bool) -> sa.Engine:
    """Make an engine for a ledger's URL, with the settings that durability and locking need.

    Raises:
        ConfigError, BudgetError: as `raycloak.coordinator.ledger.store.LedgerStore`.
    """
    parsed = usable_url(url)
    return _sqlite_engine(parsed, create) if parsed.get_backend_name() == "sqlite" else postgres_engine(parsed)


def _sqlite_engine(url: sa.URL, create: bool) -> sa.Engine:
    assert url.database, "a usable URL names the file"
    prepare_file(Path(url.database), create)
    if not create:
        # Neither the file nor its log may be written to, not even to clean up after a killed writer.
        url = url.set(database=f"file:{quote(url.database)}", query={"mode": "ro", "uri": "true"})
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_MS / 1000})
    sa.event.listen(engine, "connect", lambda connection, _: _configure(connection, create))
    sa.event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: Any, writes: bool) -> None:
    """Prepare a new connection. A connection that only reads changes no database's mode.

    Guarantee: every connection is in WAL mode with full synchronisation, and starts transactions only as told. The
    database of another program is left as it is.
    """
    # Left alone, Python's driver would begin transactions by itself.
    connection.isolation_level = None
    cursor = connection.cursor()
    tables = {name for (name,) in cursor.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    # The database of another program keeps its journal mode.
    if writes and (not tables or "entries" in tables):
        mode = enter_wal(connection)
        if mode != "wal":
            raise BudgetError(
                "ledger_unavailable",
                f"the ledger's file system allows only journal mode '{mode}'.",
                "Keep the ledger on a local disk.",
            )
    cursor.execute("PRAGMA synchronous = FULL")
    # Read back, because only then is it known that the setting took effect.
    if cursor.execute("PRAGMA synchronous").fetchone()[0] < _FULL:
        raise BudgetError(
            "ledger_not_durable",
            "this build of SQLite cannot synchronise fully.",
            "Use a Python with the usual SQLite.",
        )
    # Off in SQLite, unless each connection asks for it.
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    if "raycloak_reads" in connection.get_execution_options():
        connection.exec_driver_sql("BEGIN")
    else:
        _begin_immediate(connection.connection.driver_connection)


def _begin_immediate(connection: Any) -> None:
    """Take the write lock, asking more often than SQLite does. SQLite's pauses leave a free lock idle up to 0.1 s."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        while not _begun(connection):
            if time.monotonic() > deadline:
                raise _unavailable(f"another writer has held the lock for {LOCK_DEADLINE_S:g} s")
            time.sleep(_RETRY_S)
    finally:
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")


def _begun(connection: Any) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


def reading(engine: sa.Engine) -> sa.Engine:
    """Return the engine for transactions that only read: each sees one state, and none takes the write lock."""
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return engine.execution_options(raycloak_reads=True)


class WriteTransactions:
    """The transactions of one engine that write.

    An embedded ledger keeps one connection for them, and threads take turns: to take one from the pool and give it
    back costs more than a charge's statements. A server may close an idle connection, which only the pool notices.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._turn = Lock()
        self._kept: sa.Connection | None = None

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Begin a transaction, which is committed when the block ends and undone if it raises."""
        if self._engine.dialect.name != "sqlite":
            with self._engine.begin() as connection:
                yield connection
            return
        if not self._turn.acquire(timeout=LOCK_DEADLINE_S):
            raise _unavailable(f"another thread has written for {LOCK_DEADLINE_S:g} s")
        try:
            if self._kept is None:
                self._kept = self._engine.connect()
            with self._kept.begin():
                yield self._kept
        except BaseException:
            # After a failure of the storage its state is unknown; the pool puts it right or drops it.
            self._give_back()
            raise
        finally:
            self._turn.release()

    def close(self) -> None:
        """Give the connection back, once no thread writes."""
        with self._turn:
            self._give_back()

    def _give_back(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()


def execute(connection: sa.Connection, statement: "_Statement", values: Mapping[str, Any] | None = None) -> "_Rows":
    """Execute one of the module's constant statements, which are compiled once.

    For SQLite the driver is asked directly. SQLAlchemy's work around a statement takes ten times as long as the
    statement itself, and a charge makes eight of them while every worker waits. With a server, the network dominates.
    """
    if connection.dialect.name != "sqlite":
        return connection.execute(statement, values)
    text, names, constants = _compiled(statement)
    given = {**constants, **(values or {})}
    driver: sqlite3.Connection = connection.connection.driver_connection  # type: ignore[assignment]
    return driver.execute(text, [given[name] for name in names])


_Statement = sa.Select[Any] | sa.Insert | sa.Update


class _Rows(Protocol):
    """The rows that a statement found, each a sequence of its columns."""

    def fetchone(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


@cache
def _compiled(statement: "_Statement") -> tuple[str, tuple[str, ...], Mapping[str, Any]]:
    """Compile a statement for SQLite: its text, its parameters' names in order, and its constant values."""
    compiled = statement.compile(dialect=sqlite_dialect())
    assert isinstance(compiled, SQLCompiler), "constant statements are no schema"
    return str(compiled), tuple(compiled.positiontup or ()), dict(compiled.params)


def take_write_lock(connection: sa.Connection) -> None:
    """Hold the store's one write lock until the transaction ends. In SQLite, BEGIN IMMEDIATE has already taken it.

    Raises:
        BudgetError: ``ledger_not_durable`` if the server may lose what it acknowledges.
    """
    if connection.dialect.name == "postgresql":
        begin_write(connection, LOCK_DEADLINE_S)


def check_tables_last(connection: sa.Connection, names: list[str]) -> None:
    """Refuse tables that a crash would empty, which only PostgreSQL has; BudgetError ``ledger_not_durable``."""
    if connection.dialect.name == "postgresql":
        check_logged(connection, names)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn failures of the storage into BudgetError ``ledger_unavailable`` or ``ledger_foreign``."""
    try:
        yield
    except sa.exc.TimeoutError:
        raise _unavailable("every connection of this process is in use") from None
    except sqlite3.Error as error:
        raise _unavailable(str(error)) from None
    except DBAPIError as error:
        fact = " ".join(str(error.orig).split()).rstrip(".")
        state = getattr(error.orig, "sqlstate", None)
        if "not a database" in fact:
            raise BudgetError(
                "ledger_foreign", "the file is not a ledger.", "Give a path where there is no file yet."
            ) from None
        # A lost connection, a full disk, a lock that was not granted, a standby; or a role without a right.
        if isinstance(error, OperationalError | InterfaceError | InternalError) or state == _NO_RIGHT:
            raise _unavailable(fact) from None
        if isinstance(error, ProgrammingError) and state in _OTHER_TABLES:
            raise BudgetError(
                "ledger_foreign", f"the database's tables are not a ledger's: {fact}.", "Give an empty database."
            ) from None
        raise


def _unavailable(fact: str) -> BudgetError:
    return BudgetError(
        "ledger_unavailable",
        f"the ledger's storage failed: {fact}.",
        "Check that the storage is up and not full, then continue; a charge that was made is found again.",
    )
