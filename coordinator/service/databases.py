"""The databases of the training service: SQLite with WAL and full sync, or PostgreSQL. One owner at a time.

Statements are the same for both: ``?`` for values, and names of types that each database fills in.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from raycloak.attestation.files.sqlite import BUSY_DEADLINE_S, enter_wal
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.metrics.file_errors import file_error

OWNER_DEADLINE_S: Final = 10.0
"""The longest wait for the lock of an owner that was killed: a server notices its end a little later."""
_OWNER_RETRY_S: Final = 0.1
_FULL: Final = 2  # SQLite's number for full synchronisation
_URL_REMEDY: Final = "Use sqlite:////absolute/path/service.sqlite or postgresql://user@host/database."
# A second service on one schema would start each client's driver again. The key has the schema in it, because several
# services may share a database.
_OWN: Final = "SELECT pg_try_advisory_lock(hashtextextended('raycloak training service ' || current_schema(), 0))"
_SETTINGS: Final = (
    "SELECT current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit')"
)


def open_database(url: str) -> "Database":
    """Open the database at ``url`` and become its owner.

    Guarantee: two services never own one database, and an ownership ends with its process.

    Args:
        url: ``sqlite:////absolute/file`` or ``postgresql://...``.

    Raises:
        ConfigError: ``store_url``, ``store_driver``, ``store_taken``, ``store_exposed`` or ``store_not_durable``.
    """
    scheme = url.partition("://")[0]
    if scheme == "sqlite":
        path = Path(urlsplit(url).path.removeprefix("/"))
        if not path.is_absolute():
            raise ConfigError("store_url", "the store's URL names no absolute path.", _URL_REMEDY)
        return _Sqlite(path)
    if scheme in ("postgresql", "postgres"):
        return _Postgres(url)
    raise ConfigError("store_url", "the store's URL names no database that is supported.", _URL_REMEDY)


class OwnedFolder:
    """A folder that one process owns, by the lock of a file in it. The lock ends with the process."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise file_error("store_url", "create the service's folder", folder, error) from None
        if not _becomes(self._lock):
            os.close(self._descriptor)
            raise _taken(f"{folder}")

    def _lock(self) -> bool:
        with suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def close(self) -> None:
        """Give the ownership up."""
        os.close(self._descriptor)


class _Sqlite:
    begin = "BEGIN IMMEDIATE"
    tables = "SELECT name FROM sqlite_master WHERE type = 'table'"
    types: Mapping[str, str] = {"BLOB": "BLOB", "REAL": "REAL", "INTEGER": "INTEGER"}

    def __init__(self, path: Path) -> None:
        self._owned = OwnedFolder(path.parent)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            if path.stat().st_mode & 0o077:
                raise ConfigError("store_exposed", f"{path} can be read by others.", f"If nobody has: chmod 600 {path}")
            # Used by one thread at a time, and not always by the one that opened it.
            self._connection = sqlite3.connect(
                path, timeout=BUSY_DEADLINE_S, isolation_level=None, check_same_thread=False
            )
            mode = enter_wal(self._connection)
            self._connection.execute("PRAGMA synchronous = FULL")
            # Read back, because only then is it known that the setting took effect.
            if mode != "wal" or self._connection.execute("PRAGMA synchronous").fetchone()[0] < _FULL:
                raise ConfigError("store_not_durable", f"{path} cannot be synchronised fully.", "Use a local disk.")
        except BaseException as error:
            self._owned.close()
            if not isinstance(error, OSError | sqlite3.Error):
                raise
            raise ConfigError("store_url", f"{path} cannot be opened: {error}.", _URL_REMEDY) from None

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise _failed(error) from error

    def close(self) -> None:
        self._connection.close()
        self._owned.close()


class _Postgres:
    begin = "BEGIN"
    tables = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    types: Mapping[str, str] = {"BLOB": "BYTEA", "REAL": "DOUBLE PRECISION", "INTEGER": "BIGINT"}

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise ConfigError(
                "store_driver", "a store in PostgreSQL needs psycopg.", "pip install 'raycloak[postgresql]'"
            ) from None
        self._error = psycopg.Error
        try:
            # Transactions begin and end as told. Statements are prepared by the server when they come again.
            self._connection: Any = psycopg.connect(
                url, autocommit=True, application_name="raycloak training service", connect_timeout=10
            )
        except psycopg.Error as error:
            # The driver's text may repeat the URL, and so a password.
            raise ConfigError(
                "store_url", f"the store's server cannot be reached ({type(error).__name__}).", "Check the URL."
            ) from None
        try:
            self.run("SET synchronous_commit = on")
            if any(value != "on" for value in self.run(_SETTINGS)[0]):
                why = "the PostgreSQL server runs without fsync, full_page_writes or synchronous_commit."
                raise ConfigError("store_not_durable", why, "Turn them on, or keep the store on another server.")
            if not _becomes(lambda: self.run(_OWN)[0][0]):
                raise _taken("the database")
        except BaseException:
            self._connection.close()
            raise

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            plain = [int(each) if isinstance(each, bool) else each for each in values]
            cursor = self._connection.execute(statement.replace("?", "%s"), plain)
            return cursor.fetchall() if cursor.description else []
        except self._error as error:
            raise _failed(error) from error

    def close(self) -> None:
        self._connection.close()


Database: TypeAlias = "_Sqlite | _Postgres"
"""A connection to a database that this process owns.

Its ``begin`` opens a transaction, and its ``tables`` finds the names of all tables. ``types`` has its name of a type of
SQLite. ``run`` runs a statement and returns the rows that it found; RunFailedError ``store_failed`` if the storage
fails.
"""


def _becomes(take: Any) -> bool:
    """Return whether ``take`` becomes true before the deadline."""
    deadline = time.monotonic() + OWNER_DEADLINE_S
    while not take():
        if time.monotonic() > deadline:
            return False
        time.sleep(_OWNER_RETRY_S)
    return True


def _taken(what: str) -> ConfigError:
    return ConfigError("store_taken", f"another service owns {what}.", "Stop it first, or give this one its own store.")


def _failed(error: Exception) -> RunFailedError:
    return RunFailedError(
        "store_failed", f"the service's store failed ({type(error).__name__}).", "Check the storage, and start again."
    )
