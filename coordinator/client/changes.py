"""The stream of one client's changes, which one thread follows across restarts of the service.

Pieces of text of running samples are among them: each caller gets its whole text once, in order, though pieces may be
lost.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import Connection, growing_pauses, is_no_answer
from raycloak.coordinator.client.futures import Resolver, call_safely
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


@dataclass(eq=False)
class Changes:
    """The changes of a client, from a revision on.

    Args:
        client: as it was when its changes began to be missed.
        receive: is given each change.
        interrupted: is called when changes that are not durable may have been missed.
        lost: is given the error after which nothing is followed any more, until the next `start`.
    """

    _connection: Connection
    _resolver: Resolver
    _client: wire.Client
    _receive: Callable[[wire.Change], None]
    _interrupted: Callable[[], None]
    _lost: Callable[[ServiceError], None]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _call: Any = field(default=None, init=False)
    _generation: int = field(default=0, init=False)
    _ended: bool = field(default=False, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._seen = self._client.revision

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
            _LOGGER.exception("the changes of %s can no longer be followed", self._client.client_id)
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
                request = wire.WatchRequest(client_id=self._client.client_id, since=since)
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
                client = self._connection.call("GetClient", wire.ClientRequest(client_id=self._client.client_id))
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


OnToken = Callable[[int, str], object]
"""Is called with the number of a completion and a piece of its text."""


@dataclass
class _Stream:
    on_token: OnToken
    operation_id: str = ""
    has_gap: bool = False
    delivered: dict[int, str] = field(default_factory=dict)


class TokenStreams:
    """The samples of one client that are being written.

    The service keeps no pieces, so a broken connection loses its pieces. From then on pieces are left out, and the
    rest of the text follows at the end, from the result.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}

    def expect(self, key: str, on_token: OnToken) -> None:
        """Deliver the pieces of the sample that is submitted under ``key``."""
        with self._lock:
            self._streams[key] = _Stream(on_token)

    def named(self, key: str, operation_id: str) -> None:
        """Learn the operation id of ``key``."""
        with self._lock:
            if key in self._streams:
                self._streams[key].operation_id = operation_id

    def interrupted(self) -> None:
        """Count pieces as lost from here on."""
        with self._lock:
            for stream in self._streams.values():
                stream.has_gap = True

    def piece(self, tokens: wire.Tokens) -> None:
        """Deliver a piece."""
        with self._lock:
            stream = next((each for each in self._streams.values() if each.operation_id == tokens.operation_id), None)
            if stream is None:
                # It may be of a sample whose id is not known yet.
                for each in self._streams.values():
                    each.has_gap = each.has_gap or not each.operation_id
                return
        if not stream.has_gap:
            _deliver(stream, tokens.completion, tokens.text)

    def end(self, key: str, texts: list[str]) -> None:
        """Deliver what is left of the completions' whole ``texts``, and forget the sample."""
        with self._lock:
            stream = self._streams.pop(key, None)
        if stream is None:
            return
        for number, text in enumerate(texts):
            before = stream.delivered.get(number, "")
            if text.startswith(before) and text != before:
                _deliver(stream, number, text[len(before) :])


def _deliver(stream: _Stream, number: int, text: str) -> None:
    stream.delivered[number] = stream.delivered.get(number, "") + text
    call_safely(stream.on_token, number, text)
