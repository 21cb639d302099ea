"""ServiceFuture: the one future of all operations, and its resolution by one thread for all of a client's futures.

A future holds no lock, no event and no thread while nobody waits for it, so ten thousand of them are cheap.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from raycloak.metrics.service_errors import FutureCancelledError, FutureTimeoutError, ServiceError, ServiceStateError

T = TypeVar("T")
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class ServiceFuture(Generic[T]):
    """The outcome of an operation, which may not be there yet. Only a `TrainingClient` makes one.

    It can be waited for by threads (`result`) and by coroutines of any event loop (``await``), at the same time.

    Attributes:
        kind: ``forward_backward``, ``optim_step``, ``save_state``, ``load_state`` or ``sample``.
        operation_id: of the service; empty until the service has taken the operation.
        idempotency_key: of the caller; the operation is done once, however often it is sent.
    """

    kind: str
    idempotency_key: str
    _cancel: "Cancel"
    _lock: threading.Lock  # one for all futures of a client
    _resolver: "Resolver"
    operation_id: str = field(default="", init=False)
    _ended: bool = field(default=False, init=False)
    _seen: bool = field(default=False, init=False)
    _result: T | None = field(default=None, init=False)
    _error: ServiceError | None = field(default=None, init=False)
    _callbacks: "list[Callable[[ServiceFuture[T]], object]] | None" = field(default=None, init=False)

    def __repr__(self) -> str:
        state = "pending" if not self._ended else "done" if self._error is None else self._error.code
        return f"<ServiceFuture {self.kind} {self.operation_id or 'not sent'}: {state}>"

    def done(self) -> bool:
        """Return whether the operation has ended, in whatever way."""
        return self._ended

    def cancelled(self) -> bool:
        """Return whether the operation was cancelled."""
        return isinstance(self._error, FutureCancelledError)

    def cancel(self) -> bool:
        """Ask the service to cancel the operation; return False if it had ended before.

        An operation that waits is cancelled at once, with those that depend on it. A step that runs is left between two
        micro-batches, with the ``optim_step`` behind it. What was charged stays charged, and the
        `FutureCancelledError` says whether its step was. A step that is computed by then goes on, and True is returned
        all the same: the future has its result. On data that is sent, ``optim_step`` is what runs.

        Raises:
            ServiceConnectionError: the service does not answer; it may have cancelled the operation.
        """
        return not self._ended and self._cancel(self)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the outcome and return the result.

        Args:
            timeout: seconds to wait; without limit if None.

        Raises:
            FutureTimeoutError: ``timeout``; the operation goes on, and can be waited for again.
            FutureCancelledError: the operation was cancelled.
            ServiceError: the operation failed; the class and the code say why.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result  # type: ignore[return-value]  # None is then a T

    def exception(self, timeout: float | None = None) -> ServiceError | None:
        """Wait for the outcome and return the error, or None after a success; errors of the wait as `result`."""
        if not self._ended:
            self._wait(timeout)
        self._seen = True
        return self._error

    def add_done_callback(self, callback: Callable[["ServiceFuture[T]"], object]) -> None:
        """Call ``callback`` with this future when the operation has ended; now, if it has.

        It runs in a thread that serves all futures of the client, so it must not wait for one of them. What it
        raises is logged and dropped.
        """
        with self._lock:
            if not self._ended:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        call_safely(callback, self)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop. A task that is cancelled while it waits leaves the operation alone."""
        if not self._ended:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()

            def wake(_: "ServiceFuture[T]") -> None:
                try:
                    loop.call_soon_threadsafe(_set, waiter)
                except RuntimeError:
                    _LOGGER.debug("the event loop that waited for %s is closed", self.operation_id)

            self.add_done_callback(wake)
            try:
                yield from waiter
            finally:
                self._forget(wake)
        return self.result(0)

    def _wait(self, timeout: float | None) -> None:
        if self._resolver.is_this_thread():
            message = "a callback waits for a future, in the thread that resolves futures."
            raise ServiceStateError("would_deadlock", message, "Wait in another thread.")
        event = threading.Event()

        def wake(_: "ServiceFuture[T]") -> None:
            event.set()

        self.add_done_callback(wake)
        if not event.wait(timeout):
            self._forget(wake)
            # It may have ended between the two.
            if not self._ended:
                message = f"{self.kind} did not end within {timeout:g} s; it goes on."
                raise FutureTimeoutError("timeout", message, "Wait again, or cancel it.")

    def _forget(self, callback: Callable[["ServiceFuture[T]"], object]) -> None:
        with self._lock:
            if self._callbacks:
                self._callbacks = [each for each in self._callbacks if each is not callback] or None

    def _end(self, result: T | None, error: ServiceError | None) -> None:
        """Give the future its outcome, once; a second outcome changes nothing."""
        with self._lock:
            if self._ended:
                return
            self._result, self._error = result, error
            # Last: readers look at it without the lock.
            self._ended = True
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            call_safely(callback, self)


Cancel = Callable[[ServiceFuture[Any]], bool]
"""Asks for the cancellation of an operation; returns whether it had not ended yet."""


def call_safely(callback: Callable[..., object], *arguments: Any) -> None:
    """Call a user's function; what it raises is logged, since it must not end the thread that serves the futures."""
    try:
        callback(*arguments)
    except Exception:
        _LOGGER.exception("a callback failed")


def _set(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def is_seen(future: ServiceFuture[Any]) -> bool:
    """Return whether a caller has got the outcome."""
    return future._seen


def failure_of(future: ServiceFuture[Any]) -> ServiceError | None:
    """Return the error that a future has ended with, if it has; its caller has not got it by that."""
    return future._error


class Resolver:
    """The pending futures of a client, by key and by operation.

    Guarantee: an outcome reaches every future once, whether the reply to its submission or the stream of changes has it
    first.
    """

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()  # of the dictionary
        self._outcome_lock = threading.Lock()  # of the futures
        self._by_key: dict[str, ServiceFuture[Any]] = {}
        # Not numbers of threads: another thread gets the number of one that has ended.
        self._here = threading.local()

    def make(self, kind: str, key: str) -> ServiceFuture[Any]:
        """Return the pending future of ``key``; the one that is there, if there is one."""
        with self._lock:
            known = self._by_key.get(key)
            if known is None:
                known = ServiceFuture(kind, key, self._cancel, self._outcome_lock, self)
                self._by_key[key] = known
            return known

    def find(self, key: str) -> ServiceFuture[Any] | None:
        """Return the pending future of ``key``, if any."""
        with self._lock:
            return self._by_key.get(key)

    def end(self, key: str, result: Any = None, error: ServiceError | None = None) -> None:
        """Give the future of ``key`` its outcome, if it is pending."""
        with self._lock:
            future = self._by_key.pop(key, None)
        if future is not None:
            future._end(result, error)

    def pending(self) -> list[ServiceFuture[Any]]:
        """Return the pending futures, in the order in which they were made."""
        with self._lock:
            return list(self._by_key.values())

    def fail_all(self, error: ServiceError) -> None:
        """Give every pending future ``error``."""
        for future in self.pending():
            self.end(future.idempotency_key, error=error)

    def wait_until_none(self, timeout_s: float) -> bool:
        """Wait until nothing is pending, at most ``timeout_s``; return whether that is so."""
        deadline = time.monotonic() + timeout_s
        for future in self.pending():
            try:
                future.exception(max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError:
                return False
        return True

    def runs_in_this_thread(self) -> None:
        """Remember the calling thread as one without which futures do not end."""
        self._here.serves = True

    def is_this_thread(self) -> bool:
        """Return whether the caller is such a thread."""
        return getattr(self._here, "serves", False)
