"""The ledger's storage, and nothing else: its tables and statements, on SQLite (embedded) or PostgreSQL.

The chain of entries is the record. The other tables are its totals, kept so that a charge need not read the chain.
Every writer takes the store's one write lock before it reads, so check and charge are one atomic act.

Leases say which instance may charge a run, so that at most one of two live ones is believed. An instance that is opened
to write takes a fencing number above all earlier ones, and a row that identifies it. A run belongs to the instance with
the highest number that registered or charged it. The row of the run names that number. It is read and written inside
the transaction that charges. So the database's lock decides ownership, never a clock. A lease therefore does not
expire: it ends when a newer instance takes the run.
"""

import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.ledger.engine import (
    WriteTransactions,
    check_logged,
    execute,
    open_engine,
    reading,
    server_of,
    storage_errors,
    take_write_lock,
)
from raycloak.coordinator.ledger.entries import Head, KeyRotated, LedgerEntry
from raycloak.coordinator.ledger.location import StoragePlace, ledger_missing
from raycloak.metrics.errors import BudgetError

_FAMILY = "raycloak ledger v"
APPLICATION = f"{_FAMILY}6"

_tables = sa.MetaData()
_integer = sa.BigInteger().with_variant(sa.Integer, "sqlite")
sa.Table("meta", _tables, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text))
sa.Table(
    "accounts",
    _tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("sequence", _integer, nullable=False),
    sa.Column("changed", _integer, nullable=False),
)
sa.Table(
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
sa.Table(
    "known",
    _tables,
    sa.Column("sequence", _integer, primary_key=True, autoincrement=False),
    sa.Column("account", sa.Text, sa.ForeignKey("accounts.name"), nullable=False),
)
sa.Table(
    "charged",
    _tables,
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("query", sa.Text, primary_key=True),
    sa.Column("charges", _integer, nullable=False),
)
sa.Table(
    "leases",
    _tables,
    sa.Column("fencing", _integer, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("opened_at", _integer, nullable=False),
    sa.Column("renewed_at", _integer, nullable=False),
)
sa.Table(
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

_SELECT_ENTRY = "SELECT sequence, previous, kind, body, hash, signature FROM entries "
_RUN = "SELECT runs.run_id, runs.account, runs.sequence, fencing, data, query, charges"
_CHARGED = " FROM runs LEFT JOIN charged ON charged.run_id = runs.run_id"
_SELECT_RUNS = f"{_RUN}{_CHARGED} ORDER BY runs.sequence"
_SELECT_ACCOUNT_RUNS = f"{_RUN}{_CHARGED} WHERE account = :account ORDER BY runs.sequence"
_SELECT_RUN = (
    f"{_RUN}, accounts.sequence, changed{_CHARGED} JOIN accounts ON accounts.name = account WHERE runs.run_id = :run_id"
)


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


class LedgerStore:
    """One store. Several processes and threads may have it open at once.

    Args:
        url: ``sqlite:////absolute/file`` or ``postgresql://...``.
        create: whether a ledger may be created, and this instance may write. Otherwise it only reads.

    Attributes:
        fencing: this instance's number, above that of every earlier instance; 0 if it was opened to read.
        key: signs entries and receipts, until another instance rotates it.

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
        self.fencing = 0
        try:
            # One transaction: of processes that open a new store at once, one creates it and the others find it whole.
            with self.write() if create else self.read() as rows:
                if create:
                    rows.create_if_empty()
                rows.check_ours()
                if create:
                    self.fencing = rows.open_lease()
                    # Later it would take a connection of its own.
                    self.key = rows.signing_key()
                self.public_key = rows.public_key()
        except BaseException:
            self.close()
            raise

    @cached_property
    def key(self) -> IdentityKey:
        """The key that signs, read when it is first needed: a process that only reads the ledger never holds it."""
        with self.read() as rows:
            return rows.signing_key()

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

    def _execute(self, statement: str, **values: Any) -> sqlite3.Cursor | sa.CursorResult[*tuple[Any, ...]]:
        return execute(self._connection, statement, values)

    def _insert(self, table: str, **values: Any) -> None:
        """Insert a row into a table; ``values`` by column."""
        execute(self._connection, f"INSERT INTO {table} ({', '.join(values)}) VALUES (:{', :'.join(values)})", values)

    def signing_key(self) -> IdentityKey:
        """Return the key that signs."""
        return IdentityKey.from_seed(Secret(bytes.fromhex(self.meta("signing_key"))))

    def public_key(self) -> bytes:
        """Return the public half of the key that signs."""
        return bytes.fromhex(self.meta("public_key"))

    def make_key(self) -> IdentityKey:
        """Put a new signing key in the place of the one that is there, and return it."""
        # The key is in the store, which is why its file must be readable by its owner alone.
        key = Ed25519PrivateKey.generate()
        keys = {"signing_key": key.private_bytes_raw(), "public_key": key.public_key().public_bytes_raw()}
        for name, value in keys.items():
            self._execute("UPDATE meta SET value = :value WHERE name = :name", name=name, value=value.hex())
        return IdentityKey(key)

    def create_if_empty(self) -> None:
        """Create the tables and the signing key in a database that has no tables."""
        if not sa.inspect(self._connection).get_table_names():
            _tables.create_all(self._connection, checkfirst=False)
            for name, value in {
                "application": APPLICATION,
                "signing_key": "",
                "public_key": "",
                "fencing": "0",
            }.items():
                self._insert("meta", name=name, value=value)
            self.make_key()

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
        check_logged(self._connection, list(_tables.tables))

    def meta(self, name: str) -> str:
        """Return a setting of the store; empty if there is none."""
        row = self._execute("SELECT value FROM meta WHERE name = :name", name=name).fetchone()
        return (row[0] or "") if row else ""

    def open_lease(self) -> int:
        """Record a new instance, which is this process; return its fencing number, higher than every earlier one."""
        # Read and raised under the write lock, so that no two instances get one number.
        number, at = int(self.meta("fencing")) + 1, int(time.time())
        self._execute("UPDATE meta SET value = :value WHERE name = 'fencing'", value=str(number))
        holder = f"{socket.gethostname()}/{os.getpid()}"
        self._insert("leases", fencing=number, holder=holder, opened_at=at, renewed_at=at)
        return number

    def renew_lease(self, fencing: int) -> None:
        """Record that an instance took or charged a run."""
        update = "UPDATE leases SET renewed_at = :at WHERE fencing = :fencing"
        self._execute(update, at=int(time.time()), fencing=fencing)

    def leases(self, account: str) -> dict[int, Lease]:
        """Return the leases under which runs of an account are held, by fencing number."""
        select = "SELECT fencing, holder, opened_at, renewed_at FROM leases"
        where = "WHERE fencing IN (SELECT fencing FROM runs WHERE account = :account)"
        return {row[0]: Lease(*row) for row in self._execute(f"{select} {where}", account=account)}

    def head(self) -> Head:
        """Return the chain's end."""
        row = self._execute("SELECT sequence, hash FROM entries ORDER BY sequence DESC LIMIT 1").fetchone()
        return Head(*row) if row else Head()

    def entry(self, sequence: int) -> LedgerEntry | None:
        """Return the entry at one position."""
        row = self._execute(f"{_SELECT_ENTRY}WHERE sequence = :sequence", sequence=sequence).fetchone()
        return LedgerEntry(*row) if row else None

    def about(self, run_id: str, query: Query, step: int) -> dict[str, LedgerEntry]:
        """Return the entries about a step of a run's mechanism by kind: its charge, and then its vectors."""
        where = "WHERE run_id = :run_id AND query = :query AND step = :step"
        found = self._execute(f"{_SELECT_ENTRY}{where}", run_id=run_id, query=query, step=step)
        return {row[2]: LedgerEntry(*row) for row in found}

    def entries(self) -> Iterator[LedgerEntry]:
        """Yield all entries in the order of the chain."""
        for row in self._execute(f"{_SELECT_ENTRY}ORDER BY sequence"):
            yield LedgerEntry(*row)

    def rotations(self) -> Iterator[LedgerEntry]:
        """Yield the entries that rotated the ledger's key, in the order of the chain."""
        for row in self._execute(f"{_SELECT_ENTRY}WHERE kind = '{KeyRotated.DOMAIN}' ORDER BY sequence"):
            yield LedgerEntry(*row)

    def known(self) -> list[tuple[int, str]]:
        """Return the entries that made accounts known by data, in the order of the chain, with the account of each."""
        return [(row[0], row[1]) for row in self._execute("SELECT sequence, account FROM known ORDER BY sequence")]

    def filed_keys(self) -> Iterator[tuple[int, str | None, str | None, int | None]]:
        """Yield (sequence, run, query, step) of each entry; the last three are None unless it is about one step."""
        for sequence, *key in self._execute("SELECT sequence, run_id, query, step FROM entries ORDER BY sequence"):
            yield sequence, *key

    def run(self, run_id: str) -> tuple[RunRow, AccountRow] | None:
        """Return one run, and its account."""
        found = list(self._execute(_SELECT_RUN, run_id=run_id))
        if not found:
            return None
        (run,) = _run_rows(row[:-2] for row in found)
        return run, AccountRow(run.account, *found[0][-2:])

    def runs(self, account: str | None = None) -> list[RunRow]:
        """Return runs in the order of registration, of one account or of all."""
        if account is None:
            return _run_rows(self._execute(_SELECT_RUNS))
        return _run_rows(self._execute(_SELECT_ACCOUNT_RUNS, account=account))

    def account(self, name: str) -> AccountRow | None:
        """Return one account."""
        row = self._execute("SELECT name, sequence, changed FROM accounts WHERE name = :name", name=name).fetchone()
        return AccountRow(*row) if row else None

    def accounts(self) -> list[AccountRow]:
        """Return accounts in the order of opening."""
        found = self._execute("SELECT name, sequence, changed FROM accounts ORDER BY sequence")
        return [AccountRow(*row) for row in found]

    def append(self, entry: LedgerEntry, key: tuple[str, Query, int] | None) -> None:
        """Append an entry. One about a step is filed under its key: run, query and step."""
        run_id, query, step = key or (None, None, None)
        self._insert("entries", **asdict(entry), run_id=run_id, query=query, step=step)

    def add_account(self, row: AccountRow) -> None:
        """Record an account that an entry opened."""
        self._insert("accounts", **asdict(row))

    def add_known(self, sequence: int, account: str) -> None:
        """Record an entry that made an account known by data."""
        self._insert("known", sequence=sequence, account=account)

    def change_account(self, name: str, sequence: int) -> None:
        """Record the entry that changed an account."""
        self._execute("UPDATE accounts SET changed = :sequence WHERE name = :name", sequence=sequence, name=name)

    def add_run(self, row: RunRow) -> None:
        """Record a run that an entry registered."""
        values = asdict(row)
        charged = values.pop("charged")
        self._insert("runs", **values)
        for query, charges in charged.items():
            self._insert("charged", run_id=row.run_id, query=query, charges=charges)

    def own_run(self, run_id: str, fencing: int) -> None:
        """Record the instance that owns a run."""
        self._execute("UPDATE runs SET fencing = :fencing WHERE run_id = :run_id", fencing=fencing, run_id=run_id)

    def bind_run(self, run_id: str, sequence: int) -> None:
        """Record the entry that bound a run to its data."""
        self._execute("UPDATE runs SET data = :sequence WHERE run_id = :run_id", sequence=sequence, run_id=run_id)

    def count_charge(self, run_id: str, query: Query) -> None:
        """Count one more charge of a run's mechanism."""
        update = "UPDATE charged SET charges = charges + 1 WHERE run_id = :run_id AND query = :query"
        self._execute(update, run_id=run_id, query=query)


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
