"""The watchers of clients: who is to be told that a client has changed, with bounded memory for each.

What is in the store is not kept here: a watcher is told that there is something, and reads it from the store. Progress
and tokens are kept for a while, and a watcher that falls behind is cut.
"""

import asyncio
from collections import deque
from typing import Final

from raycloak.coordinator.client import service_pb2 as wire

MOST_KEPT: Final = 1024
"""Pieces of progress and text that wait for one watcher."""


class Watch:
    """A watcher of one client. For the event loop's thread."""

    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._told.set()  # what is in the store already is to be read first
        self._passing: deque[wire.Change] = deque()
        self.is_behind = False

    def tell(self, change: wire.Change | None) -> None:
        """Take a change that is not durable, or the word that there is a durable one."""
        if change is not None:
            if len(self._passing) >= MOST_KEPT:
                self.is_behind = True
            else:
                self._passing.append(change)
        self._told.set()

    async def wait(self, timeout: float | None) -> bool:
        """Wait until there is something; False if there is nothing in time."""
        try:
            # Not `asyncio.wait_for`: before Python 3.12 it may swallow a cancellation, and who left would stay.
            async with asyncio.timeout(timeout):
                await self._told.wait()
        except TimeoutError:
            return False
        self._told.clear()
        return True

    def passing(self) -> list[wire.Change]:
        """Take all changes that are not durable."""
        taken = list(self._passing)
        self._passing.clear()
        return taken


class Watches:
    """All watchers. `publish` is for any thread, everything else for the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._of: dict[str, list[Watch]] = {}

    def open(self, client_id: str) -> Watch:
        """Return a new watcher of a client."""
        watch = Watch()
        # A new list, as `publish` may look at the old one in another thread.
        self._of[client_id] = [*self._of.get(client_id, ()), watch]
        return watch

    def close(self, client_id: str, watch: Watch) -> None:
        """Forget a watcher."""
        left = [each for each in self._of[client_id] if each is not watch]
        if left:
            self._of[client_id] = left
        else:
            del self._of[client_id]

    def wake(self) -> None:
        """Have all watchers look around."""
        for client_id in list(self._of):
            self._tell(client_id, None)

    @property
    def number(self) -> int:
        """The number of watchers."""
        return sum(len(each) for each in list(self._of.values()))

    def publish(self, client_id: str, change: wire.Change | None) -> None:
        """Tell a client's watchers of a change; None stands for one that is in the store."""
        if client_id in self._of:
            self._loop.call_soon_threadsafe(self._tell, client_id, change)

    def _tell(self, client_id: str, change: wire.Change | None) -> None:
        for watch in self._of.get(client_id, ()):
            watch.tell(change)
