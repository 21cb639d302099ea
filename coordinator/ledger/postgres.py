"""PostgreSQL as the ledger's store: the settings of each of our connections and transactions.

Nothing is left to the defaults of server, database or role. A stale snapshot could admit a charge over the cap. An
asynchronous commit could lose a charge. A lock without a deadline could stop every run.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import NoSuchModuleError

from raycloak.metrics.errors import BudgetError, ConfigError

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


def postgres_engine(url: sa.URL) -> sa.Engine:
    """Make an engine whose writers read what the previous transaction committed, whatever the server's defaults.

    Raises:
        ConfigError: ``ledger_driver`` if psycopg is not installed.
    """
    url = url.set(drivername="postgresql+psycopg", query={**_CONNECTION, **url.query})
    try:
        # A higher level would take the snapshot before the lock. It would be stale once the lock is held.
        # A pooled connection that the server has closed meanwhile is replaced before it is used.
        return sa.create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True)
    except (ModuleNotFoundError, NoSuchModuleError):
        raise ConfigError(
            "ledger_driver", "a PostgreSQL ledger needs psycopg.", "pip install 'raycloak[postgresql]'"
        ) from None


def begin_write(connection: sa.Connection, deadline_s: float) -> None:
    """Make the transaction durable and hold the ledger's one write lock until it ends.

    Guarantee: when this transaction's commit is acknowledged, its WAL is on the server's disk, and on a synchronous
    standby's if there is one. No other writer of this database is inside its transaction.

    Args:
        deadline_s: how long to wait for the lock. The server also rolls this transaction back after so long without a
            statement. So a process that is stopped while it holds the lock stops no other.

    Raises:
        BudgetError: ``ledger_not_durable``.
    """
    values = {"lock": _LOCK, "deadline": f"{int(deadline_s * 1000)}"}
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
    """Refuse tables that a crash of the server would empty; BudgetError ``ledger_not_durable``."""
    unlogged = connection.execute(_UNLOGGED, {"names": names}).scalars().all()
    if unlogged:
        raise BudgetError(
            "ledger_not_durable",
            f"{', '.join(unlogged)} cannot outlive a crash of the server: not a logged table.",
            "ALTER TABLE ... SET LOGGED, then check the chain: raycloak budget history",
        )
