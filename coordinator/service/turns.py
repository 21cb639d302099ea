"""The desk's thread: calls, reports and time come to the desk one after the other, and many share one transaction.

Each call alone would wait for the disk. Calls that wait at the same time share that wait, and are answered when all of
it is on disk.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from raycloak.coordinator.service.desk import Desk
from raycloak.coordinator.service.operations import RETRY_S
from raycloak.metrics.errors import RaycloakError
from raycloak.metrics.service_errors import ServiceQueueFullError, ServiceServerError

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
MOST_AT_ONCE: Final = 64  # calls in one transaction, so that none waits for many others
_TICK_S: Final = 0.5
"""How often the desk looks at the time; nothing that it decides by time is due to the second."""


@dataclass(slots=True)
class _Turn:
    call: Callable[[], Any]
    done: "asyncio.Future[Any] | Future[Any] | None"
    result: Any = None
    error: BaseException | None = None
    otherwise: Callable[[], Any] | None = None

    def settle(self) -> None:
        """Hand the outcome to the caller, if there is one that still waits; for the thread of the caller's loop."""
        if self.done is None:
            if self.error is not None:
                _LOG.error("a report could not be taken", exc_info=self.error)
            return
        is_left = (
            self.done.done() if isinstance(self.done, asyncio.Future) else not self.done.set_running_or_notify_cancel()
        )
        if self.error is not None and not is_left:
            self.done.set_exception(self.error)
        elif not is_left:
            self.done.set_result(self.result)


class Turns:
    """The one thread that asks the desk.

    Guarantee: no answer leaves, and no driver is told, before the records that it rests on are on disk. If the store
    fails, every call is refused from then on, as what it has is unknown: the service is to be started again.

    Args:
        most_waiting: calls that may wait; more are refused. Reports of drivers are never refused.
    """

    def __init__(self, desk: Desk, most_waiting: int) -> None:
        self._desk = desk
        self._most = most_waiting
        self._waiting: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._on_failure: Callable[[], Any] = lambda: None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="desk", daemon=True)
        # First, whoever calls before the start.
        self._waiting.put(_Turn(desk.begin, None))

    def start(self) -> None:
        """Begin to work; the desk goes on where it ended."""
        self._thread.start()

    def when_failed(self, told: Callable[[], Any]) -> None:
        """Call ``told`` once, from the desk's thread, when nothing can be recorded any more."""
        self._on_failure = told

    async def ask(self, call: Callable[[], T]) -> T:
        """Make a call of the desk and return its answer.

        Raises:
            ServiceQueueFullError: ``busy``. ServiceServerError: ``store_failed``. Else as ``call`` raises.
        """
        if self._waiting.qsize() >= self._most:
            raise ServiceQueueFullError("busy", "too many calls wait.", "Ask again later.", retry_after_s=RETRY_S)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.put(_Turn(call, done))
        return await done

    def put(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call; return its future answer. For any thread."""
        done: Future[T] = Future()
        self._waiting.put(_Turn(call, done))
        return done

    def tell(self, call: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
        """Queue a call whose answer nobody waits for, such as a driver's report. For any thread.

        Args:
            otherwise: called in a later turn if ``call`` raises: what a report was to finish would wait for ever.
        """
        self._waiting.put(_Turn(call, None, otherwise=otherwise))

    def close(self) -> None:
        """End the thread after the calls that wait."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        ends, ticked = False, time.monotonic()
        while not ends:
            batch: list[_Turn] = []
            try:
                item = self._waiting.get(timeout=_TICK_S)
                while item is not None and len(batch) < MOST_AT_ONCE:
                    batch.append(item)
                    item = self._waiting.get_nowait()
                ends = item is None
                if item is not None:
                    batch.append(item)
            except queue.Empty:
                pass
            # Also while calls never cease: clients wait for what is due by time alone.
            if not batch or time.monotonic() - ticked >= _TICK_S:
                batch.append(_Turn(self._desk.tick, None))
                ticked = time.monotonic()
            self._make(batch)
            _settle(batch)
            for each in batch:
                if each.error is not None and each.otherwise is not None and self.failure is None:
                    self._waiting.put(_Turn(each.otherwise, None))

    def _make(self, batch: list[_Turn]) -> None:
        """Make calls in one transaction. An error of one belongs to it alone, and undoes what it did."""
        if self.failure is None:
            try:
                with self._desk.book.turn():
                    for each in batch:
                        try:
                            # A tick decides nothing that could be refused.
                            with nullcontext() if each.call == self._desk.tick else self._desk.book.part():
                                each.result = each.call()
                        except Exception as error:
                            each.error = error
                            if isinstance(error, RaycloakError) and error.code == "store_failed":
                                raise
            # Whatever it is, drivers may not know what the store says, and a thread that died would answer nobody.
            except Exception as error:  # noqa: BLE001
                _LOG.exception("a turn could not be ended: the service ends")
                self.failure = error
                # Its loop is closed where the server has ended before. A thread that died here would answer nobody.
                with suppress(RuntimeError):
                    self._on_failure()
        if self.failure is not None:
            message, remedy = "the service cannot write its record.", "The operator has to start it again."
            for each in batch:
                each.error = ServiceServerError("store_failed", message, remedy)


def _settle(batch: list[_Turn]) -> None:
    """Hand out the outcomes of a turn. An event loop is woken once for all of its callers: each time costs a turn."""
    replies: dict[asyncio.AbstractEventLoop, list[_Turn]] = {}
    for each in batch:
        if isinstance(each.done, asyncio.Future):
            replies.setdefault(each.done.get_loop(), []).append(each)
        else:
            each.settle()
    for loop, calls in replies.items():
        with suppress(RuntimeError):  # a loop that was closed: nobody waits there
            loop.call_soon_threadsafe(_settle_here, calls)


def _settle_here(calls: list[_Turn]) -> None:
    for each in calls:
        each.settle()
