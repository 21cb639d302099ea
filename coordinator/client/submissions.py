"""The way of operations to the service: one thread of a client sends them, in the order in which they were submitted.

Guarantee: an operation is never sent before one that was submitted earlier. Where it is open if one arrived, all that
wait behind it fail as well, since they might otherwise arrive without it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import Connection, is_no_answer
from raycloak.coordinator.client.futures import Resolver, ServiceFuture
from raycloak.metrics.errors import RaycloakError
from raycloak.metrics.service_errors import (
    FutureCancelledError,
    FutureFailedError,
    ServiceConnectionError,
    ServiceError,
    ServiceServerError,
    ServiceStateError,
)

_LOGGER: Final = logging.getLogger(__name__)

MakeCall = Callable[[], tuple[str, Any]]
"""Returns the method and the request (see `Connection.call`) of a submission, right before it is sent."""


class Submissions:
    """The submissions of one client.

    Args:
        resolver: of the client's futures.
        absorb: is given each operation that the service took.
        cancel: asks the service to cancel an operation, by its future.
    """

    def __init__(
        self,
        connection: Connection,
        resolver: Resolver,
        absorb: Callable[[wire.Operation], None],
        cancel: Callable[[ServiceFuture[Any]], object],
    ) -> None:
        self._connection = connection
        self._resolver = resolver
        self._absorb = absorb
        self._cancel = cancel
        self._changed = threading.Condition()
        self._waiting: deque[tuple[ServiceFuture[Any], MakeCall]] = deque()
        self._sending: ServiceFuture[Any] | None = None
        self._to_cancel = False
        self._ends = False
        self._thread: threading.Thread | None = None

    def put(self, future: ServiceFuture[Any], call: MakeCall) -> None:
        """Submit; returns at once.

        Raises:
            ServiceStateError: ``closed`` after `end`.
        """
        with self._changed:
            if self._ends:
                self._resolver.end(future.idempotency_key, error=_closed())
                raise _closed()
            self._waiting.append((future, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raycloak-submissions", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def withdraw(self, future: ServiceFuture[Any]) -> Literal["withdrawn", "sending", "sent"]:
        """Take a submission back: ``withdrawn`` if it was not sent; one that is being sent is cancelled afterwards.

        With an ``optim_step`` all that follow are withdrawn, as the service does it: the next ``optim_step`` would else
        release what this one was to release.
        """
        with self._changed:
            waiting = list(self._waiting)
            is_sending = self._sending is future
            place = next((number for number, each in enumerate(waiting) if each[0] is future), None)
            if is_sending:
                self._to_cancel = True
                begin = end = 0
            elif place is not None:
                begin, end = place, place + 1
            else:
                return "sent"
            if future.kind == "optim_step":
                end = len(waiting)
            self._waiting = deque(waiting[:begin] + waiting[end:])
        for each, _ in waiting[begin:end]:
            self._resolver.end(each.idempotency_key, error=not_sent(each.kind))
        return "sending" if is_sending else "withdrawn"

    def fail_waiting(self, error: ServiceError) -> None:
        """Give all that were not sent ``error``, and send them no more."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        for future, _ in waiting:
            self._resolver.end(future.idempotency_key, error=error)

    def end(self, *, send: bool) -> None:
        """Take no more submissions; send those that wait, or fail them as cancelled. The thread ends afterwards."""
        with self._changed:
            self._ends = True
            dropped = [] if send else list(self._waiting)
            if not send:
                self._waiting.clear()
            self._changed.notify_all()
        for future, _ in dropped:
            self._resolver.end(future.idempotency_key, error=not_sent(future.kind))

    def join(self, timeout_s: float) -> None:
        """Wait, at most so long, until the thread has ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        self._resolver.runs_in_this_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    return
                future, call = self._waiting.popleft()
                self._sending, self._to_cancel = future, False
            error = self._send(call)
            with self._changed:
                self._sending = None
                to_cancel = self._to_cancel and error is None
            if error is not None:
                self._refused(future, error)
            if to_cancel:
                self._cancel_quietly(future)

    def _send(self, call: MakeCall) -> ServiceError | None:
        try:
            self._absorb(self._connection.call(*call()))
        except ServiceError as error:
            return error
        except RaycloakError as error:  # while a batch was sealed
            return FutureFailedError(error.code, error.message, error.remedy)
        except Exception as error:
            _LOGGER.exception("an operation could not be sent")
            return FutureFailedError("not_sent", f"the operation could not be sent ({type(error).__name__}).")
        return None

    def _refused(self, future: ServiceFuture[Any], error: ServiceError) -> None:
        # Before the caller hears of the first: what it submits then is a new beginning.
        if is_no_answer(error) or isinstance(error, ServiceServerError):
            self.fail_waiting(
                ServiceConnectionError(
                    "not_sent",
                    "the operation was not sent: whether an earlier one was taken is not known.",
                    "Look at TrainingClient.futures() for what the service took, and submit the rest again.",
                    error.request_id,
                )
            )
        self._resolver.end(future.idempotency_key, error=error)

    def _cancel_quietly(self, future: ServiceFuture[Any]) -> None:
        try:
            self._cancel(future)
        except ServiceError as error:
            _LOGGER.warning("%s was taken and could not be cancelled: %s", future.operation_id, error)


def not_sent(kind: str) -> FutureCancelledError:
    """Return the error of an operation that was cancelled before it left this process."""
    return FutureCancelledError("cancelled", f"{kind} was cancelled before it was sent; it cost nothing.")


def _closed() -> ServiceStateError:
    return ServiceStateError("closed", "this training client is closed.", "Attach again with ServiceClient.get_client.")
