"""The stream of one client's changes, which one thread follows across restarts of the service."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import Connection, growing_pauses, is_no_answer
from raycloak.coordinator.client.futures import Resolver
from raycloak.metrics.service_errors import (
    FutureFailedError,
    ServiceAuthenticationError,
    ServiceError,
    ServiceQueueFullError,
    ServiceRateLimitedError,
    ServiceServerError,
)

_LOGGER: Final = logging.getLogger(__name__)
_STEADY_S: Final = 5.0
"""A stream that lasted so long was no failure to open one."""


class Changes:
    """The changes of a client, from a revision on.

    Args:
        client: as it was when its changes began to be missed.
        receive: is given each change.
        interrupted: is called when changes that are not durable may have been missed.
        lost: is given the error after which nothing is followed any more, until the next `start`.
    """

    def __init__(
        self,
        connection: Connection,
        resolver: Resolver,
        client: wire.Client,
        receive: Callable[[wire.Change], None],
        interrupted: Callable[[], None],
        lost: Callable[[ServiceError], None],
    ) -> None:
        self._connection = connection
        self._resolver = resolver
        self._client_id = client.client_id
        self._seen = client.revision
        self._receive = receive
        self._interrupted = interrupted
        self._lost = lost
        self._lock = threading.Lock()
        self._call: Any = None
        self._generation = 0
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Follow the changes, if that is not done already."""
        with self._lock:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="raycloak-changes", daemon=True)
                self._thread.start()

    def rewind(self, revision: int) -> None:
        """Have the changes above ``revision`` sent again, if it was passed."""
        with self._lock:
            if revision < self._seen:
                self._seen = revision
                self._generation += 1
                if self._call is not None:
                    self._call.cancel()

    def end(self) -> None:
        """Follow no longer, for good."""
        with self._lock:
            self._ended = True
            if self._call is not None:
                self._call.cancel()

    def _run(self) -> None:
        self._resolver.runs_in_this_thread()
        try:
            error = self._follow()
        except Exception as defect:
            # Futures that nobody follows would never end.
            _LOGGER.exception("the changes of %s can no longer be followed", self._client_id)
            error = FutureFailedError("not_followed", f"its changes could not be read ({type(defect).__name__}).")
        with self._lock:
            self._thread = None
            ended = self._ended
        if error is not None and not ended:
            self._lost(error)

    def _follow(self) -> ServiceError | None:
        """Read streams until the end, or until an error that no new stream would mend."""
        pauses, fails_since = growing_pauses(), 0.0
        while True:
            begun, pause, heard, failed = time.monotonic(), 0.0, False, None
            with self._lock:
                generation, since = self._generation, self._seen
            try:
                request = wire.WatchRequest(client_id=self._client_id, since=since)
                for change in self._connection.stream("Watch", request, partial(self._opened, generation)):
                    heard = True
                    self._take(change, generation)
            except ServiceError as error:
                failed = error
            with self._lock:
                if self._ended:
                    return None
                rewound = generation != self._generation
            was_open = heard or time.monotonic() - begun > _STEADY_S
            if was_open or rewound:
                pauses, fails_since = growing_pauses(), 0.0
            if failed is not None and not rewound:
                # From now on: the stream may have lasted for hours before.
                fails_since = fails_since or time.monotonic()
                # A stream ends with its token, whose file may hold another one by now: the call below asks with that.
                may_go_on = _mends(failed) or (was_open and isinstance(failed, ServiceAuthenticationError))
                if not may_go_on or self._is_over(fails_since):
                    return failed
                pause = getattr(failed, "retry_after_s", None) or 0.0
            self._interrupted()
            if self._connection.pause(max(pause, next(pauses))):
                return None
            # A call with an answer tells a quiet stream of a service that runs from one of a service that is gone.
            try:
                client = self._connection.call("GetClient", wire.ClientRequest(client_id=self._client_id))
            except ServiceError as error:
                fails_since = fails_since or time.monotonic()
                # The connection has waited for an answer already.
                if is_no_answer(error) or not _mends(error) or self._is_over(fails_since):
                    return error
            else:
                self._receive(wire.Change(client=client))

    def _is_over(self, fails_since: float) -> bool:
        return time.monotonic() - fails_since > self._connection.patience_s

    def _opened(self, generation: int, call: Any) -> None:
        with self._lock:
            self._call = call
            # A rewind may have come after the request was made and before there was a call to cancel.
            if self._ended or generation != self._generation:
                call.cancel()

    def _take(self, change: wire.Change, generation: int) -> None:
        self._receive(change)
        revision = revision_of(change)
        with self._lock:
            # What an older stream says would undo a rewind.
            if generation == self._generation:
                self._seen = max(self._seen, revision)


def revision_of(change: wire.Change) -> int:
    """Return the revision of a change; 0 of one that is not durable."""
    what = change.WhichOneof("what")
    return getattr(change, what).revision if what in ("operation", "client") else 0


def _mends(error: ServiceError) -> bool:
    """Return whether another stream may go on where one ended with ``error``."""
    passing = (ServiceQueueFullError, ServiceRateLimitedError, ServiceServerError)
    return is_no_answer(error) or isinstance(error, passing)
