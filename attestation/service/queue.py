"""The queue of calls to the orchestrator, which executes them one after another, many in one transaction.

Each call alone would wait for the disk to confirm its record. Calls that wait at the same time share that wait: they
are executed in one transaction, and answered when it is on disk. They may defer work until then, such as a proof under
a signed head of the log. That work rests on the records of all of them.
"""

import asyncio
import queue
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from raycloak.attestation.service.fair_lock import Turn
from raycloak.metrics.errors import EvidenceError, RaycloakError
from raycloak.metrics.registry import DURATION_BUCKETS

T = TypeVar("T")
# The run waits for its turn while a batch executes, so a batch has a bound.
MAX_BATCH: Final = 32


@dataclass(frozen=True, slots=True)
class Afterwards(Generic[T]):
    """An answer that is made by ``call()``, once the records of the whole batch are on disk."""

    call: Callable[[], T]


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """The waits of a queue's calls.

    Attributes:
        waits: answered calls by how long they had waited, by the buckets of `DURATION_BUCKETS`; more in the last.
        waited_s: sum of their waits.
        waiting: calls that wait now, those in execution included.
        oldest_s: age of the one that has waited longest; 0 if none waits.
    """

    waits: tuple[int, ...]
    waited_s: float
    waiting: int
    oldest_s: float


@dataclass(slots=True)
class _Call:
    call: Callable[[], Any]
    until: float
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[Any]"
    result: Any = None
    error: BaseException | None = None

    def execute(self) -> None:
        """Make the call, unless it is too late; an error belongs to this call alone, and the batch continues."""
        if time.monotonic() >= self.until:
            self.error = _late()
        else:
            self._note(self.call)

    def finish(self) -> None:
        """Make an answer that was put off until the record is on disk."""
        if isinstance(self.result, Afterwards):
            self._note(self.result.call)

    def _note(self, call: Callable[[], Any]) -> None:
        try:
            self.result = call()
        except Exception as error:  # noqa: BLE001 - a caller waits, whatever the error
            self.error = error

    def expire(self) -> None:
        """Tell the waiting caller that it is too late."""
        if not self.done.done():
            self.done.set_exception(_late())

    def settle(self) -> None:
        """Hand the outcome to the caller, if it still waits."""
        if self.done.done():
            return
        if self.error is None:
            self.done.set_result(self.result)
        else:
            self.done.set_exception(self.error)


class ServiceQueue:
    """One thread that asks the orchestrator.

    Guarantee: no answer leaves before the records that it rests on are on disk. If a record cannot be written, its
    batch and every later call are refused, as memory and disk may differ from then on.

    Args:
        transaction: of the orchestrator.
        turn: held while the orchestrator is asked.
        max_pending: calls that may wait; more are refused.
    """

    def __init__(self, transaction: Callable[[], AbstractContextManager[None]], turn: Turn, max_pending: int) -> None:
        self._transaction = transaction
        self._turn = turn
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._max_pending = max_pending
        self._on_failure: Callable[[], Any] = lambda: None
        self.failure: BaseException | None = None
        # Arrivals of the calls that have no answer yet, in their order.
        self._arrivals: deque[float] = deque()
        self._waits = [0] * (len(DURATION_BUCKETS) + 1)
        self._waited_s = 0.0
        self._thread = threading.Thread(target=self._work, name="evidence-queue", daemon=True)
        self._thread.start()

    def when_failed(self, told: Callable[[], Any]) -> None:
        """Call ``told`` once, from the queue's thread, when nothing can be recorded any more."""
        self._on_failure = told

    def figures(self) -> QueueFigures:
        """Return how long calls wait; from any thread, and without waiting for the orchestrator."""
        # A copy, because the queue's thread may empty it meanwhile.
        arrivals = tuple(self._arrivals)
        oldest = time.monotonic() - arrivals[0] if arrivals else 0.0
        return QueueFigures(tuple(self._waits), self._waited_s, len(arrivals), oldest)

    async def run(self, call: Callable[[], T | Afterwards[T]], deadline_s: float) -> T:
        """Queue ``call`` and return its answer; an event loop must be running.

        Raises:
            EvidenceError: ``busy`` if too many calls wait. ``deadline`` without an answer in time; a call that has
                begun may still complete. ``release_denied`` once a record could not be written.
            BaseException: as ``call`` raises.
        """
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        item = _Call(call, now + deadline_s, loop, loop.create_future())
        if self._waiting.qsize() >= self._max_pending:
            raise EvidenceError("busy", "too many calls wait for the orchestrator.", "Ask again later.")
        # Before the thread can see the call, which it takes out again.
        self._arrivals.append(now)
        self._waiting.put(item)
        # Less than `asyncio.timeout` takes, which has to tell its own end from a cancellation.
        timer = loop.call_later(max(deadline_s, 0.0), item.expire)
        try:
            answer: T = await item.done
        finally:
            timer.cancel()
        return answer

    def close(self) -> None:
        """End the thread after the calls that wait."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, ends = [first], False
            while len(batch) < MAX_BATCH and not ends:
                try:
                    item = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    ends = True
                else:
                    batch.append(item)
            self._execute(batch)
            self._count(batch)
            # Only now, because the records of the batch are on disk.
            for item in batch:
                item.loop.call_soon_threadsafe(item.settle)
            if ends:
                return

    def _count(self, batch: list[_Call]) -> None:
        """Count the waits of calls that have their answer; a queue takes them in the order of their arrivals."""
        now = time.monotonic()
        for _ in batch:
            waited = now - self._arrivals.popleft()
            self._waits[bisect_left(DURATION_BUCKETS, waited)] += 1
            self._waited_s += waited

    def _execute(self, batch: list[_Call]) -> None:
        if self.failure is None:
            try:
                with self._turn:
                    with self._transaction():
                        for item in batch:
                            item.execute()
                    # Still in the turn: nothing may be logged between these proofs, which share one signed head.
                    for item in batch:
                        item.finish()
            except Exception as error:  # noqa: BLE001 - the record is not on disk, whatever the error
                self.failure = error
                self._on_failure()
        if self.failure is not None:
            for item in batch:
                item.error = EvidenceError(
                    "release_denied", "the orchestrator cannot write its record.", "See the log of the service."
                )


def _late() -> RaycloakError:
    return EvidenceError("deadline", "the orchestrator did not answer in time.", "Ask again.")
