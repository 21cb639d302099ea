"""PostgreSQL as the ledger's store: what every connection and transaction of ours asks of the server.

Nothing is left to the server's, the database's or the role's defaults: a stale snapshot could admit a charge over the
cap, an asynchronous commit could lose one, and a lock without a deadline could stop every run.
"""

import sqlalchemy as sa
from sqlalchemy.exc import NoSuchModuleError

from metrics.errors import BudgetError, ConfigError

_LOCK = 0x7261_7963_6C6F_616B
_CONNECTION = {
    "application_name": "raycloak",
    "connect_timeout": "10",
    # A server that is gone without a word is noticed, also while a statement is under way.
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
"""One statement, since each is a way to the server and back; OFFSET keeps the settings before the lock."""

_UNLOGGED = sa.text(
    "SELECT relname FROM unnest(CAST(:names AS text[])) AS name JOIN pg_class ON oid = to_regclass(name)"
    " WHERE relpersistence <> 'p' ORDER BY relname"
)


def postgres_engine(url: sa.URL) -> sa.Engine:
    """An engine whose writers read what the transaction before them committed, whatever the server's defaults.

    Raises:
        ConfigError: ``ledger_driver`` if psycopg is not installed.
    """
    url = url.set(drivername="postgresql+psycopg", query={**_CONNECTION, **url.query})
    try:
        # In a higher level the snapshot would be taken before the lock, and be stale once the lock is held.
        return sa.create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True)
    except (ModuleNotFoundError, NoSuchModuleError):
        raise ConfigError(
            "ledger_driver", "a PostgreSQL ledger needs psycopg.", "pip install 'raycloak[postgresql]'"
        ) from None


def begin_write(connection: sa.Connection, deadline_s: float) -> None:
    """Make the transaction durable and hold the ledger's one write lock until it ends.

    Guarantee: returns only if this transaction's commit is acknowledged after its WAL is on the server's disk (and on
    a synchronous standby's, where there is one), and no other writer of this database is inside its transaction.

    Args:
        deadline_s: how long to wait for the lock, and how long the server lets this transaction do nothing before it
            rolls it back, so that a process that is stopped while it holds the lock stops no other.

    Raises:
        BudgetError: ``ledger_not_durable``.
    """
    values = {"lock": _LOCK, "deadline": f"{int(deadline_s * 1000)}"}
    settings = connection.execute(_BEGIN_WRITE, values).one()
    refuse_settings(settings.synchronous_commit, settings.fsync, settings.full_page_writes)


def refuse_settings(synchronous_commit: str, fsync: str, full_page_writes: str) -> None:
    """Refuse a server that can lose what it acknowledged: BudgetError ``ledger_not_durable``."""
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


def refuse_unlogged(connection: sa.Connection, names: list[str]) -> None:
    """Refuse tables that a crash of the server would empty: BudgetError ``ledger_not_durable``."""
    unlogged = connection.execute(_UNLOGGED, {"names": names}).scalars().all()
    if unlogged:
        raise BudgetError(
            "ledger_not_durable",
            f"{', '.join(unlogged)} cannot outlive a crash of the server: not a logged table.",
            "ALTER TABLE ... SET LOGGED, then check the chain: raycloak budget history",
        )
