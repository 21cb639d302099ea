"""The gRPC evidence service: Challenge, Attest, ReleaseKeys, Roster and Log over mutual TLS on attested keys.

An event loop in its own thread reads and writes. Its calls go to the orchestrator one after another, in one more thread
(`attestation/service/queue.py`). A peer that is slow, silent or half open holds a coroutine or a socket, never one of
those threads. The server also answers health checks (``grpc.health.v1``) and reflection.

Guarantee: fails closed. A call that cannot be decided, recorded or answered in time is refused. A service that could
not write its record refuses everything from then on.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import Any, Final, Self, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as aio_health
from grpc_reflection.v1alpha import reflection

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.rate_limit import RateLimit
from raycloak.attestation.orchestrator.peer_desk import Peer, PeerDesk
from raycloak.attestation.service import evidence_pb2 as wire
from raycloak.attestation.service.evidence_pb2_grpc import EvidenceServicer, add_EvidenceServicer_to_server
from raycloak.attestation.service.fair_lock import Turn
from raycloak.attestation.service.grpc_status import SERVICE_NAME, status_of, trailing
from raycloak.attestation.service.limits import ServiceLimits, UnreadAnswers
from raycloak.attestation.service.queue import Afterwards, ServiceQueue
from raycloak.attestation.service.wire_messages import from_wire, release_to_wire, to_wire
from raycloak.attestation.trust.channel import server_credentials
from raycloak.metrics.collectors import ServiceFigures
from raycloak.metrics.errors import ConfigError, EvidenceError, RaycloakError
from raycloak.metrics.registry import ANSWERED

R = TypeVar("R", bound=ProtoMessage)
Context: TypeAlias = Any
"""A `grpc.aio.ServicerContext`; gRPC ships no types."""
START_DEADLINE_S: Final = 30.0


class _Servicer(EvidenceServicer):
    """Turns wire messages into calls of the desk, under the limits."""

    def __init__(self, desk: PeerDesk, queue: ServiceQueue, limits: ServiceLimits) -> None:
        self._desk = desk
        self._queue = queue
        self._limits = limits
        self._by_identity = RateLimit(limits.identity_rate, limits.identity_burst, time.monotonic)
        self._by_address = RateLimit(limits.address_rate, limits.address_burst, time.monotonic)
        self._unread = UnreadAnswers(limits)
        self.calls: Counter[tuple[str, str]] = Counter()

    async def Challenge(self, request: wire.ChallengeRequest, context: Context) -> wire.ChallengeReply:  # noqa: N802
        def answer(peer: Peer) -> wire.ChallengeReply:
            challenge = self._desk.challenge(peer, request.member_id, request.role, request.identity_key)
            return wire.ChallengeReply(challenge=challenge.encode(), server_certificate=self._desk.end.certificate)

        return await self._answer("Challenge", context, answer)

    async def Attest(self, request: wire.AttestRequest, context: Context) -> wire.AttestReply:  # noqa: N802
        def answer(peer: Peer) -> wire.AttestReply:
            result = self._desk.attest(peer, from_wire(request.presentation), request.channel_signature)
            return wire.AttestReply(result=result.encode())

        return await self._answer("Attest", context, answer)

    async def ReleaseKeys(  # noqa: N802
        self, request: wire.ReleaseKeysRequest, context: Context
    ) -> wire.ReleaseKeysReply:
        def answer(peer: Peer) -> Afterwards[wire.ReleaseKeysReply]:
            wanted = tuple(request.virtual_workers)
            grant = self._desk.grant_keys(peer, request.member_id, request.epoch, wanted, request.seen)
            return Afterwards(lambda: release_to_wire(self._desk.proved(grant)))

        return await self._answer("ReleaseKeys", context, answer)

    async def Roster(self, request: wire.RosterRequest, context: Context) -> wire.RosterReply:  # noqa: N802
        def answer(peer: Peer) -> wire.RosterReply:
            data = from_wire(request.data_commitments) if request.HasField("data_commitments") else None
            roster, presentations = self._desk.roster(peer, request.member_id, data)
            return wire.RosterReply(roster=to_wire(roster), presentations=[to_wire(each) for each in presentations])

        return await self._answer("Roster", context, answer)

    async def Log(self, request: wire.LogRequest, context: Context) -> wire.LogReply:  # noqa: N802
        def answer(peer: Peer) -> wire.LogReply:
            entries, head = self._desk.log_lines(peer, request.member_id, request.start, request.limit)
            paths = {}
            if request.HasField("entry"):
                paths["inclusion"] = self._desk.inclusion(request.entry.sequence, request.entry.size)
            if request.HasField("growth"):
                paths["consistency"] = self._desk.consistency(request.growth.old_size, request.growth.size)
            proofs = {name: wire.TreePath(size=path.size, hashes=path.hashes) for name, path in paths.items()}
            return wire.LogReply(entries=entries, head=head, **proofs)

        return await self._answer("Log", context, answer)

    async def _answer(self, method: str, context: Context, call: Callable[[Peer], R | Afterwards[R]]) -> R:
        """Return the answer to ``call``; a refusal becomes a status, with its code in the trailing metadata."""
        refusal: RaycloakError
        try:
            peer = self._peer(context)
            left = context.time_remaining()
            deadline_s = self._limits.deadline_s if left is None else min(left, self._limits.deadline_s)
            answer = await self._queue.run(lambda: call(peer), deadline_s)
            self._count(context, network_of(peer.address), answer.ByteSize())
            self.calls[method, ANSWERED] += 1
            return answer
        except RaycloakError as error:
            refusal = error
        except Exception:
            # gRPC would tell the peer the text of the exception.
            logging.getLogger(__name__).exception("a call of the evidence service failed")
            refusal = EvidenceError("release_denied", "the service failed at this call.", "See the log of the service.")
        self.calls[method, refusal.code] += 1
        await context.abort(status_of(refusal), refusal.code, trailing(refusal))
        raise AssertionError("unreachable: abort raises")

    def _count(self, context: Context, address: str, size: int) -> None:
        """Count an answer until it has left; EvidenceError ``busy`` if too much is unread."""
        if not self._unread.takes(address, size):
            raise EvidenceError("busy", "answers to this peer, or to all, are not read.", "Read them, or ask later.")
        context.add_done_callback(lambda _: self._unread.left(address, size))

    def _peer(self, context: Context) -> Peer:
        """Return the peer at the other end; EvidenceError ``rate_limited`` if it has no calls left."""
        pem = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
        # gRPC percent-encodes the brackets of IPv6 addresses.
        host = unquote(context.peer()).rpartition(":")[0]
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


@lru_cache(maxsize=1024)
def network_of(host: str) -> str:
    """Return what the calls of an address are counted under: itself, or the /64 of an IPv6 address, one customer's."""
    try:
        address = IPv6Address(host.removeprefix("ipv6:").strip("[]"))
    except ValueError:
        return host
    return f"ipv4:{address.ipv4_mapped}" if address.ipv4_mapped else str(IPv6Network((int(address), 64), strict=False))


@dataclass(slots=True)
class EvidenceServer:
    """A running service.

    Attributes:
        port: TCP port that it listens on.
    """

    port: int
    _loop: asyncio.AbstractEventLoop
    _thread: threading.Thread
    _stop: Callable[[float], Coroutine[Any, Any, None]]
    _queue: ServiceQueue
    _calls: Mapping[tuple[str, str], int]
    _at_stop: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        desk: PeerDesk,
        manifest_digest: bytes,
        bind: str,
        limits: ServiceLimits | None = None,
        turn: Turn | None = None,
    ) -> Self:
        """Serve ``desk`` at ``bind`` (``host:port``; port 0 takes a free one) until :meth:`stop`.

        Args:
            turn: held while the orchestrator is asked; its other callers must hold it too.

        Raises:
            ConfigError: ``bind`` if the address cannot be listened on.
        """
        limits = limits or ServiceLimits()
        queue = ServiceQueue(desk.transaction, turn or Turn(), limits.pending_calls)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="evidence-service", daemon=True)
        thread.start()
        servicer = _Servicer(desk, queue, limits)
        starting = asyncio.run_coroutine_threadsafe(_serve(servicer, desk, manifest_digest, bind, limits, queue), loop)
        try:
            port, stop = starting.result(START_DEADLINE_S)
        except BaseException:
            loop.call_soon_threadsafe(loop.stop)
            queue.close()
            raise
        return cls(port, loop, thread, stop, queue, servicer.calls)

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
            calls=dict(self._calls),
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
        # A loop that hangs must not keep the process from ending.
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._stop(grace_s), self._loop).result(grace_s + START_DEADLINE_S)
        # The loop ends after the queue, whose last answers need it.
        self._queue.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_DEADLINE_S)
        self._loop.close()


async def _serve(
    servicer: _Servicer,
    desk: PeerDesk,
    manifest_digest: bytes,
    bind: str,
    limits: ServiceLimits,
    queue: ServiceQueue,
) -> tuple[int, Callable[[float], Coroutine[Any, Any, None]]]:
    server = grpc.aio.server(options=limits.channel_options())
    add_EvidenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health = aio_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_secure_port(bind, server_credentials(desk.end, manifest_digest))
    # gRPC's only sign that it could not listen there.
    except RuntimeError:
        raise ConfigError("bind", f"cannot listen on '{bind}'.", "Give host:port of this machine.") from None
    serving, ended = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    loop = asyncio.get_running_loop()

    async def tell(status: Any) -> None:
        for name in ("", SERVICE_NAME):
            await health.set(name, status)

    async def stop(grace_s: float) -> None:
        await tell(ended)
        await server.stop(grace_s)

    queue.when_failed(lambda: asyncio.run_coroutine_threadsafe(tell(ended), loop))
    await server.start()
    # Last, so that nobody is sent here before calls are answered.
    await tell(serving)
    return port, stop
