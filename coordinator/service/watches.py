"""The watchers of clients: who is to be told that a client has changed, with bounded memory for each.

What is in the store is not lost here: a watcher that was told too much at once reads it from the store. Progress and
tokens are kept for a while, and a watcher that falls behind with them is cut.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.limits import WATCH_BYTES
from raycloak.coordinator.service.operations import operation_to_wire
from raycloak.coordinator.service.ports import News, Stored
from raycloak.coordinator.service.store import OperationRow, OperationState

_PASSING_BYTES: Final = WATCH_BYTES // 2
"""Of pieces of progress and text that wait for one watcher."""
_ROWS_BYTES: Final = WATCH_BYTES // 4
"""Of operations that wait for one watcher, while as many are written; one of them may have a text of megabytes. Of more
the store is read."""
_PIECE_BYTES: Final = 64
"""Of a piece beside its content. As a message it would take a kilobyte, most of it for 30 bytes."""
_ROW_BYTES: Final = 1024
"""Of an operation beside its content, measured: 0.8 KiB."""
_LATER_S: Final = 0.1
"""A change that ends no operation is told within this time: no future waits for it, and most are soon outdated."""
_ENDED: Final = (OperationState.DONE, OperationState.FAILED, OperationState.CANCELLED)


class ClientWatch:
    """A watcher of one client. For the event loop's thread.

    It is told of every change from the moment that it is open. So what it read from the store then, and what it was
    told, is together everything.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told = asyncio.Event()
        self._passing: deque[bytes] = deque()
        self._passing_bytes = 0
        self.is_behind = False
        # Of what is in the store: what was told and is not written, and whether the store is to be read instead.
        self._rows: dict[int, OperationRow] = {}
        self._client_changed = 0
        self._newest_end = 0
        self._must_read = False
        self._timer: asyncio.TimerHandle | None = None
        self.look()  # what is in the store already is to be read first

    def tell(self, change: wire.Change | Stored) -> None:
        """Take changes that are in the store, or one that is not."""
        if isinstance(change, Stored):
            self._keep(change)
            return
        piece = change.SerializeToString()
        size = len(piece) + _PIECE_BYTES
        if self._passing_bytes + size > _PASSING_BYTES:
            self.is_behind = True
        else:
            self._passing.append(piece)
            self._passing_bytes += size
        self._told.set()

    def _keep(self, stored: Stored) -> None:
        self._client_changed = stored.client_changed
        for row in stored.operations:
            self._rows[row.number] = row
            if row.state in _ENDED:
                self._newest_end = max(self._newest_end, row.revision)
                self._told.set()
        # The request is not on the wire, and yet in memory.
        size = sum(_ROW_BYTES + len(row.payload) + len(row.result) + len(row.error) for row in self._rows.values())
        if size > _ROWS_BYTES:
            self._rows.clear()
            self.look()
        elif self._timer is None:
            self._timer = self._loop.call_later(_LATER_S, self.look)

    def look(self) -> None:
        """Have the store read."""
        self._must_read = True
        self._told.set()

    async def wait(self, timeout: float | None) -> bool:
        """Wait until there is something; False if there is nothing in time."""
        if self._told.is_set():
            self._told.clear()
            return True
        try:
            # Not `asyncio.wait_for`: before Python 3.12 it may swallow a cancellation, and who left would stay.
            async with asyncio.timeout(timeout):
                await self._told.wait()
        except TimeoutError:
            return False
        self._told.clear()
        return True

    def passing(self) -> Iterator[wire.Change]:
        """Take the changes that are not durable, each when it is asked for."""
        for _ in range(len(self._passing)):
            piece = self._passing.popleft()
            self._passing_bytes -= len(piece) + _PIECE_BYTES
            yield wire.Change.FromString(piece)

    def stored(self, since: int) -> list[wire.Change] | None:
        """Take the changes above revision ``since`` up to the newest end of an operation; None to read the store.

        Guarantee: changes are told in their order, and none is left out between two that are told.
        """
        until, self._newest_end = self._newest_end, 0
        # The client itself is in the store alone.
        if self._must_read or since < self._client_changed < until:
            self._must_read = False
            self._rows.clear()
            self.end()
            return None
        ready = [row for row in self._rows.values() if row.revision <= until]
        for row in ready:
            del self._rows[row.number]
        ready.sort(key=lambda row: row.revision)
        return [wire.Change(operation=operation_to_wire(row)) for row in ready if row.revision > since]

    def end(self) -> None:
        """Wait for nothing more that is due later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Watches:
    """All watchers. `publish` is for any thread, everything else for the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._of: dict[str, list[ClientWatch]] = {}

    def open(self, client_id: str) -> ClientWatch:
        """Return a new watcher of a client."""
        watch = ClientWatch(self._loop)
        # A new list, as `publish` may look at the old one in another thread.
        self._of[client_id] = [*self._of.get(client_id, ()), watch]
        return watch

    def close(self, client_id: str, watch: ClientWatch) -> None:
        """Forget a watcher."""
        watch.end()
        left = [each for each in self._of[client_id] if each is not watch]
        if left:
            self._of[client_id] = left
        else:
            del self._of[client_id]

    def wake(self) -> None:
        """Have all watchers look around."""
        for watches in self._of.values():
            for watch in watches:
                watch.look()

    @property
    def number(self) -> int:
        """The number of watchers."""
        return sum(len(each) for each in list(self._of.values()))

    def publish(self, news: Sequence[News]) -> None:
        """Tell watchers the news of their clients."""
        if any(client_id in self._of for client_id, _ in news):
            with suppress(RuntimeError):  # a loop that was closed: nobody waits there
                self._loop.call_soon_threadsafe(self._tell, news)

    def _tell(self, news: Sequence[News]) -> None:
        for client_id, change in news:
            for watch in self._of.get(client_id, ()):
                watch.tell(change)
