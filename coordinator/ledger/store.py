"""The ledger's storage, and nothing else: SQLAlchemy Core on SQLite (embedded) or PostgreSQL.

The chain of entries is the record. The other tables are its totals, kept so that a charge need not read the chain.
Every writer takes the store's one write lock before it reads, so check and charge are one atomic act.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.ledger.engine import (
    WriteTransactions,
    check_tables_last,
    execute,
    open_engine,
    reading,
    storage_errors,
    take_write_lock,
)
from raycloak.coordinator.ledger.entries import Head, LedgerEntry, StepCharged
from raycloak.coordinator.ledger.leases import Lease, Leases
from raycloak.coordinator.ledger.location import ledger_missing
from raycloak.coordinator.ledger.places import StoragePlace
from raycloak.coordinator.ledger.postgres import server_of
from raycloak.metrics.errors import BudgetError

_FAMILY = "raycloak ledger v"
APPLICATION = f"{_FAMILY}6"

_tables = sa.MetaData()
_integer = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_meta = sa.Table("meta", _tables, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text))
_accounts = sa.Table(
    "accounts",
    _tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("sequence", _integer, nullable=False),
    sa.Column("changed", _integer, nullable=False),
)
_runs = sa.Table(
    "runs",
    _tables,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("account", sa.Text, sa.ForeignKey("accounts.name"), nullable=False, index=True),
    sa.Column("sequence", _integer, nullable=False),
    sa.Column("fencing", _integer, nullable=False),
    # The entry that bound the run to its data; none before.
    sa.Column("data", _integer),
)
# The entries that made an account known by data that it was not known by before.
_known = sa.Table(
    "known",
    _tables,
    sa.Column("sequence", _integer, primary_key=True, autoincrement=False),
    sa.Column("account", sa.Text, sa.ForeignKey("accounts.name"), nullable=False),
)
_charged = sa.Table(
    "charged",
    _tables,
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("query", sa.Text, primary_key=True),
    sa.Column("charges", _integer, nullable=False),
)
_leases = Leases(_tables, _integer)
_entries = sa.Table(
    "entries",
    _tables,
    sa.Column("sequence", _integer, primary_key=True, autoincrement=False),
    sa.Column("previous", sa.LargeBinary, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
    # Set for charges and bound vectors only. The unique constraint makes the database itself refuse to hold one step
    # twice.
    sa.Column("run_id", sa.Text),
    sa.Column("query", sa.Text),
    sa.Column("step", _integer),
    sa.UniqueConstraint("run_id", "query", "step", "kind"),
)
_ENTRY = (
    _entries.c.sequence,
    _entries.c.previous,
    _entries.c.kind,
    _entries.c.body,
    _entries.c.hash,
    _entries.c.signature,
)

_SELECT_HEAD = sa.select(_entries.c.sequence, _entries.c.hash).order_by(_entries.c.sequence.desc()).limit(1)
_SELECT_RUNS = sa.select(_runs, _charged.c.query, _charged.c.charges).outerjoin(_charged).order_by(_runs.c.sequence)
_SELECT_RUN = (
    sa.select(_runs, _charged.c.query, _charged.c.charges, _accounts.c.sequence, _accounts.c.changed)
    .select_from(_runs.join(_accounts).outerjoin(_charged))
    .where(_runs.c.run_id == sa.bindparam("run"))
)
_SELECT_ACCOUNT_RUNS = _SELECT_RUNS.where(_runs.c.account == sa.bindparam("name"))
_SELECT_ACCOUNTS = sa.select(_accounts).order_by(_accounts.c.sequence)
_SELECT_ACCOUNT = sa.select(_accounts).where(_accounts.c.name == sa.bindparam("key"))
_SELECT_FILED = sa.select(*_ENTRY).where(
    _entries.c.run_id == sa.bindparam("run"),
    _entries.c.query == sa.bindparam("query_name"),
    _entries.c.step == sa.bindparam("number"),
)
_SELECT_ENTRY = sa.select(*_ENTRY).where(_entries.c.sequence == sa.bindparam("number"))
_SELECT_ENTRIES = sa.select(*_ENTRY).order_by(_entries.c.sequence)
_SELECT_KNOWN = sa.select(_known.c.sequence, _known.c.account).order_by(_known.c.sequence)
_SELECT_KEYED = sa.select(_entries.c.sequence, _entries.c.run_id, _entries.c.query, _entries.c.step).order_by(
    _entries.c.sequence
)
_UPDATE_OWNER = sa.update(_runs).where(_runs.c.run_id == sa.bindparam("run")).values(fencing=sa.bindparam("number"))
_UPDATE_DATA = sa.update(_runs).where(_runs.c.run_id == sa.bindparam("run")).values(data=sa.bindparam("number"))
_UPDATE_CHARGED = (
    sa.update(_charged)
    .where(_charged.c.run_id == sa.bindparam("run"), _charged.c.query == sa.bindparam("query_name"))
    .values(charges=_charged.c.charges + 1)
)
_UPDATE_ACCOUNT = (
    sa.update(_accounts).where(_accounts.c.name == sa.bindparam("key")).values(changed=sa.bindparam("number"))
)
_INSERT_ENTRY = sa.insert(_entries)
_SELECT_META = sa.select(_meta.c.value).where(_meta.c.name == sa.bindparam("key"))
_UPDATE_META = sa.update(_meta).where(_meta.c.name == sa.bindparam("key")).values(value=sa.bindparam("content"))


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the tables: its registration's entry, the instance that owns it, and its charges by query.

    Attributes:
        data: the entry that bound it to its data; None before.
    """

    run_id: str
    account: str
    sequence: int
    fencing: int
    charged: Mapping[Query, int]
    data: int | None = None


@dataclass(frozen=True, slots=True)
class AccountRow:
    """An account in the tables: its name, the entry that opened it, and the one that changed it last."""

    name: str
    sequence: int
    changed: int


class LedgerStore:
    """One store. Several processes and threads may have it open at once.

    Args:
        url: ``sqlite:////absolute/file`` or ``postgresql://...``.
        create: whether a ledger may be created, and this instance may write. Otherwise it only reads.

    Raises:
        ConfigError: ``ledger_url``, ``url_secret``, ``ledger_driver``, ``ledger_missing`` or ``network_file_system``.
        BudgetError: ``ledger_foreign``, ``ledger_exposed``, ``ledger_not_durable`` or ``ledger_unavailable``.
    """

    def __init__(self, url: str, create: bool = True) -> None:
        self._url = url
        self._engine = open_engine(url, create)
        self._reader = reading(self._engine)
        self._writer = WriteTransactions(self._engine)
        self._writes = create
        self._fencing = 0
        try:
            # One transaction: of processes that open a new store at once, one creates it and the others find it whole.
            with self.write() if create else self.read() as rows:
                if create:
                    rows.create_if_empty()
                rows.check_ours()
                if create:
                    self._fencing = rows.open_lease()
                self.key = IdentityKey.from_seed(Secret(bytes.fromhex(rows.meta("signing_key"))))
        except BaseException:
            self.close()
            raise

    @property
    def fencing(self) -> int:
        """This instance's fencing number, above the number of every earlier instance; 0 if it was opened to read."""
        return self._fencing

    def place(self) -> StoragePlace:
        """Return the file of an embedded ledger, or the server that this instance is connected to."""
        url = sa.make_url(self._url)
        if url.get_backend_name() == "sqlite" and url.database:
            return StoragePlace(path=Path(url.database))
        with storage_errors(), self._reader.connect() as connection:
            return StoragePlace(host=server_of(connection))

    @contextmanager
    def write(self) -> Iterator["Rows"]:
        """Open a transaction that holds the store's write lock from its start. It is durable when the block ends.

        Guarantee: when the block has ended without an error, its changes survive a crash of process and machine. If it
        raises, none of them exists.
        """
        if not self._writes:
            raise BudgetError("ledger_read_only", "this ledger instance was opened to read; it cannot charge.")
        with storage_errors(), self._writer.begin() as connection:
            # The first statement, so that everything read next is what the previous writer committed.
            take_write_lock(connection)
            yield Rows(connection)

    @contextmanager
    def read(self) -> Iterator["Rows"]:
        """Open a transaction that sees one state of the store and never waits for a writer."""
        with storage_errors(), self._reader.begin() as connection:
            yield Rows(connection)

    def close(self) -> None:
        """Close all connections. The store cannot be used afterwards."""
        self._writer.close()
        self._engine.dispose()


class Rows:
    """The statements of one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def create_if_empty(self) -> None:
        """Create the tables and the signing key in a database that has no tables."""
        if not sa.inspect(self._connection).get_table_names():
            _tables.create_all(self._connection, checkfirst=False)
            # The key is in the store, which is why its file must be readable by its owner alone.
            seed = Ed25519PrivateKey.generate().private_bytes_raw().hex()
            values = {"application": APPLICATION, "signing_key": seed, "fencing": "0"}
            self._connection.execute(
                sa.insert(_meta), [{"name": name, "value": value} for name, value in values.items()]
            )

    def check_ours(self) -> None:
        """Refuse anything but a whole ledger: ``ledger_missing``, ``ledger_foreign`` or ``ledger_not_durable``."""
        names = set(sa.inspect(self._connection).get_table_names())
        if not names:
            raise ledger_missing("the database is empty.")
        format_found = self.meta("application") if {"meta", "accounts", "entries"} <= names else ""
        if format_found != APPLICATION and format_found.startswith(_FAMILY):
            # A hint to start an empty ledger here would be a hint to forget what was spent.
            raise BudgetError(
                "ledger_foreign",
                f"the ledger has the format '{format_found}'; this version reads '{APPLICATION}'.",
                "Use the version that wrote it. What its accounts have spent counts for their data in any ledger.",
            )
        if not names >= set(_tables.tables) or format_found != APPLICATION:
            raise BudgetError(
                "ledger_foreign",
                f"the database holds {', '.join(sorted(names))}, not the tables of a '{APPLICATION}'.",
                "Give a path where there is no file yet, or an empty database.",
            )
        check_tables_last(self._connection, list(_tables.tables))

    def meta(self, name: str) -> str:
        """Return a setting of the store; empty if there is none."""
        return self._connection.execute(_SELECT_META, {"key": name}).scalar() or ""

    def next_fencing(self) -> int:
        """Return a fencing number higher than every earlier one."""
        # Read and raised under the write lock, so that no two instances get one number.
        number = int(self.meta("fencing")) + 1
        self._connection.execute(_UPDATE_META, {"key": "fencing", "content": str(number)})
        return number

    def open_lease(self) -> int:
        """Record a new instance; return its fencing number."""
        fencing = self.next_fencing()
        _leases.open(self._connection, fencing)
        return fencing

    def renew_lease(self, fencing: int) -> None:
        """Record that an instance took or charged a run."""
        _leases.renew(self._connection, fencing)

    def leases(self, runs: Iterable[RunRow]) -> dict[int, Lease]:
        """Return the leases under which runs are held, by fencing number."""
        return _leases.of(self._connection, (row.fencing for row in runs))

    def head(self) -> Head:
        """Return the chain's end."""
        row = execute(self._connection, _SELECT_HEAD).fetchone()
        return Head(*row) if row else Head()

    def entry(self, sequence: int) -> LedgerEntry | None:
        """Return the entry at one position."""
        row = self._connection.execute(_SELECT_ENTRY, {"number": sequence}).first()
        return LedgerEntry(*row) if row else None

    def charge(self, run_id: str, query: Query, step: int) -> LedgerEntry | None:
        """Return the entry that charged a step of a run's mechanism."""
        return self.about(run_id, query, step).get(StepCharged.DOMAIN)

    def about(self, run_id: str, query: Query, step: int) -> dict[str, LedgerEntry]:
        """Return the entries about a step of a run's mechanism by kind: its charge, and then its vectors."""
        values = {"run": run_id, "query_name": query, "number": step}
        return {row[2]: LedgerEntry(*row) for row in execute(self._connection, _SELECT_FILED, values)}

    def entries(self) -> Iterator[LedgerEntry]:
        """Yield all entries in the order of the chain."""
        for row in self._connection.execute(_SELECT_ENTRIES):
            yield LedgerEntry(*row)

    def known(self) -> list[tuple[int, str]]:
        """Return the entries that made accounts known by data, in the order of the chain, with the account of each."""
        return [(row.sequence, row.account) for row in self._connection.execute(_SELECT_KNOWN)]

    def filed_keys(self) -> Iterator[tuple[int, str | None, str | None, int | None]]:
        """Yield (sequence, run, query, step) of each entry; the last three are None unless it is about one step."""
        for row in self._connection.execute(_SELECT_KEYED):
            yield row.sequence, row.run_id, row.query, row.step

    def run(self, run_id: str) -> tuple[RunRow, AccountRow] | None:
        """Return one run, and its account."""
        found = [tuple(row) for row in execute(self._connection, _SELECT_RUN, {"run": run_id})]
        if not found:
            return None
        (run,) = _run_rows(row[:-2] for row in found)
        return run, AccountRow(run.account, *found[0][-2:])

    def runs(self, account: str | None = None) -> list[RunRow]:
        """Return runs in the order of registration, of one account or of all."""
        if account is None:
            return _run_rows(self._connection.execute(_SELECT_RUNS))
        return _run_rows(execute(self._connection, _SELECT_ACCOUNT_RUNS, {"name": account}))

    def account(self, name: str) -> AccountRow | None:
        """Return one account."""
        row = execute(self._connection, _SELECT_ACCOUNT, {"key": name}).fetchone()
        return AccountRow(*row) if row else None

    def accounts(self) -> list[AccountRow]:
        """Return accounts in the order of opening."""
        return [AccountRow(*row) for row in self._connection.execute(_SELECT_ACCOUNTS)]

    def append(self, entry: LedgerEntry, key: tuple[str, Query, int] | None = None) -> None:
        """Append an entry. An entry about one step is filed under its key: run, query and step."""
        run_id, query, step = key or (None, None, None)
        execute(
            self._connection,
            _INSERT_ENTRY,
            {
                "sequence": entry.sequence,
                "previous": entry.previous,
                "kind": entry.kind,
                "body": entry.body,
                "hash": entry.hash,
                "signature": entry.signature,
                "run_id": run_id,
                "query": query,
                "step": step,
            },
        )

    def add_account(self, row: AccountRow) -> None:
        """Record an account that an entry opened."""
        values = {"name": row.name, "sequence": row.sequence, "changed": row.changed}
        self._connection.execute(sa.insert(_accounts), values)

    def add_known(self, sequence: int, account: str) -> None:
        """Record an entry that made an account known by data."""
        self._connection.execute(sa.insert(_known), {"sequence": sequence, "account": account})

    def change_account(self, name: str, sequence: int) -> None:
        """Record the entry that changed an account."""
        self._connection.execute(_UPDATE_ACCOUNT, {"key": name, "number": sequence})

    def add_run(self, row: RunRow) -> None:
        """Record a run that an entry registered."""
        values = {"run_id": row.run_id, "account": row.account, "sequence": row.sequence}
        self._connection.execute(sa.insert(_runs), {**values, "fencing": row.fencing, "data": row.data})
        counts = [{"run_id": row.run_id, "query": query, "charges": count} for query, count in row.charged.items()]
        self._connection.execute(sa.insert(_charged), counts)

    def own_run(self, run_id: str, fencing: int) -> None:
        """Record the instance that owns a run."""
        self._connection.execute(_UPDATE_OWNER, {"run": run_id, "number": fencing})

    def bind_run(self, run_id: str, sequence: int) -> None:
        """Record the entry that bound a run to its data."""
        execute(self._connection, _UPDATE_DATA, {"run": run_id, "number": sequence})

    def count_charge(self, run_id: str, query: Query) -> None:
        """Count one more charge of a run's mechanism."""
        execute(self._connection, _UPDATE_CHARGED, {"run": run_id, "query_name": query})


def _run_rows(found: Iterable[Sequence[Any]]) -> list[RunRow]:
    """Return runs in the order found, from one row for each of their queries."""
    charged: dict[str, dict[Query, int]] = {}
    runs: list[RunRow] = []
    for run_id, account, sequence, fencing, data, query, charges in found:
        if run_id not in charged:
            runs.append(RunRow(run_id, account, sequence, fencing, charged.setdefault(run_id, {}), data))
        if query is not None:
            charged[run_id][query] = charges
    return runs
