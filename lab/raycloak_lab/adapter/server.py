"""The gRPC server of one adapter, under limits on everything that a client can fill.

The channel is mutual TLS on identity keys: the server's is the worker's attested key, the client's is one that the
settings name. `docs/encrypted-adapters.md` has the limits.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import grpc

from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.service.calls import handlers, listen
from raycloak.attestation.service.connections import WINDOW_BYTES, ConnectionBounds, ConnectionGuard, GuardedCall
from raycloak.attestation.service.grpc_status import status_of, trailing
from raycloak.attestation.service.memory import require_memory
from raycloak.attestation.trust.channel import ChannelEnd, is_channel_of, read_leaf, server_credentials
from raycloak.metrics.errors import EvidenceError, ProtocolError, RaycloakError, RefusedError
from raycloak.metrics.registry import ANSWERED
from raycloak_lab.adapter import adapter_pb2 as wire
from raycloak_lab.adapter.collector import AdapterFigures
from raycloak_lab.adapter.desk import AdapterDesk
from raycloak_lab.adapter.introduction import PIECE_BYTES, introduction_digest
from raycloak_lab.encrypted.parameters import ANSWER_BYTES, SET_F
from raycloak_lab.encrypted.seal_objects import require_size

Context: TypeAlias = Any
"""A `grpc.ServicerContext`; gRPC ships no types."""

# Requests at once, over all clients, each with a thread; more are refused before they are read.
_CALLS: Final = 16
# gRPC reads one message of every call ahead, whatever the number of calls.
_MESSAGE_BYTES: Final = 2 * PIECE_BYTES
_CALL_S: Final = 120.0
_CALLS_OF_CLIENT: Final = 4
# Calls over all clients whose answers have not left: each answer is in memory until its client reads it.
_OPEN: Final = 64
_BOUNDS: Final = ConnectionBounds(
    connections=128,
    per_address=32,
    calls=_CALLS_OF_CLIENT,
    message_bytes=_MESSAGE_BYTES,
    stranger_s=6.0,
    idle_s=120.0,
)
# Keys outlive their session's last second by at most this.
_SWEEP_S: Final = 10.0


SERVICE: Final = wire.DESCRIPTOR.services_by_name["Adapter"]
R = TypeVar("R")


class _Servicer:
    """The methods of the service, each of which reads its request itself: see `raycloak.attestation.service.calls`."""

    def __init__(self, desk: AdapterDesk, guard: ConnectionGuard) -> None:
        self._desk = desk
        self._guard = guard
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        self._threads: Counter[str] = Counter()
        self._answered: Counter[tuple[str, str]] = Counter()

    def answered(self) -> dict[tuple[str, str], int]:
        """Return how many calls were answered, by method and code."""
        with self._lock:
            return dict(self._answered)

    def open_calls(self, client: str) -> int:
        """Return how many calls of a client are open."""
        with self._lock:
            return self._open[client]

    def Describe(  # noqa: N802
        self, requests: Iterator[wire.DescribeRequest], context: Context
    ) -> wire.DescribeReply:
        def answer(client: str) -> wire.DescribeReply:
            _first(requests)
            facts = self._desk.facts
            return wire.DescribeReply(
                adapter_digest=facts.adapter_digest,
                parameter_set=SET_F.digest(),
                tokens=facts.shape.tokens,
                rank=facts.shape.rank,
                projections=[
                    wire.Projection(name=each.name, width_in=each.width_in, width_out=each.width_out, gain=each.gain)
                    for each in facts.projections
                ],
                tokens_left=self._desk.tokens_left(client),
                shared=facts.shared,
            )

        return self._answer("Describe", context, answer)

    def Begin(  # noqa: N802
        self, requests: Iterator[wire.BeginRequest], context: Context
    ) -> wire.BeginReply:
        def answer(client: str) -> wire.BeginReply:
            request = _first(requests)
            session, presented = self._desk.begin(client, request.contract, request.policy, request.challenge)
            signed = wire.SignedMessage(body=presented.body, signature=presented.signature)
            return wire.BeginReply(session=session, presentation=signed)

        return self._answer("Begin", context, answer)

    def Register(  # noqa: N802
        self, requests: Iterator[wire.RegisterRequest], context: Context
    ) -> wire.RegisterReply:
        def answer(client: str) -> wire.RegisterReply:
            first = _first(requests)
            sealed = _joined(first.sealed_keys, (each.sealed_keys for each in requests), self._desk.sealed_bytes)
            package = Envelope(body=first.package.body, signature=first.package.signature)
            release = KeyRelease(package=package, proof=first.proof, extends=tuple(first.extends))
            self._desk.register(client, first.session, release, first.fingerprint, sealed)
            return wire.RegisterReply()

        return self._answer("Register", context, answer)

    def Apply(self, requests: Iterator[wire.ApplyRequest], context: Context) -> wire.ApplyReply:  # noqa: N802
        def answer(client: str) -> wire.ApplyReply:
            first = _first(requests)
            names = list(first.projections)
            batch = _joined(first.batch, (each.batch for each in requests), self._desk.batch_bytes(names))
            answers, left = self._desk.apply(client, first.session, first.sequence, first.fingerprint, batch, names)
            return wire.ApplyReply(answers=answers, tokens_left=left)

        return self._answer("Apply", context, answer)

    def Close(  # noqa: N802
        self, requests: Iterator[wire.CloseRequest], context: Context
    ) -> wire.CloseReply:
        def answer(client: str) -> wire.CloseReply:
            request = _first(requests)
            self._desk.close(client, request.session)
            return wire.CloseReply()

        return self._answer("Close", context, answer)

    def _answer(self, method: str, context: Context, call: Callable[[str], R]) -> R:
        refusal: RaycloakError
        try:
            with self._guard.call(context.peer()) as guarded:
                client = self._client(context, guarded)
                self._count(client, context)
                # A stream that its client does not go on with ends, and gives its thread back.
                timer = threading.Timer(_CALL_S, context.cancel)
                timer.daemon = True
                timer.start()
                if not context.add_callback(timer.cancel):
                    # The call is over; nothing else would end the timer's thread before its time.
                    timer.cancel()
                with self._thread_of(client):
                    answer = call(client)
            self._note(method, ANSWERED)
            return answer
        except RaycloakError as error:
            refusal = error
        except grpc.RpcError:
            # The client left, or took too long, in the middle of its request.
            refusal = _cut_short()
        except Exception:
            # gRPC would tell the peer the text of the exception.
            logging.getLogger(__name__).exception("a call of the adapter's server failed")
            refusal = RefusedError("adapter_failed", "the server failed at this call.", "See the log of the server.")
        self._note(method, refusal.code)
        context.set_trailing_metadata(trailing(refusal))
        context.abort(status_of(refusal), refusal.code)
        raise AssertionError("unreachable: abort raises")

    def _note(self, method: str, code: str) -> None:
        with self._lock:
            self._answered[method, code] += 1

    def _client(self, context: Context, guarded: GuardedCall) -> str:
        """Return the client whose key certified the peer's end; EvidenceError ``peer_not_bound`` for anybody else."""
        leaf = read_leaf(next(iter(context.auth_context().get("x509_pem_cert", ())), b""))
        for key, name in self._desk.clients.items():
            if is_channel_of(leaf, key):
                guarded.admit()
                return name
        guarded.refuse()
        raise EvidenceError(
            "peer_not_bound",
            "this client's key is not one that the adapter serves.",
            "Give the adapter's owner what 'raycloak-lab adapter identity' prints.",
        )

    def _count(self, client: str, context: Context) -> None:
        """Count a call until its answer has left or its client has gone; RefusedError ``busy`` if there are too many.

        So a client that does not read its answers holds four of them, and no number of clients holds more than 64.
        """
        with self._lock:
            if self._open[client] >= _CALLS_OF_CLIENT:
                raise RefusedError("busy", "this client has answers to read first.", "Read them, or ask later.")
            if self._open.total() >= _OPEN:
                raise RefusedError("busy", "clients have too many answers to read first.", "Ask later.")
            self._open[client] += 1

        def left() -> None:
            with self._lock:
                self._open[client] -= 1

        if not context.add_callback(left):
            left()

    @contextmanager
    def _thread_of(self, client: str) -> Iterator[None]:
        """Count a call's thread inside the block; RefusedError ``busy`` if the client has too many.

        A call that its client left is open no more, but its thread still waits for the worker.
        """
        with self._lock:
            if self._threads[client] >= _CALLS_OF_CLIENT:
                raise RefusedError("busy", "this client left calls that are under way.", "Ask later.")
            self._threads[client] += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads[client] -= 1


def _first(requests: Iterator[R]) -> R:
    """Return the first message of a call; ProtocolError ``malformed`` if there is none."""
    for request in requests:
        return request
    raise _cut_short()


def _cut_short() -> ProtocolError:
    return ProtocolError("malformed", "the request ended before it was whole.", "Send all messages of a request.")


def _joined(first: bytes, rest: Iterable[bytes], expected: int) -> bytes:
    """Join the pieces of a stream; ProtocolError ``ciphertext_size`` as soon as they are too many."""
    joined = bytearray(first)
    for piece in rest:
        joined += piece
        if len(joined) > expected:
            break
    require_size(joined, expected)
    return bytes(joined)


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server.

    Attributes:
        port: TCP port that it listens on.
        open_calls: returns how many calls of a client are open, those with an answer that it did not read among them.
        figures: returns what a scrape shows.
        memory: that calls take at most, for a reader.
    """

    port: int
    memory: str
    open_calls: Callable[[str], int]
    figures: Callable[[], AdapterFigures]


@contextmanager
def _idle_sessions_end(desk: AdapterDesk) -> Iterator[None]:
    """End idle sessions inside the block, also where no client asks for anything any more."""
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(min(desk.idle_s / 2, _SWEEP_S)):
            # A worker that has gone has no keys; the next call of a client says so.
            with suppress(RaycloakError):
                desk.drop_idle()

    thread = threading.Thread(target=watch, name="idle adapter sessions", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextmanager
def serving(desk: AdapterDesk, end: ChannelEnd, bind: str) -> Iterator[Serving]:
    """Serve ``desk`` inside the block.

    Args:
        end: the worker's end of channels.
        bind: ``host:port``; port 0 takes a free one.

    Raises:
        ConfigError: ``bind`` if the address cannot be listened on; ``memory`` if calls may take more than there is.
    """
    memory = require_memory(_most_bytes(desk), None, "Serve it on a machine, or in a container, with more memory.")
    guard = ConnectionGuard(_BOUNDS)
    servicer = _Servicer(desk, guard)
    server = grpc.server(ThreadPoolExecutor(_CALLS), options=_BOUNDS.options(), maximum_concurrent_rpcs=_CALLS)
    server.add_generic_rpc_handlers((handlers(SERVICE, servicer),))
    port = listen(server, bind, server_credentials(end, introduction_digest(desk.facts.identity_key)))
    server.start()
    guard.start(port)
    try:
        with _idle_sessions_end(desk):
            yield Serving(port, memory, servicer.open_calls, lambda: desk.figures(servicer.answered()))
    finally:
        guard.stop()
        server.stop(1.0).wait()


def _most_bytes(desk: AdapterDesk) -> int:
    """Return the memory that all connections and calls may take: of a request its pieces and their whole."""
    requests, answers = _CALLS * (2 * desk.request_bytes + _MESSAGE_BYTES), _OPEN * ANSWER_BYTES
    return _BOUNDS.most_bytes + requests + answers + _OPEN * WINDOW_BYTES
