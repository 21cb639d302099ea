"""Database engines of the ledger: SQLite with WAL, full sync and immediate transactions, or PostgreSQL.

Nothing is left to the defaults of a server, its database or a role. A stale snapshot could admit a charge over the cap.
An asynchronous commit could lose a charge. A lock without a deadline could stop every run.
"""

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import exc

from raycloak.attestation.files.sqlite import enter_wal
from raycloak.coordinator.ledger.location import prepare_file, usable_url
from raycloak.metrics.errors import BudgetError, ConfigError

# A stopped writer holds its lock until it is killed, so the wait for it has to end.
LOCK_DEADLINE_S = 30.0
_BUSY_MS = 30_000  # for other reasons why the file may be busy: recovery, and the last connection's checkpoint
_RETRY_S = 0.001  # processes that race for the lock wait half as long as with SQLite's own pauses

_LOCK = 0x7261_7963_6C6F_616B  # "raycloak" in ASCII
_CONNECTION = {
    "application_name": "raycloak",
    "connect_timeout": "10",
    # Notice a server that vanished without a word, also during a statement.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
_BEGIN_WRITE = sa.text(
    """
    SELECT settings.*, pg_advisory_xact_lock(:lock) FROM (
        SELECT set_config('synchronous_commit',
                          CASE current_setting('synchronous_commit')
                              WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END,
                          true) AS synchronous_commit,
               current_setting('fsync') AS fsync,
               current_setting('full_page_writes') AS full_page_writes,
               set_config('lock_timeout', :deadline, true),
               set_config('idle_in_transaction_session_timeout', :deadline, true)
        OFFSET 0
    ) AS settings
    """
)
"""One statement, because each costs a round trip to the server. OFFSET keeps the settings before the lock."""

_UNLOGGED = sa.text(
    "SELECT relname FROM unnest(CAST(:names AS text[])) AS name JOIN pg_class ON oid = to_regclass(name)"
    " WHERE relpersistence <> 'p' ORDER BY relname"
)


def open_engine(url: str, create: bool) -> sa.Engine:
    """Make an engine for a ledger's URL, with the settings that durability and locking need.

    Raises:
        ConfigError, BudgetError: as `raycloak.coordinator.ledger.store.LedgerStore`.
    """
    parsed = usable_url(url)
    if parsed.get_backend_name() == "postgresql":
        return _postgres_engine(parsed)
    assert parsed.database, "a usable URL names the file"
    prepare_file(Path(parsed.database), create)
    if not create:
        # Neither the file nor its log may be written to, not even to clean up after a killed writer.
        parsed = parsed.set(database=f"file:{quote(parsed.database)}", query={"mode": "ro", "uri": "true"})
    engine = sa.create_engine(parsed, connect_args={"timeout": _BUSY_MS / 1000})
    sa.event.listen(engine, "connect", lambda connection, _: _configure(connection, create))
    sa.event.listen(engine, "begin", _begin)
    return engine


def _postgres_engine(url: sa.URL) -> sa.Engine:
    """Make an engine whose writers read what the previous transaction committed, whatever the server's defaults."""
    url = url.set(drivername="postgresql+psycopg", query={**_CONNECTION, **url.query})
    try:
        # A higher level would take the snapshot before the lock. It would be stale once the lock is held.
        # A pooled connection that the server has closed meanwhile is replaced before it is used.
        return sa.create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True)
    except (ModuleNotFoundError, exc.NoSuchModuleError):
        raise ConfigError(
            "ledger_driver", "a PostgreSQL ledger needs psycopg.", "pip install 'raycloak[postgresql]'"
        ) from None


def _configure(connection: Any, writes: bool) -> None:
    """Prepare a new connection. A connection that only reads changes no database's mode.

    Guarantee: every connection is in WAL mode with full synchronisation, and starts transactions only as told. The
    database of another program is left as it is.
    """
    # Left alone, Python's driver would begin transactions by itself.
    connection.isolation_level = None
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    # The database of another program keeps its journal mode.
    if writes and (not tables or "entries" in tables):
        mode = enter_wal(connection)
        if mode != "wal":
            raise BudgetError(
                "ledger_unavailable",
                f"the ledger's file system allows only journal mode '{mode}'.",
                "Keep the ledger on a local disk.",
            )
    connection.execute("PRAGMA synchronous = FULL")
    # Read back, because only then is it known that the setting took effect.
    if connection.execute("PRAGMA synchronous").fetchone()[0] < 2:  # full synchronisation
        raise BudgetError(
            "ledger_not_durable",
            "this build of SQLite cannot synchronise fully.",
            "Use a Python with the usual SQLite.",
        )
    # Off in SQLite, unless each connection asks for it.
    connection.execute("PRAGMA foreign_keys = ON")
    # A key that was replaced must not stay in the free space of its page.
    connection.execute("PRAGMA secure_delete = ON")


def _begin(connection: sa.Connection) -> None:
    """Begin a transaction of SQLite; one that writes takes the lock, for which it asks more often than SQLite does.

    SQLite's pauses leave a free lock idle up to 0.1 s.
    """
    if "raycloak_reads" in connection.get_execution_options():
        connection.exec_driver_sql("BEGIN")
        return
    driver: Any = connection.connection.driver_connection
    deadline = time.monotonic() + LOCK_DEADLINE_S
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                driver.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
            if time.monotonic() > deadline:
                raise _unavailable(f"another writer has held the lock for {LOCK_DEADLINE_S:g} s")
            time.sleep(_RETRY_S)
    finally:
        driver.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")


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


def execute(
    connection: sa.Connection, statement: str, values: Mapping[str, Any] = MappingProxyType({})
) -> sqlite3.Cursor | sa.CursorResult[*tuple[Any, ...]]:
    """Execute SQL that both databases know, with named parameters such as ``:run``; return the rows that it finds.

    For SQLite the driver is asked directly. SQLAlchemy's work around a statement takes ten times as long as the
    statement itself, and a charge makes eight of them while every worker waits. With a server, the network dominates.
    """
    if connection.dialect.name != "sqlite":
        return connection.execute(sa.text(statement), values)
    driver: sqlite3.Connection = connection.connection.driver_connection  # type: ignore[assignment]
    return driver.execute(statement, values)


def take_write_lock(connection: sa.Connection) -> None:
    """Hold the store's one write lock until the transaction ends. In SQLite, BEGIN IMMEDIATE has already taken it.

    Guarantee: when this transaction's commit is acknowledged, its WAL is on the server's disk, and on a synchronous
    standby's if there is one. No other writer of this database is inside its transaction. The server rolls it back
    after so long without a statement as it waits for the lock. So a process that is stopped while it holds the lock
    stops no other.

    Raises:
        BudgetError: ``ledger_not_durable`` if the server may lose what it acknowledges.
    """
    if connection.dialect.name == "postgresql":
        values = {"lock": _LOCK, "deadline": f"{int(LOCK_DEADLINE_S * 1000)}"}
        settings = connection.execute(_BEGIN_WRITE, values).one()
        check_settings(settings.synchronous_commit, settings.fsync, settings.full_page_writes)


def server_of(connection: sa.Connection) -> str:
    """Return the address of the server behind a connection, or the folder of its socket."""
    info: Any = connection.connection.driver_connection.info  # type: ignore[union-attr]  # it is open
    # Of several hosts in a URL, the address is of the one that answered. A socket has none.
    return str(info.hostaddr or info.host)


def check_settings(synchronous_commit: str, fsync: str, full_page_writes: str) -> None:
    """Refuse a server that can lose what it acknowledged; BudgetError ``ledger_not_durable``."""
    wrong = {"fsync": fsync, "full_page_writes": full_page_writes}
    lost = [f"{name} = {value}" for name, value in wrong.items() if value != "on"]
    if synchronous_commit not in ("on", "remote_apply"):
        lost.append(f"synchronous_commit = {synchronous_commit}")
    if lost:
        raise BudgetError(
            "ledger_not_durable",
            f"the PostgreSQL server runs with {', '.join(lost)} and can lose a charge that it acknowledged.",
            "Turn them on, or keep the ledger on another server.",
        )


def check_logged(connection: sa.Connection, names: list[str]) -> None:
    """Refuse tables that a crash would empty, which only PostgreSQL has; BudgetError ``ledger_not_durable``."""
    if connection.dialect.name != "postgresql":
        return
    unlogged = connection.execute(_UNLOGGED, {"names": names}).scalars().all()
    if unlogged:
        raise BudgetError(
            "ledger_not_durable",
            f"{', '.join(unlogged)} cannot outlive a crash of the server: not a logged table.",
            "ALTER TABLE ... SET LOGGED, then check the chain: raycloak budget history",
        )


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn failures of the storage into BudgetError ``ledger_unavailable`` or ``ledger_foreign``."""
    try:
        yield
    except exc.TimeoutError:
        raise _unavailable("every connection of this process is in use") from None
    except sqlite3.Error as error:
        raise _unavailable(str(error)) from None
    except exc.DBAPIError as error:
        fact = " ".join(str(error.orig).split()).rstrip(".")
        state = getattr(error.orig, "sqlstate", None)
        if "not a database" in fact:
            raise BudgetError(
                "ledger_foreign", "the file is not a ledger.", "Give a path where there is no file yet."
            ) from None
        # A lost connection, a full disk, a lock that was not granted, a standby; or a role without a right.
        if isinstance(error, exc.OperationalError | exc.InterfaceError | exc.InternalError) or state == "42501":
            raise _unavailable(fact) from None
        # PostgreSQL's codes for a missing column and a missing table.
        if isinstance(error, exc.ProgrammingError) and state in ("42703", "42P01"):
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
