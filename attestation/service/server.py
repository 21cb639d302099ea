"""The gRPC evidence service: Challenge, Attest, ReleaseKeys, Roster and Log over mutual TLS on attested keys.

An event loop in its own thread reads and writes. Its calls go to the orchestrator one after another, in one more thread
(`attestation/service/queue.py`). A peer that is slow, silent or half open holds a coroutine or a socket, never one of
those threads. The server also answers health checks (``grpc.health.v1``) and reflection.

Nothing of a request is read before its sender is identified and there is room for it.

Guarantee: fails closed. A call that cannot be decided, recorded or answered in time is refused. A service that could
not write its record refuses everything from then on.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message as ProtoMessage

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.rate_limit import RateLimit
from raycloak.attestation.orchestrator.peer_desk import Peer, PeerDesk
from raycloak.attestation.service import evidence_pb2 as wire
from raycloak.attestation.service.calls import (
    HEALTH,
    REFLECTION,
    Context,
    Health,
    HeldRoom,
    Room,
    Rooms,
    handlers,
    listen,
    next_request,
    reflection_of,
)
from raycloak.attestation.service.connections import ConnectionGuard, GuardedCall, network_of, peer_host
from raycloak.attestation.service.fair_lock import Turn
from raycloak.attestation.service.grpc_status import status_of, trailing
from raycloak.attestation.service.limits import ServiceLimits, UnreadAnswers
from raycloak.attestation.service.memory import require_memory
from raycloak.attestation.service.queue import Afterwards, ServiceQueue
from raycloak.attestation.service.wire_messages import from_wire, release_to_wire, to_wire
from raycloak.attestation.trust.channel import server_credentials
from raycloak.metrics.collectors import ServiceFigures
from raycloak.metrics.errors import EvidenceError, ProtocolError, RaycloakError
from raycloak.metrics.registry import ANSWERED

R = TypeVar("R", bound=ProtoMessage)
Q = TypeVar("Q", bound=ProtoMessage)
_SERVICE: Final = wire.DESCRIPTOR.services_by_name["Evidence"]
_OF_LOAD: Final = ("busy", "deadline", "rate_limited")
"""Refusals that say nothing of who asks: a peer that had to connect again would add to the load."""
START_DEADLINE_S: Final = 30.0


@dataclass(slots=True)
class _PeerCall:
    """A call of a peer that may ask.

    Attributes:
        network: that the peer's calls are counted under.
        until: the time on the monotonic clock at which it has to have its answer.
    """

    peer: Peer
    network: str
    until: float
    guarded: GuardedCall
    held: list[HeldRoom]

    def left_s(self) -> float:
        """Return the seconds until the call is late."""
        return self.until - time.monotonic()


class _EvidenceServicer:
    """Turns wire messages into calls of the desk, under the limits."""

    def __init__(self, desk: PeerDesk, queue: ServiceQueue, limits: ServiceLimits, guard: ConnectionGuard) -> None:
        self._desk = desk
        self._queue = queue
        self._limits = limits
        self._guard = guard
        self._by_identity = RateLimit(limits.identity_rate, limits.identity_burst, time.monotonic)
        self._by_address = RateLimit(limits.address_rate, limits.address_burst, time.monotonic)
        self._waiting: Counter[str] = Counter()
        self._room, self._rooms = Room(limits.request_bytes), Rooms(limits.request_address_bytes)
        self._unread = UnreadAnswers(limits)
        self._reflection = reflection_of(_SERVICE)
        self.calls: Counter[tuple[str, str]] = Counter()

    def methods(self) -> SimpleNamespace:
        """Return the methods of the service, by name."""
        calls: dict[str, Callable[[Peer, Any], Any]] = {
            "Challenge": self._challenge,
            "Attest": self._attest,
            "ReleaseKeys": self._release_keys,
            "Roster": self._roster,
            "Log": self._log,
        }
        return SimpleNamespace(**{name: partial(self._answer, name, call) for name, call in calls.items()})

    def _challenge(self, peer: Peer, request: wire.ChallengeRequest) -> wire.ChallengeReply:
        challenge = self._desk.challenge(peer, request.member_id, request.role, request.identity_key)
        return wire.ChallengeReply(challenge=challenge.encode(), server_certificate=self._desk.end.certificate)

    def _attest(self, peer: Peer, request: wire.AttestRequest) -> wire.AttestReply:
        result = self._desk.attest(peer, from_wire(request.presentation), request.channel_signature)
        return wire.AttestReply(result=result.encode())

    def _release_keys(self, peer: Peer, request: wire.ReleaseKeysRequest) -> Afterwards[wire.ReleaseKeysReply]:
        wanted = tuple(request.virtual_workers)
        grant = self._desk.grant_keys(peer, request.member_id, request.epoch, wanted, request.seen)
        return Afterwards(lambda: release_to_wire(self._desk.proved(grant)))

    def _roster(self, peer: Peer, request: wire.RosterRequest) -> wire.RosterReply:
        data = from_wire(request.data_commitments) if request.HasField("data_commitments") else None
        roster, presentations = self._desk.roster(peer, request.member_id, data)
        return wire.RosterReply(roster=to_wire(roster), presentations=[to_wire(each) for each in presentations])

    def _log(self, peer: Peer, request: wire.LogRequest) -> wire.LogReply:
        entries, head = self._desk.log_lines(peer, request.member_id, request.start, request.limit)
        paths = {}
        if request.HasField("entry"):
            paths["inclusion"] = self._desk.inclusion(request.entry.sequence, request.entry.size)
        if request.HasField("growth"):
            paths["consistency"] = self._desk.consistency(request.growth.old_size, request.growth.size)
        proofs = {name: wire.TreePath(size=size, hashes=hashes) for name, (size, hashes) in paths.items()}
        return wire.LogReply(entries=entries, head=head, **proofs)

    async def ServerReflectionInfo(  # noqa: N802
        self, requests: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """Say what is served here, to a peer that may ask."""
        async with self._asked("reflection", context) as asked:

            async def all_of() -> AsyncIterator[Any]:
                while (request := await self._request(requests, asked)) is not None:
                    yield request

            async for answer in self._reflection.ServerReflectionInfo(all_of(), context):
                asked.guarded.admit()
                yield answer

    async def _answer(
        self, method: str, call: Callable[[Peer, Q], R | Afterwards[R]], requests: AsyncIterator[Q], context: Context
    ) -> R:
        """Return the answer to ``call``; a refusal becomes a status, with its code in the trailing metadata."""
        async with self._asked(method, context) as asked:
            request = await self._request(requests, asked)
            if request is None:
                raise ProtocolError("malformed", "the call ended without a request")
            answer = await self._queue.run(lambda: call(asked.peer, request), asked.left_s())
            self._count(context, asked.network, answer.ByteSize())
            asked.guarded.admit()
            return answer
        raise AssertionError("unreachable: a refusal raises")

    @asynccontextmanager
    async def _asked(self, method: str, context: Context) -> AsyncIterator[_PeerCall]:
        """Let a call in; a refusal, also of what is done in the block, ends it."""
        refusal: RaycloakError
        with self._guard.call(context.peer()) as guarded:
            try:
                peer = self._peer(context)
                left = context.time_remaining()
                deadline_s = self._limits.deadline_s if left is None else min(left, self._limits.deadline_s)
                asked = _PeerCall(peer, network_of(peer.address), time.monotonic() + deadline_s, guarded, [])
                with self._counted(asked.network):
                    try:
                        yield asked
                    finally:
                        for held in asked.held:
                            held.leave()
                self.calls[method, ANSWERED] += 1
                return
            except RaycloakError as error:
                refusal = error
            except Exception:
                # gRPC would tell the peer the text of the exception.
                logging.getLogger(__name__).exception("a call of the evidence service failed")
                refusal = EvidenceError(
                    "release_denied", "the service failed at this call.", "See the log of the service."
                )
            if refusal.code not in _OF_LOAD:
                guarded.refuse()
        self.calls[method, refusal.code] += 1
        await context.abort(status_of(refusal), refusal.code, trailing(refusal))

    @contextmanager
    def _counted(self, network: str) -> Iterator[None]:
        """Count a call that waits; EvidenceError ``busy`` if too many do."""
        if self._waiting[network] >= self._limits.calls_per_address:
            raise EvidenceError("busy", "too many calls of this address wait.", "Ask again later.")
        if self._waiting.total() >= self._limits.pending_calls:
            raise EvidenceError("busy", "too many calls wait.", "Ask again later.")
        self._waiting[network] += 1
        try:
            yield
        finally:
            self._waiting[network] -= 1
            if not self._waiting[network]:
                del self._waiting[network]

    async def _request(self, requests: AsyncIterator[Q], asked: _PeerCall) -> Q | None:
        """Read the next request, once there is room for it; None if there is none."""
        for held in asked.held:
            held.leave()
        try:
            # How long it is, nobody knows before it is whole.
            async with asyncio.timeout(asked.left_s()):
                size = self._limits.message_bytes
                asked.held = [await self._rooms.take(asked.network, size)]
                asked.held.append(await self._room.take(size))
        except TimeoutError:
            raise EvidenceError("busy", "other calls had all room for requests.", "Ask again later.") from None
        request = await next_request(requests, asked.left_s())
        for held in asked.held:
            held.shrink(0 if request is None else request.ByteSize())
        return request

    def _count(self, context: Context, address: str, size: int) -> None:
        """Count an answer until it has left; EvidenceError ``busy`` if too much is unread."""
        if not self._unread.takes(address, size):
            raise EvidenceError("busy", "answers to this peer, or to all, are not read.", "Read them, or ask later.")
        context.add_done_callback(lambda _: self._unread.left(address, size))

    def _peer(self, context: Context) -> Peer:
        """Return the peer at the other end; EvidenceError ``rate_limited`` if it has no calls left."""
        pem = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
        host = peer_host(context.peer())
        peer, identity = _identified(host, pem)
        if not (self._by_address.allows(network_of(host)) and self._by_identity.allows(identity)):
            raise EvidenceError("rate_limited", "this peer asks more than the service allows.", "Ask again later.")
        return peer


@lru_cache(maxsize=1024)  # each call of a channel asks it again
def _identified(host: str, pem: bytes) -> tuple[Peer, bytes]:
    """Return a peer, and the identity that its calls are counted under.

    Each channel has a fresh certificate, so its issuer counts. Anybody can write another's name there; the address is
    part of the identity, so that this uses up nobody else's calls.
    """
    peer = Peer.of(host, pem)
    return peer, digest(host.encode() + b" " + peer.certificate.issuer.public_bytes())


class EvidenceServer:
    """A running service: it serves a desk from when it is made until :meth:`stop`.

    Args:
        bind: ``host:port``; port 0 takes a free one.
        turn: held while the orchestrator is asked; its other callers must hold it too.

    Attributes:
        port: TCP port that it listens on.
        memory: that its calls take at most, for a reader.

    Raises:
        ConfigError: ``bind`` if the address cannot be listened on; ``memory`` if the limits allow more than there is.
    """

    def __init__(
        self,
        desk: PeerDesk,
        manifest_digest: bytes,
        bind: str,
        limits: ServiceLimits | None = None,
        turn: Turn | None = None,
    ) -> None:
        limits = limits or ServiceLimits()
        self.memory = require_memory(limits.most_bytes, limits.memory_bytes)
        self._guard = ConnectionGuard(limits.bounds())
        self._queue = ServiceQueue(desk.transaction, turn or Turn(), limits.pending_calls)
        self._servicer = _EvidenceServicer(desk, self._queue, limits, self._guard)
        self._health = Health()
        self._at_stop: list[Callable[[], None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="evidence-service", daemon=True)
        self._thread.start()
        credentials = server_credentials(desk.end, manifest_digest)
        starting = asyncio.run_coroutine_threadsafe(self._serve(bind, credentials, limits), self._loop)
        try:
            self.port = starting.result(START_DEADLINE_S)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._queue.close()
            raise
        self._guard.start(self.port)

    @property
    def failure(self) -> BaseException | None:
        """Return the error that ended the record, after which every call is refused; None while the service works."""
        return self._queue.failure

    def figures(self, collateral_ends: float = 0.0) -> ServiceFigures:
        """Return what a scrape shows, without waiting for the orchestrator."""
        queue = self._queue.figures()
        return ServiceFigures(
            works=self.failure is None,
            # A copy, because the loop's thread counts on.
            calls=tuple((*answer, count) for answer, count in sorted(self._servicer.calls.items())),
            waits=queue.waits,
            waited_seconds=queue.waited_s,
            waiting=queue.waiting,
            oldest_unix_s=time.time() - queue.oldest_s,
            collateral_expiry_unix_s=collateral_ends,
        )

    def at_stop(self, call: Callable[[], None]) -> None:
        """Register a call that :meth:`stop` makes before it stops the service."""
        self._at_stop.append(call)

    def stop(self, grace_s: float = 1.0) -> None:
        """Finish the calls under way for up to ``grace_s`` seconds, then close."""
        for call in self._at_stop:
            call()
        self._guard.stop()
        # A loop that hangs must not keep the process from ending.
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(grace_s), self._loop).result(grace_s + START_DEADLINE_S)
        # The loop ends after the queue, whose last answers need it.
        self._queue.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_DEADLINE_S)
        self._loop.close()

    async def _serve(self, bind: str, credentials: Any, limits: ServiceLimits) -> int:
        self._server = grpc.aio.server(options=limits.bounds().options())
        served = ((_SERVICE, self._servicer.methods()), (REFLECTION, self._servicer), (HEALTH, self._health))
        for service, answers in served:
            self._server.add_generic_rpc_handlers((handlers(service, answers),))
        port = listen(self._server, bind, credentials)
        self._queue.when_failed(partial(setattr, self._health, "is_serving", False))
        await self._server.start()
        # Last, so that nobody is sent here before calls are answered.
        self._health.is_serving = True
        return port

    async def _end(self, grace_s: float) -> None:
        self._health.is_serving = False
        await self._server.stop(grace_s)
