"""The clients and their operations as rows, changed in turns, and what is told of their changes.

Every change is made inside `ClientBook.turn`, which makes it durable and only then tells drivers and watchers. What a
future depends on is in the store alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from google.protobuf.message import Message as ProtoMessage

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import error_to_wire
from raycloak.coordinator.service.operations import client_status
from raycloak.coordinator.service.ports import Measured, News, Stored
from raycloak.coordinator.service.store import (
    ClientRow,
    OperationKind,
    OperationRow,
    OperationState,
    Store,
    client_columns,
)
from raycloak.metrics.service_errors import ServiceError

_SHOWN: Final = {"finished", "charged", "epsilon", "facts", "error", "run_id", "digest", "ending"}
"""Columns of a client whose change watchers are told, besides its status on the wire."""


class ClientBook:
    """The record of all clients. For one thread at a time, but for `publish`.

    Its ``store`` is for others to read, and to add what is no operation.

    Args:
        publish: told of all changes of clients, of one turn at once: each costs a turn of another thread.
        measured: told of every operation that ended.
        clock: Unix time.
    """

    def __init__(
        self,
        store: Store,
        publish: Callable[[Sequence[News]], None],
        measured: Measured,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.publish = publish
        self._measured = measured
        self.clock = clock
        self._after: list[Callable[[], None]] = []
        self._news: list[News] = []
        self._changed: dict[int, OperationRow] = {}  # operations with a new revision, of one `changing`

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Make all of the block's changes durable, or none if it raises; then tell drivers and watchers."""
        try:
            with self.store.transaction():
                yield
        except BaseException:
            self._after.clear()
            raise
        after, self._after = self._after, []
        for act in after:
            act()
        news, self._news = self._news, []
        if news:
            self.publish(news)

    @contextmanager
    def part(self) -> Iterator[None]:
        """Make a part of a turn, which is undone alone if it raises."""
        mark = len(self._after)
        try:
            with self.store.part():
                yield
        except BaseException:
            del self._after[mark:]
            raise

    def later(self, act: Callable[[], None]) -> None:
        """Have something done once the turn is durable."""
        self._after.append(act)

    def show(self, client: ClientRow, phase: str, step: int, rate: float | None = None, operation: str = "") -> None:
        """Tell watchers of progress, which is not durable; ``rate`` is in tokens per second."""
        progress = wire.Progress(
            operation_id=operation, step=step, epsilon=client.epsilon, tokens_per_second=rate, phase=phase
        )
        self.later(lambda: self._news.append((client.client_id, wire.Change(progress=progress))))

    @contextmanager
    def changing(self, client: ClientRow) -> Iterator[set[str]]:
        """Write what the block changes in ``client`` at its end, and tell watchers.

        Yields: a set, which has the names of the changed columns after the block.
        """
        before, status, names = client_columns(client), client_status(client), set[str]()
        self._changed = {}
        yield names
        changed = {name: now for name, now in client_columns(client).items() if now != before[name]}
        if client_status(client) != status or changed.keys() & _SHOWN:
            client.revision += 1
            client.changed = client.revision
            changed |= {"revision": client.revision, "changed": client.changed}
        if changed:
            self.store.change_client(client, **changed)
        names.update(changed)
        if "revision" in changed:
            stored = Stored(tuple(self._changed.values()), client.changed)
            self.later(lambda: self._news.append((client.client_id, stored)))

    def enter(
        self, client: ClientRow, kind: OperationKind, key: str, mark: bytes, payload: bytes = b"", package: str = ""
    ) -> OperationRow:
        """Record a new operation at the end of the queue."""
        client.revision += 1
        operation = OperationRow(
            client_id=client.client_id,
            number=client.next_number,
            idempotency_key=key,
            fingerprint=mark,
            kind=kind,
            state=OperationState.QUEUED,
            revision=client.revision,
            submitted=self.clock(),
            payload=payload,
            package=package,
        )
        self.store.add(operation)
        self._changed[operation.number] = operation
        client.next_number += 1
        client.open += 1
        client.open_bytes += len(payload)
        return operation

    def run(self, client: ClientRow, operation: OperationRow) -> None:
        """Note that an operation is handed to whoever does it."""
        client.revision += 1
        self.store.change_operation(
            operation, state=OperationState.RUNNING, step=operation.step, handed=self.clock(), revision=client.revision
        )
        self._changed[operation.number] = operation

    def finish(
        self,
        client: ClientRow,
        operation: OperationRow,
        state: OperationState,
        result: ProtoMessage | None = None,
        error: ServiceError | None = None,
    ) -> None:
        """End an operation, whose request nobody needs any more."""
        client.revision += 1
        client.open -= 1
        client.open_bytes -= len(operation.payload)
        now = self.clock()
        queued_s = (operation.handed or now) - operation.submitted
        running_s = now - operation.handed if operation.handed else None
        self.later(lambda: self._measured.operation_ended(operation.kind, state, queued_s, running_s))
        self.store.change_operation(
            operation,
            state=state,
            step=operation.step,
            revision=client.revision,
            ended=now,
            payload=b"",
            result=result.SerializeToString() if result is not None else b"",
            error=error_to_wire(error).SerializeToString() if error is not None else b"",
        )
        self._changed[operation.number] = operation
