"""The store of the training service: clients, operations, sent batches, counted ids and artifacts, and no rules.

It keeps no row in memory. Every change is made in a transaction; what is read next is what was written last.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, TypeVar

from raycloak.coordinator.service.databases import Database
from raycloak.coordinator.service.steps import StepState
from raycloak.metrics.errors import ConfigError

APPLICATION: Final = "raycloak training service v2"

R = TypeVar("R")


class OperationState(StrEnum):
    """The states of an operation; the last three never change again."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ClientState(StrEnum):
    """The states of a client. A live one is READY or BUSY, by whether operations are open.

    A forgotten one, whose rows are being deleted, is answered as one that does not exist.
    """

    INITIALIZING = "INITIALIZING"
    LIVE = "LIVE"
    ERROR = "ERROR"
    TERMINATED = "TERMINATED"
    FORGOTTEN = "FORGOTTEN"


class OperationKind(StrEnum):
    """The kinds of operations; the first two make a step."""

    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_STATE = "save_state"
    LOAD_STATE = "load_state"
    SAMPLE = "sample"


@dataclass(slots=True)
class ClientRow:
    """A client: who owns it, what it trains, and how far it is.

    Attributes:
        fingerprint: of the request that made it.
        config, run_config: the TrainingConfig, and the RunConfig that it became, as JSON.
        sent: whether the client sends its data; most_sent and most_uses bound the examples of a step, and the uses of
            one.
        revision: number of the newest change of the client or of one of its operations; ``changed`` of the client.
        next_number: of the next operation; ``open`` are queued or running, and have requests of ``open_bytes``.
        sampled_bytes: of the texts that samples have written.
        facts: what the driver reported when it was ready, as JSON; empty before.
        error: why the status is ERROR: a ServiceErrorInfo, serialised.
        ending: why no further step will be computed; empty while that is not so.
        waits_since: Unix time since which it has waited for a place; of a closed one, at which it ended.
        steps: how far it is; each of its fields has a column.
    """

    client_id: str
    tenant: str
    idempotency_key: str
    fingerprint: bytes
    name: str
    config: str
    run_config: str
    sent: bool
    most_sent: int
    most_uses: int
    private: bool
    created: float
    waits_since: float
    status: ClientState = ClientState.INITIALIZING
    revision: int = 1
    changed: int = 1
    next_number: int = 0
    open: int = 0
    open_bytes: int = 0
    sampled_bytes: int = 0
    epsilon: float = 0.0
    digest: str = ""
    run_id: str = ""
    run_dir: str = ""
    facts: str = ""
    error: bytes = b""
    ending: str = ""
    steps: StepState = field(default_factory=StepState)


@dataclass(slots=True)
class OperationRow:
    """An operation of a client.

    Attributes:
        number: place in the client's order.
        step: the optimizer step that it belongs to; of a save, load or sample, the finished steps that it follows. It
            is -1 until the operation is handed to the driver.
        payload: the request's message, serialised, while it is open; ``result`` the result's.
        error: why it failed or was cancelled: a ServiceErrorInfo, serialised.
        package: path of the package that it loads, or samples from.
        handed: Unix time at which it began to run.
    """

    client_id: str
    number: int
    idempotency_key: str
    fingerprint: bytes
    kind: OperationKind
    state: OperationState
    revision: int
    submitted: float
    payload: bytes
    step: int = -1
    ended: float = 0.0
    result: bytes = b""
    error: bytes = b""
    package: str = ""
    handed: float = 0.0


@dataclass(slots=True)
class ArtifactRow:
    """An artifact, which the save with this number made."""

    client_id: str
    number: int
    step: int
    package: str
    package_digest: str
    model_digest: str
    metadata: str
    created: float
    size: int


@dataclass(slots=True)
class BatchRow:
    """A batch that a client sent for a step: the file of its ciphertext, below the service's folder."""

    client_id: str
    number: int
    tenant: str
    step: int
    file: str
    size: int
    sha256: bytes
    examples: int


_TABLES: Final = {
    "clients": (ClientRow, "PRIMARY KEY (client_id), UNIQUE (tenant, idempotency_key)"),
    "operations": (OperationRow, "PRIMARY KEY (client_id, number), UNIQUE (client_id, idempotency_key)"),
    "artifacts": (ArtifactRow, "PRIMARY KEY (client_id, number)"),
    "batches": (BatchRow, "PRIMARY KEY (client_id, number)"),
}
_NAMES: Final[dict[type, str]] = {row: table for table, (row, _) in _TABLES.items()}


def _columns(row: type) -> dict[str, tuple[str, Any]]:
    """Return where a row has each column's value, and its type. A step state has a column for each field."""
    found = {each.name: (each.name, each.type) for each in fields(row) if each.type is not StepState}
    return found | {each.name: (f"steps.{each.name}", each.type) for each in fields(StepState) if row is ClientRow}


# Found once, since each statement asks.
_COLUMNS: Final = {table: _columns(row) for table, (row, _) in _TABLES.items()}
_VALUES: Final[dict[str, Callable[[Any], tuple[Any, ...]]]] = {
    table: attrgetter(*(place for place, _ in columns.values())) for table, columns in _COLUMNS.items()
}
_TYPED: Final = {
    table: [(at, kind) for at, (_, kind) in enumerate(columns.values()) if kind not in (str, bytes, int, float)]
    for table, columns in _COLUMNS.items()
}
_SELECT: Final = {table: f"SELECT {', '.join(names)} FROM {table} WHERE" for table, names in _COLUMNS.items()}
_INSERT: Final = {
    table: f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    for table, names in _COLUMNS.items()
}
_KINDS: Final[dict[type, str]] = {bytes: "{BLOB}", int: "{INTEGER}", float: "{REAL}", bool: "{INTEGER}"}
_OTHERS: Final = (
    "CREATE TABLE meta (name TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL)",
    # One row for each example that a client ever sent: nobody but the data's owner knows which example it is.
    "CREATE TABLE used_ids (client_id TEXT NOT NULL, id {BLOB} NOT NULL, count {INTEGER} NOT NULL, last_step {INTEGER}"
    " NOT NULL, PRIMARY KEY (client_id, id))",
    "CREATE INDEX operations_by_revision ON operations (client_id, revision)",
    "CREATE INDEX open_operations ON operations (client_id, number) WHERE state IN ('queued', 'running')",
    "CREATE INDEX open_samples ON operations (client_id, number)"
    " WHERE state IN ('queued', 'running') AND kind = 'sample'",
    "CREATE INDEX clients_by_wait ON clients (waits_since, client_id) WHERE status IN ('INITIALIZING', 'LIVE')",
    # With the number, by which the result is sorted: else SQLite reads all of a client's operations in that order.
    "CREATE INDEX operations_by_step ON operations (client_id, step, number)",
    "CREATE INDEX batches_by_step ON batches (client_id, step)",
    "CREATE INDEX batches_by_tenant ON batches (tenant)",
)
_COUNT_IDS: Final = (
    "INSERT INTO used_ids (client_id, id, count, last_step) VALUES {rows} ON CONFLICT (client_id, id) DO UPDATE"
    " SET count = used_ids.count + 1, last_step = excluded.last_step"
    " WHERE used_ids.count < ? AND used_ids.last_step < excluded.last_step RETURNING id"
)
_IDS_AT_ONCE: Final = 500  # a statement has three values for each, and no database takes many more than 32,000
_CLIENT_IDS: Final = "SELECT client_id FROM clients WHERE"
_MOST_CLOSED: Final = 64  # at once, since a row may have megabytes; for each client that is created, so they get fewer
_OPEN: Final = "client_id = ? AND state IN ('queued', 'running')"


def client_columns(row: ClientRow) -> dict[str, Any]:
    """Return the columns of a client."""
    return dict(zip(_COLUMNS["clients"], _VALUES["clients"](row), strict=True))


def _client(*columns: Any) -> ClientRow:
    own = len(columns) - len(fields(StepState))
    row = ClientRow(*columns[:own])
    row.steps = StepState(*columns[own:])
    return row


class Store:
    """The tables, in a database that this process owns. For one thread at a time.

    Raises:
        ConfigError: ``store_foreign`` if the database holds something else.
        RunFailedError: ``store_failed``, from any method, if the storage fails.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        with self.transaction():
            tables = {name for (name,) in database.run(database.tables)}
            if not tables:
                self._create()
            found = database.run("SELECT value FROM meta WHERE name = 'application'") if "meta" in tables else []
            if tables and found != [(APPLICATION,)]:
                why = f"the database is not the store of a '{APPLICATION}'."
                raise ConfigError("store_foreign", why, "Give a path where there is no file yet, or an empty database.")

    def _create(self) -> None:
        made = []
        for table, (_, keys) in _TABLES.items():
            columns = [f"{name} {_KINDS.get(kind, 'TEXT')} NOT NULL" for name, (_, kind) in _COLUMNS[table].items()]
            made.append(f"CREATE TABLE {table} ({', '.join(columns)}, {keys})")
        for statement in (*made, *_OTHERS):
            self._database.run(statement.format(**self._database.types))
        self._database.run("INSERT INTO meta (name, value) VALUES ('application', ?)", (APPLICATION,))

    def close(self) -> None:
        """Close the database and give its ownership up."""
        self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a transaction.

        Guarantee: when the block has ended without an error, its changes survive a crash of process and machine. If it
        raises, none of them exists.
        """
        with self._block(self._database.begin, "COMMIT", ("ROLLBACK",)):
            yield

    @contextmanager
    def part(self) -> Iterator[None]:
        """Open a part of the transaction, which is undone alone if it raises."""
        with self._block("SAVEPOINT part", "RELEASE SAVEPOINT part", ("ROLLBACK TO SAVEPOINT part", "RELEASE part")):
            yield

    @contextmanager
    def _block(self, begin: str, end: str, undo: tuple[str, ...]) -> Iterator[None]:
        self._database.run(begin)
        try:
            yield
        except BaseException:
            for statement in undo:
                self._database.run(statement)
            raise
        # A COMMIT that fails is not undone here: whether it holds is unknown, and the service ends.
        self._database.run(end)

    def add(self, row: ClientRow | OperationRow | BatchRow | ArtifactRow) -> None:
        """Record a new row."""
        table = _NAMES[type(row)]
        self._database.run(_INSERT[table], _VALUES[table](row))

    # Clients

    def client(self, client_id: str) -> ClientRow | None:
        """Return a client."""
        return self._one(ClientRow, "client_id = ?", client_id)

    def client_of_key(self, tenant: str, key: str) -> ClientRow | None:
        """Return the client that a tenant made with an idempotency key."""
        return self._one(ClientRow, "tenant = ? AND idempotency_key = ?", tenant, key)

    def clients_of(self, tenant: str, limit: int) -> list[str]:
        """Return the ids of the newest clients of a tenant, oldest first. A row may have megabytes."""
        where = "tenant = ? AND status <> 'FORGOTTEN' ORDER BY created DESC, client_id LIMIT ?"
        return [str(client) for (client,) in reversed(self._rows(f"{_CLIENT_IDS} {where}", tenant, limit))]

    def live_clients(self, tenant: str) -> int:
        """Return how many clients of a tenant were not closed."""
        where = "tenant = ? AND status NOT IN ('TERMINATED', 'FORGOTTEN')"
        return self._number(f"SELECT COUNT(*) FROM clients WHERE {where}", tenant)

    def closed_clients(self, tenant: str, newest: int) -> list[str]:
        """Return some closed clients of a tenant that have no open operation, and not the ``newest``."""
        where = "tenant = ? AND status = 'TERMINATED' AND open = 0 ORDER BY waits_since DESC, client_id"
        rows = self._rows(f"{_CLIENT_IDS} {where} LIMIT ? OFFSET ?", tenant, _MOST_CLOSED, newest)
        return [str(client) for (client,) in rows]

    def clients_by_status(self) -> dict[str, int]:
        """Return how many clients have each status, as the wire names it."""
        rows = self._rows(
            "SELECT status, open > 0, COUNT(*) FROM clients WHERE status <> 'FORGOTTEN' GROUP BY status, open > 0"
        )
        found: dict[str, int] = {}
        for status, is_busy, count in rows:
            name = ("BUSY" if is_busy else "READY") if status == ClientState.LIVE else str(status)
            found[name] = found.get(name, 0) + int(count)
        return found

    def waiting_clients(self) -> list[tuple[str, str]]:
        """Return (client, tenant) of all clients that have work for a driver, first the longest wait."""
        return [
            (str(client), str(tenant))
            for client, tenant in self._rows(
                "SELECT client_id, tenant FROM clients WHERE status IN ('INITIALIZING', 'LIVE')"
                " AND (status = 'INITIALIZING' AND ending = '' OR open > 0 AND EXISTS (SELECT 1 FROM operations"
                # All numbers are: it has SQLite choose the index of open operations, not one of all that ever were.
                " WHERE operations.client_id = clients.client_id AND number >= 0"
                # A sample that has its package needs no driver.
                " AND state IN ('queued', 'running') AND NOT (kind = 'sample' AND package <> '')))"
                " ORDER BY waits_since, client_id"
            )
        ]

    def left_open(self) -> list[ClientRow]:
        """Return closed clients that have open operations, which no driver will ever do."""
        return self._all(ClientRow, "open > 0 AND status = 'TERMINATED'")

    def to_be_tidied(self) -> list[str]:
        """Return forgotten clients, and closed ones that have sent batches."""
        batches = "EXISTS (SELECT 1 FROM batches WHERE batches.client_id = clients.client_id)"
        where = f"status = 'FORGOTTEN' OR status = 'TERMINATED' AND {batches} ORDER BY client_id"
        return [str(client) for (client,) in self._rows(f"{_CLIENT_IDS} {where}")]

    def forget(self, client_id: str, most: int, tables: Sequence[str]) -> int:
        """Delete rows of a client from ``tables``, at most so many; return how many there were."""
        deleted = 0
        for table in tables:
            key = "id" if table == "used_ids" else "number"
            some = f"SELECT {key} FROM {table} WHERE client_id = ? ORDER BY {key} LIMIT ?"
            delete = f"DELETE FROM {table} WHERE client_id = ? AND {key} IN ({some}) RETURNING 1"
            deleted += len(self._rows(delete, client_id, client_id, most - deleted))
        return deleted

    def remove_client(self, client_id: str) -> None:
        """Delete a client that has no other rows."""
        self._rows("DELETE FROM clients WHERE client_id = ?", client_id)

    def change_client(self, row: ClientRow, **values: Any) -> None:
        """Change columns of a client in the store."""
        self._update("clients", values, {"client_id": row.client_id})

    # Operations

    def operation(self, client_id: str, number: int) -> OperationRow | None:
        """Return an operation."""
        return self._one(OperationRow, "client_id = ? AND number = ?", client_id, number)

    def operation_of_key(self, client_id: str, key: str) -> OperationRow | None:
        """Return the operation that was submitted with an idempotency key."""
        return self._one(OperationRow, "client_id = ? AND idempotency_key = ?", client_id, key)

    def open_operations(self, client_id: str, limit: int = -1) -> list[OperationRow]:
        """Return the first operations that are queued or running, in order; all of them by default."""
        end = f" LIMIT {limit}" if limit >= 0 else ""
        return self._all(OperationRow, f"{_OPEN} ORDER BY number{end}", client_id)

    def open_samples(self, client_id: str) -> list[OperationRow]:
        """Return the samples that are queued or running, in order."""
        return self._all(OperationRow, f"{_OPEN} AND kind = 'sample' ORDER BY number", client_id)

    def of_step(self, client_id: str, kind: str, step: int) -> list[OperationRow]:
        """Return the operations of one kind that belong to a step, in order."""
        return self._all(OperationRow, "client_id = ? AND step = ? AND kind = ? ORDER BY number", client_id, step, kind)

    def newest_forward(self, client_id: str, before: int) -> int:
        """Return the number of the last ``forward_backward`` before an operation that was not undone; -1 if none."""
        return self._number(
            "SELECT COALESCE(MAX(number), -1) FROM operations WHERE client_id = ? AND number < ? AND"
            " kind = 'forward_backward' AND state IN ('queued', 'running', 'done')",
            client_id,
            before,
        )

    def samples_under_way(self, tenant: str) -> int:
        """Return how many samples of all clients of a tenant are running."""
        return self._number(
            "SELECT COUNT(*) FROM operations WHERE state IN ('queued', 'running') AND kind = 'sample'"
            # Not a join, for which SQLite reads all operations that the tenant ever had.
            " AND state = 'running'"
            " AND (SELECT tenant FROM clients WHERE clients.client_id = operations.client_id) = ?",
            tenant,
        )

    def clients_with_samples(self) -> list[ClientRow]:
        """Return the clients with samples that wait, first the longest wait."""
        rows = self._rows(
            "SELECT client_id FROM operations WHERE state IN ('queued', 'running') AND kind = 'sample'"
            " AND state = 'queued' GROUP BY client_id ORDER BY MIN(submitted)"
        )
        found = [self.client(str(client)) for (client,) in rows]
        return [each for each in found if each is not None]

    def running_samples(self) -> list[OperationRow]:
        """Return the samples of all clients that have their package and no result."""
        where = "state IN ('queued', 'running') AND kind = 'sample' AND state = 'running' AND package <> ''"
        return self._all(OperationRow, where)

    def changes(self, client_id: str, since: int, limit: int, most_bytes: int) -> tuple[list[OperationRow], bool]:
        """Return operations whose newest change has a revision above ``since``, in the order of the changes.

        Returns: as many as are within both bounds, but one if there is one; and whether these are all.
        """
        where = "client_id = ? AND revision > ? ORDER BY revision LIMIT ?"
        sizes = f"SELECT LENGTH(payload) + LENGTH(result) + LENGTH(error) FROM operations WHERE {where}"
        totals = list(accumulate(int(size) for (size,) in self._rows(sizes, client_id, since, limit + 1)))
        some = max(1, min(limit, bisect_right(totals, most_bytes)))
        return self._all(OperationRow, where, client_id, since, some), some >= len(totals)

    def change_operation(self, row: OperationRow, **values: Any) -> None:
        """Change columns of an operation, in the store and in ``row``."""
        self._update("operations", values, {"client_id": row.client_id, "number": row.number})
        for name, value in values.items():
            setattr(row, name, value)

    def queued_by_kind(self) -> dict[str, int]:
        """Return how many operations wait for their turn, by kind."""
        # Both terms, since the first has an index.
        where = "state IN ('queued', 'running') AND state = 'queued'"
        rows = self._rows(f"SELECT kind, COUNT(*) FROM operations WHERE {where} GROUP BY kind")
        return {str(kind): int(count) for kind, count in rows}

    def oldest_open(self) -> float | None:
        """Return when the oldest open operation was submitted; None if none is open."""
        ((oldest,),) = self._rows("SELECT MIN(submitted) FROM operations WHERE state IN ('queued', 'running')")
        return None if oldest is None else float(oldest)

    # Sent batches

    def count_ids(self, client_id: str, step: int, ids: Sequence[bytes], most: int) -> bytes | None:
        """Count a use of each id in a step; return an id that may not be used there, else None.

        If it returns one, the transaction's part is to be undone.

        Args:
            ids: none twice.
        """
        for start in range(0, len(ids), _IDS_AT_ONCE):
            some = ids[start : start + _IDS_AT_ONCE]
            values = [value for each in some for value in (client_id, each, step)]
            statement = _COUNT_IDS.format(rows=", ".join(["(?, ?, 1, ?)"] * len(some)))
            counted = {bytes(found) for (found,) in self._rows(statement, *values, most)}
            if len(counted) < len(some):
                return next(each for each in some if each not in counted)
        return None

    def used_in_step(self, client_id: str, example: bytes) -> tuple[int, int]:
        """Return how often an id was used, and in which step last; (0, -1) if never."""
        found = self._rows("SELECT count, last_step FROM used_ids WHERE client_id = ? AND id = ?", client_id, example)
        return (int(found[0][0]), int(found[0][1])) if found else (0, -1)

    def batches_from(self, client_id: str, step: int) -> list[BatchRow]:
        """Return the batches of a step and of all later steps, in the order they were sent."""
        return self._all(BatchRow, "client_id = ? AND step >= ? ORDER BY number", client_id, step)

    def number_of_batches(self, client_id: str, step: int) -> int:
        """Return how many batches were sent for a step."""
        return self._number("SELECT COUNT(*) FROM batches WHERE client_id = ? AND step = ?", client_id, step)

    def batch_bytes(self, tenant: str) -> int:
        """Return the bytes of all batches that a tenant's clients have sent."""
        return self._number("SELECT COALESCE(SUM(size), 0) FROM batches WHERE tenant = ?", tenant)

    def batch_files(self) -> set[str]:
        """Return the files of all batches that a driver may ask for."""
        status = "(SELECT status FROM clients WHERE clients.client_id = batches.client_id)"
        rows = self._rows(f"SELECT file FROM batches WHERE {status} NOT IN ('TERMINATED', 'FORGOTTEN')")
        return {str(file) for (file,) in rows}

    # Artifacts

    def artifact(self, client_id: str, number: int) -> ArtifactRow | None:
        """Return an artifact."""
        return self._one(ArtifactRow, "client_id = ? AND number = ?", client_id, number)

    def number_of_artifacts(self, client_id: str) -> int:
        """Return how many artifacts a client has, or will have once its open saves are done."""
        saved = self._number("SELECT COUNT(*) FROM artifacts WHERE client_id = ?", client_id)
        return saved + self._number(f"SELECT COUNT(*) FROM operations WHERE {_OPEN} AND kind = 'save_state'", client_id)

    def artifact_of(self, client_id: str, model_digest: str) -> ArtifactRow | None:
        """Return the newest artifact of a client that has these parameters."""
        where = "client_id = ? AND model_digest = ? ORDER BY number DESC LIMIT 1"
        return self._one(ArtifactRow, where, client_id, model_digest)

    def artifacts(self, client_id: str, limit: int) -> list[ArtifactRow]:
        """Return the newest artifacts of a client, in the order they were made."""
        where = "client_id = ? ORDER BY number DESC LIMIT ?"
        return self._all(ArtifactRow, where, client_id, limit)[::-1]

    # Statements

    def _update(self, table: str, values: dict[str, Any], where: dict[str, Any]) -> None:
        changes, place = ", ".join(f"{name} = ?" for name in values), " AND ".join(f"{name} = ?" for name in where)
        self._database.run(f"UPDATE {table} SET {changes} WHERE {place}", [*values.values(), *where.values()])

    def _all(self, row_type: type[R], where: str, *values: Any) -> list[R]:
        table = _NAMES[row_type]
        make: Any = _client if row_type is ClientRow else row_type
        rows = [list(found) for found in self._database.run(f"{_SELECT[table]} {where}", values)]
        for row in rows:
            for at, kind in _TYPED[table]:
                row[at] = kind(row[at])
        return [make(*row) for row in rows]

    def _one(self, row_type: type[R], where: str, *values: Any) -> R | None:
        found = self._all(row_type, where, *values)
        return found[0] if found else None

    def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._database.run(statement, values)

    def _number(self, statement: str, *values: Any) -> int:
        return int(self._rows(statement, *values)[0][0])
