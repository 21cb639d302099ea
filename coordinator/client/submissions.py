"""The way of operations to the service: one thread of a client sends them, in the order in which they were submitted.

Guarantee: an operation is never sent before one that was submitted earlier. Where it is open if one arrived, all that
wait behind it fail as well, since they might otherwise arrive without it.

Guarantee: no step is charged without a batch that its caller believes to be in it. Where a batch was not taken, an
``optim_step`` that was submitted before its caller saw that fails with the same cause, and so does all behind it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import Connection, growing_pauses, is_no_answer
from raycloak.coordinator.client.futures import Resolver, ServiceFuture, failure_of, is_seen
from raycloak.metrics.errors import RaycloakError
from raycloak.metrics.service_errors import (
    FutureCancelledError,
    FutureFailedError,
    ServiceConnectionError,
    ServiceError,
    ServiceRateLimitedError,
    ServiceServerError,
    ServiceStateError,
)

_LOGGER: Final = logging.getLogger(__name__)

MakeCall = Callable[[], tuple[str, Any]]
"""Returns the method and the request (see `Connection.call`) of a submission, right before it is sent."""


@dataclass(slots=True)
class _Submission:
    """A submission that waits. ``place``: how many were made before it."""

    future: ServiceFuture[Any]
    call: MakeCall
    is_batch: bool
    place: int


@dataclass(slots=True)
class _Fault:
    """A batch that was not taken, or may not have been.

    Attributes:
        futures: of the batch, and of all that was not sent with it or for it; who has seen the end of one knows of the
            fault.
        has_step: whether one of them is an ``optim_step``; what follows would come into its step.
        known_from: place of the first submission that was made in that knowledge; None if none was.
    """

    error: ServiceError
    futures: list[ServiceFuture[Any]]
    has_step: bool = False
    known_from: int | None = None


@dataclass(eq=False)
class Submissions:
    """The submissions of one client.

    Args:
        resolver: of the client's futures.
        absorb: is given each operation that the service took.
        cancel: asks the service to cancel an operation, by its future.
    """

    _connection: Connection
    _resolver: Resolver
    _absorb: Callable[[wire.Operation], None]
    _cancel: Callable[[ServiceFuture[Any]], object]

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Submission] = deque()
        self._made = 0
        self._faults: list[_Fault] = []
        self._sending: ServiceFuture[Any] | None = None
        self._to_cancel = self._ends = self._drops = False
        self._thread: threading.Thread | None = None

    def put(self, future: ServiceFuture[Any], call: MakeCall, *, is_batch: bool = False) -> None:
        """Submit; returns at once.

        Args:
            is_batch: whether it sends examples of the next step.

        Raises:
            ServiceStateError: ``closed`` after `end`.
        """
        with self._changed:
            if self._ends:
                remedy = "Attach again with ServiceClient.get_client."
                closed = ServiceStateError("closed", "this training client is closed.", remedy)
                self._resolver.end(future.idempotency_key, error=closed)
                raise closed
            for fault in self._faults:
                if fault.known_from is None and any(map(is_seen, fault.futures)):
                    fault.known_from = self._made
            self._waiting.append(_Submission(future, call, is_batch, self._made))
            self._made += 1
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
            place = next((number for number, each in enumerate(waiting) if each.future is future), None)
            if is_sending:
                self._to_cancel = True
                self._changed.notify_all()
                begin = end = 0
            elif place is not None:
                begin, end = place, place + 1
            else:
                return "sent"
            if future.kind == "optim_step":
                end = len(waiting)
            self._waiting = deque(waiting[:begin] + waiting[end:])
        for each in waiting[begin:end]:
            self._resolver.end(each.future.idempotency_key, error=not_sent(each.future.kind))
        return "sending" if is_sending else "withdrawn"

    def fail_waiting(self, error: ServiceError) -> None:
        """Give all that were not sent ``error``, and send them no more."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            self._note_lost(waiting, error)
        for each in waiting:
            self._resolver.end(each.future.idempotency_key, error=error)

    def end(self, *, send: bool) -> None:
        """Take no more submissions; send those that wait, or fail them as cancelled. The thread ends afterwards."""
        with self._changed:
            self._ends, self._drops = True, not send
            dropped = [] if send else list(self._waiting)
            if not send:
                self._waiting.clear()
            self._changed.notify_all()
        for each in dropped:
            self._resolver.end(each.future.idempotency_key, error=not_sent(each.future.kind))

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
                submission = self._waiting.popleft()
                future = submission.future
                if (failure := failure_of(future)) is not None:
                    # With all that were pending, before it was here: it is not sent, as its caller was told.
                    self._note_lost([submission], failure)
                    continue
                fault = self._fault_before(submission)
                self._sending, self._to_cancel = (future if fault is None else None), False
            if fault is not None:
                self._resolver.end(future.idempotency_key, error=_behind(future.kind, fault.error))
                continue
            error, lost = self._send(submission), [submission]
            with self._changed:
                self._sending = None
                to_cancel = self._to_cancel and error is None
                # It may have been taken; those behind it might arrive without it.
                if error is not None and (is_no_answer(error) or isinstance(error, ServiceServerError)):
                    lost += self._waiting
                    self._waiting.clear()
                # Before the caller hears of it. One that the caller cancelled is meant to be left out.
                if error is not None and not isinstance(error, FutureCancelledError):
                    self._note_lost(lost, error)
            if error is not None:
                self._refused(lost, error)
            if to_cancel:
                try:
                    self._cancel(future)
                except ServiceError as failure:
                    _LOGGER.warning("%s was taken and could not be cancelled: %s", future.operation_id, failure)

    def _note_lost(self, lost: Sequence[_Submission], error: ServiceError) -> None:
        """Note a fault if a batch is among submissions that end with ``error``; the lock is held."""
        if any(each.is_batch for each in lost):
            has_step = any(each.future.kind == "optim_step" for each in lost)
            self._faults.append(_Fault(error, [each.future for each in lost], has_step))

    def _fault_before(self, submission: _Submission) -> _Fault | None:
        """Return the fault for which a submission is not sent, if there is one; the lock is held."""
        # What comes next was submitted later, so its caller knows too.
        self._faults = [each for each in self._faults if each.known_from is None or submission.place < each.known_from]
        is_step = submission.future.kind == "optim_step"
        found = [each for each in self._faults if is_step or each.has_step]
        for each in found:
            each.futures.append(submission.future)
            each.has_step |= is_step
        return next(iter(found), None)

    def _send(self, submission: _Submission) -> ServiceError | None:
        try:
            self._absorb(self._answer(submission))
        except ServiceError as error:
            return error
        except RaycloakError as error:  # while a batch was sealed
            return FutureFailedError(error.code, error.message, error.remedy)
        except Exception as error:
            _LOGGER.exception("an operation could not be sent")
            return FutureFailedError("not_sent", f"the operation could not be sent ({type(error).__name__}).")
        return None

    def _answer(self, submission: _Submission) -> wire.Operation:
        """Return the service's answer; a submission that came too early for the tenant's rate is sent again.

        Raises:
            FutureCancelledError: it was cancelled while it waited for its time.
        """
        method, request = submission.call()
        until, pauses = time.monotonic() + self._connection.patience_s, growing_pauses()
        while True:
            try:
                operation: wire.Operation = self._connection.call(method, request)
            except ServiceRateLimitedError as error:
                pause = max(error.retry_after_s or 0.0, next(pauses))
                if time.monotonic() + pause > until:
                    raise
            else:
                return operation
            with self._changed:
                if self._changed.wait_for(lambda: self._to_cancel or self._drops, pause):
                    raise not_sent(submission.future.kind)

    def _refused(self, lost: Sequence[_Submission], error: ServiceError) -> None:
        """End the first of ``lost`` with ``error``, after those that were not sent for it."""
        first, *others = lost
        for each in others:
            message = "the operation was not sent: whether an earlier one was taken is not known."
            remedy = "Look at TrainingClient.futures() for what the service took, and submit the rest again."
            not_known = ServiceConnectionError("not_sent", message, remedy, error.request_id)
            self._resolver.end(each.future.idempotency_key, error=not_known)
        self._resolver.end(first.future.idempotency_key, error=error)


def not_sent(kind: str) -> FutureCancelledError:
    """Return the error of an operation that was cancelled before it left this process."""
    return FutureCancelledError("cancelled", f"{kind} was cancelled before it was sent; it cost nothing.")


def _behind(kind: str, cause: ServiceError) -> FutureFailedError:
    message = f"{kind} was not sent, as a batch before it was not taken: {cause.message}"
    remedy = "Nothing was charged for it. Send the batch again, then optim_step."
    error = FutureFailedError(cause.code, message, remedy, cause.request_id)
    error.__cause__ = cause
    return error
