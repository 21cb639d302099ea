"""The gRPC server of the training service: who calls, how often, and which error they get. The desk decides the rest.

An event loop in a thread of its own reads and writes. A peer that is slow, silent or half open holds a coroutine or a
socket, never the desk's thread. Nothing of a request is read before its tenant is known and has room for it.

Guarantee: a tenant learns nothing of another's clients: what is another's is answered as what does not exist.
"""

import asyncio
import logging
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import grpc

from raycloak.attestation.core.rate_limit import RateLimit
from raycloak.attestation.sealed.sent_batch import SentHead
from raycloak.attestation.service.calls import (
    HEALTH,
    REFLECTION,
    Context,
    Health,
    HeldRoom,
    Rooms,
    handlers,
    listen,
    next_request,
    reflection_of,
)
from raycloak.attestation.service.connections import ConnectionGuard, GuardedCall
from raycloak.attestation.service.memory import require_memory
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import TRAILER, error_to_wire
from raycloak.coordinator.service.desk import Desk
from raycloak.coordinator.service.limits import ANSWER_BYTES, LIST_BYTES, PAGE_BYTES, Slots
from raycloak.coordinator.service.operations import invalid
from raycloak.coordinator.service.settings import ServiceSettings, TlsConfig
from raycloak.coordinator.service.store import ArtifactRow
from raycloak.coordinator.service.tenants import CallingTenant, Tenants, expired
from raycloak.coordinator.service.turns import Turns
from raycloak.coordinator.service.uploads import Upload
from raycloak.coordinator.service.watches import Watches
from raycloak.metrics.errors import ConfigError, EvidenceError, ProtocolError
from raycloak.metrics.file_errors import file_error
from raycloak.metrics.service_errors import (
    ServiceConnectionError,
    ServiceError,
    ServiceQueueFullError,
    ServiceRateLimitedError,
    ServiceServerError,
)
from raycloak.version import VERSION

T = TypeVar("T")
Q = TypeVar("Q")

SERVICE: Final = wire.DESCRIPTOR.services_by_name["Training"]
START_DEADLINE_S: Final = 30.0
_CUT_S: Final = 2.0
_CALLS_RETRY_S: Final = 0.1
_LOG = logging.getLogger(__name__)
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_STATUS: Final = {
    "authentication": grpc.StatusCode.UNAUTHENTICATED,
    "permission": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "validation": grpc.StatusCode.INVALID_ARGUMENT,
    "rate_limited": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "queue_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "budget_exceeded": grpc.StatusCode.FAILED_PRECONDITION,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
    "connection": grpc.StatusCode.FAILED_PRECONDITION,
}

Pieces: TypeAlias = Callable[[ArtifactRow], Iterator[bytes]]
"""From an artifact to the pieces of the one file that a client pulls."""


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """The objects that answer the calls.

    Attributes:
        folder: of the files that clients send.
        refused: told of the kind of error with which a call was refused.
        evidence: class that the policy of all runs asks for; see `raycloak.coordinator.client.results.Capabilities`.
    """

    desk: Desk
    turns: Turns
    folder: Path
    pieces: Pieces
    refused: Callable[[str], None]
    evidence: str


class _PeerLeft(Exception):
    """The other end of a stream is gone."""


class _TrainingServicer:
    """Turns calls into turns of the desk, under the limits."""

    def __init__(
        self, parts: ServiceParts, settings: ServiceSettings, watches: Watches, guard: ConnectionGuard
    ) -> None:
        self._parts, self._desk, self._turns = parts, parts.desk, parts.turns
        self._settings = settings
        self._limits = limits = settings.limits
        self._tenants = Tenants(settings)
        self._watches = watches
        self._guard = guard
        self._rates = RateLimit(limits.calls_per_second, limits.burst, time.monotonic)
        many = "this tenant has too many calls open."
        self._calls = Slots(
            limits.calls_per_tenant,
            lambda: ServiceRateLimitedError("calls_full", many, "Wait for one.", retry_after_s=_CALLS_RETRY_S),
        )
        self._streams = _streams(limits.watches_per_tenant, "streams of changes")
        self._sends = _streams(limits.sends_per_tenant, "uploads")
        self._pulls = _streams(limits.pulls_per_tenant, "downloads")
        self._rooms = Rooms(limits.tenant_bytes)
        self._reflection = reflection_of(SERVICE)
        self._health, self._ending = Health(), asyncio.Event()
        desk, by_desk = parts.desk, self._answered_by
        self.CreateClient = by_desk(desk.create_client)
        self.GetClient = by_desk(lambda tenant, asked: desk.client(tenant, asked.client_id))
        self.CloseClient = by_desk(lambda tenant, asked: desk.close_client(tenant, asked.client_id))
        self.ListClients = by_desk(lambda tenant, _: wire.ListClientsReply(clients=desk.clients(tenant)), LIST_BYTES)
        self.Submit = by_desk(desk.submit)
        self.GetOperation = by_desk(lambda tenant, asked: desk.operation(tenant, asked.client_id, asked.operation_id))
        self.CancelOperation = by_desk(lambda tenant, asked: desk.cancel(tenant, asked.client_id, asked.operation_id))
        self.ListArtifacts = by_desk(
            lambda tenant, asked: wire.ListArtifactsReply(artifacts=desk.artifacts(tenant, asked.client_id)), LIST_BYTES
        )

    async def serve(self, credentials: Any | None) -> int:
        """Begin to answer calls; return the port."""
        self._server = grpc.aio.server(options=self._limits.bounds().options())
        for service, answers in ((SERVICE, self), (REFLECTION, self), (HEALTH, self._health)):
            self._server.add_generic_rpc_handlers((handlers(service, answers),))
        port = listen(self._server, self._settings.bind, credentials)
        self._turns.when_failed(self._fail)
        await self._server.start()
        # Last, so that nobody is sent here before calls are answered.
        self._health.is_serving = True
        return port

    async def stop(self, grace_s: float) -> None:
        """End all streams of changes, whose clients come back with what they have seen, and then all calls."""
        self._fail()
        self._ending.set()
        self._watches.wake()
        await self._server.stop(grace_s)
        # Calls that were cut have to end before their loop does.
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=_CUT_S)

    def _fail(self) -> None:
        self._health.is_serving = False

    async def GetCapabilities(  # noqa: N802
        self, requests: AsyncIterator[wire.CapabilitiesRequest], context: Context
    ) -> wire.Capabilities:
        async with self._call(context) as caller:
            rights = self._settings.tenants[caller.tenant]
            return wire.Capabilities(
                version=VERSION,
                tenant=caller.tenant,
                datasets=rights.datasets,
                models=rights.models,
                evidence_class=self._parts.evidence,
                largest_batch_bytes=self._limits.batch_bytes,
                most_queued=self._limits.queued_operations,
                expires_unix_s=caller.expires,
            )

    async def ServerReflectionInfo(  # noqa: N802
        self, requests: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """Say what is served here, to a tenant."""
        async with self._call(context) as caller, self._held(caller, self._limits.request_bytes):
            asked = _patient(requests, self._limits.stall_seconds)
            async for answer in self._reflection.ServerReflectionInfo(asked, context):
                _require_current(caller)
                yield answer

    async def SendBatch(  # noqa: N802
        self, requests: AsyncIterator[wire.BatchPiece], context: Context
    ) -> wire.Operation:
        async with self._call(context) as caller, self._sends.taken(caller.tenant):
            pieces = _patient(requests, self._limits.stall_seconds)
            first = await anext(pieces, None)
            if first is None or first.WhichOneof("piece") != "head":
                raise invalid("head", "a batch begins with its head")
            tenant, head = caller.tenant, first.head
            known = await self._turns.ask(lambda: self._desk.announce_batch(tenant, head))
            if known is not None:
                return known
            upload = Upload(self._parts.folder, head)
            sealed = await upload.take(_while_current(caller, pieces))
            return await self._accepted(tenant, head, upload, sealed)

    async def _accepted(self, tenant: str, head: wire.BatchHead, upload: Upload, sealed: SentHead) -> wire.Operation:
        """Record a batch. Its file is dropped unless the store may name it, also where the caller has left."""

        def outcome(done: "Future[tuple[wire.Operation, bool]]") -> None:
            error = done.exception()
            # Whether a store that failed has the batch is not known. If not, the desk drops its file when it begins.
            if not isinstance(error, ServiceServerError) and (error is not None or not done.result()[1]):
                upload.drop()

        def accept() -> tuple[wire.Operation, bool]:
            known = self._desk.announce_batch(tenant, head)
            if known is not None:
                return known, False
            return self._desk.accept_batch(tenant, head, upload.name, sealed), True

        done = self._turns.put(accept)
        done.add_done_callback(outcome)
        # Shielded: the desk's decision stands, and the file with it, whether the caller waits for it or not.
        operation, _ = await asyncio.shield(asyncio.wrap_future(done))
        return operation

    async def Watch(self, requests: AsyncIterator[wire.WatchRequest], context: Context) -> None:  # noqa: N802
        async with self._call(context) as caller, self._streams.taken(caller.tenant):
            request = await self._request(caller, requests)
            client_id, since = request.client_id, request.since
            await self._turns.ask(lambda: self._desk.client(caller.tenant, client_id))
            watch = self._watches.open(client_id)
            try:
                while not (self._ending.is_set() or context.done()):
                    _require_current(caller)
                    # The wait is bounded, so that an end of the credentials or of the service is noticed.
                    if not await watch.wait(1.0):
                        continue
                    if watch.is_behind:
                        raise ServiceQueueFullError(
                            "watch_behind", "changes are not read as fast as they come.", "Watch again.",
                            retry_after_s=0.0,
                        )  # fmt: skip
                    for change in watch.passing():
                        await self._write(context, change)
                    stored = watch.stored(since)
                    if stored is None:
                        since = await self._write_durable(context, caller, client_id, since)
                    for change in stored or ():
                        await self._write(context, change)
                        since = change.operation.revision
            finally:
                self._watches.close(client_id, watch)

    async def _write_durable(self, context: Context, caller: CallingTenant, client_id: str, since: int) -> int:
        """Write all durable changes after a revision; return the revision of the last."""
        while True:
            async with self._held(caller, PAGE_BYTES) as held:
                page = await self._turns.ask(partial(self._desk.changes, caller.tenant, client_id, since))
                held.shrink(sum(change.ByteSize() for change in page.changes))
                for change in page.changes:
                    await self._write(context, change)
                    what = change.operation if change.HasField("operation") else change.client
                    since = max(since, what.revision)
            if page.is_last:
                return since

    async def PullArtifact(self, requests: AsyncIterator[wire.ArtifactRequest], context: Context) -> None:  # noqa: N802
        async with self._call(context) as caller, self._pulls.taken(caller.tenant):
            request = await self._request(caller, requests)
            # The name of an artifact begins with its client's.
            client_id = request.client_id or request.artifact_id.rpartition(".")[0]
            row = await self._turns.ask(lambda: self._desk.artifact(caller.tenant, client_id, request.artifact_id))
            try:
                pieces = await asyncio.to_thread(self._parts.pieces, row)
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    _require_current(caller)
                    await self._write(context, wire.ArtifactPiece(data=piece))
            except (ConfigError, EvidenceError) as error:
                raise ServiceServerError(error.code, error.message, error.remedy) from None

    async def _write(self, context: Context, message: Any) -> None:
        """Write to a stream; one whose reader takes nothing is cut."""
        try:
            # Not `asyncio.wait_for`, which may swallow a cancellation before Python 3.12; here and below.
            async with asyncio.timeout(self._limits.stall_seconds):
                await context.write(message)
        except TimeoutError:
            raise ServiceQueueFullError(
                "stalled", "the stream was not read.", "Open it again.", retry_after_s=0.0
            ) from None
        except Exception:  # noqa: BLE001 - gRPC's error for a peer that is gone is in none of its public modules
            raise _PeerLeft from None

    def _answered_by(
        self, call: Callable[[str, Any], Any], answer_bytes: int = ANSWER_BYTES
    ) -> Callable[[AsyncIterator[Any], Context], Coroutine[Any, Any, Any]]:
        """Return the handler of calls that the desk answers, from a tenant and its request.

        Request and answer have room of the tenant's until the caller has read.
        """

        async def handle(requests: AsyncIterator[Any], context: Context) -> Any:
            async with self._call(context) as caller:
                held = await self._rooms.take(caller.tenant, self._limits.request_bytes + answer_bytes)
                # It is called once the answer has left, or the caller.
                context.add_done_callback(lambda _: held.leave())
                request = await self._next(requests)
                answer = await self._turns.ask(lambda: call(caller.tenant, request))
                held.shrink(answer.ByteSize())
                return answer

        return handle

    async def _request(self, caller: CallingTenant, requests: AsyncIterator[Q]) -> Q:
        """Read the one request of a stream."""
        async with self._held(caller, self._limits.request_bytes):
            return await self._next(requests)

    async def _next(self, requests: AsyncIterator[Q]) -> Q:
        async for request in _patient(requests, self._limits.stall_seconds):
            return request
        raise invalid("request", "the call ended without one")

    @asynccontextmanager
    async def _held(self, caller: CallingTenant, size: int) -> AsyncIterator[HeldRoom]:
        """Wait for room of a tenant's, and have it in the block."""
        held = await self._rooms.take(caller.tenant, size)
        try:
            yield held
        finally:
            held.leave()

    @asynccontextmanager
    async def _call(self, context: Context) -> AsyncIterator[CallingTenant]:
        """Admit a call; an error in the block becomes a status with a ServiceErrorInfo in its trailing metadata."""
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get("raycloak-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        error: ServiceError
        try:
            with self._guard.call(context.peer()) as guarded:
                caller = self._admitted(context, metadata, guarded)
                async with self._calls.taken(caller.tenant):
                    yield caller
            return
        except ServiceError as refusal:
            error = refusal
            if isinstance(refusal, ServiceServerError):
                _LOG.error("request %s failed: %s", request_id, refusal)
        except _PeerLeft:
            return
        except Exception:  # noqa: BLE001 - whatever it is, the caller gets a request id and no text
            # gRPC would tell the peer the text of the exception.
            _LOG.exception("request %s failed", request_id)
            error = ServiceServerError(
                "internal", "the service failed at this call.", "Tell the operator the request id."
            )
        self._parts.refused(error.kind)
        info = error_to_wire(error)
        info.request_id = request_id
        status = _STATUS.get(error.kind, grpc.StatusCode.INTERNAL)
        await context.abort(status, error.code, ((TRAILER, info.SerializeToString()),))

    def _admitted(self, context: Context, metadata: dict[str, Any], guarded: GuardedCall) -> CallingTenant:
        """Return who calls, if it may now."""
        certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
        try:
            caller = self._tenants.caller(metadata, certificate)
        except ServiceError:
            guarded.refuse()
            raise
        guarded.admit()
        # After the credentials: who has none learns no version. Messages of another minor version may differ.
        version = metadata.get("raycloak-version", "")
        if version.split(".")[:2] != VERSION.split(".")[:2]:
            message = f"the service has version {VERSION}, and the client '{version[:32]}'."
            raise ServiceConnectionError("other_version", message, "Install the version of the service.")
        wait = self._rates.wait(caller.tenant)
        if wait > 0:
            raise ServiceRateLimitedError(
                "rate_limited", "this tenant calls more often than the service allows.", "Wait.", retry_after_s=wait
            )
        return caller


def _require_current(caller: CallingTenant) -> None:
    """Refuse to go on with a stream whose credentials have expired since it began."""
    if caller.expires and caller.expires <= time.time():
        raise expired()


def _streams(most: int, what: str) -> Slots:
    message = f"this tenant has too many {what} open."
    return Slots(most, lambda: ServiceQueueFullError("streams_full", message, "Close one.", retry_after_s=1.0))


async def _while_current(
    caller: CallingTenant, pieces: AsyncIterator[wire.BatchPiece]
) -> AsyncIterator[wire.BatchPiece]:
    """Yield the pieces of an upload whose credentials have not expired, not even at its end."""
    async for piece in pieces:
        _require_current(caller)
        yield piece
    _require_current(caller)


async def _patient(requests: AsyncIterator[Q], stall_s: float) -> AsyncIterator[Q]:
    """Yield the messages of a call; one that stalls, or sends none, is refused."""
    while True:
        try:
            request = await next_request(requests, stall_s)
        except ProtocolError as refusal:
            raise invalid("request", refusal.message) from None
        if request is None:
            return
        yield request


class TrainingServer:
    """A running server, until :meth:`stop`.

    Args:
        make: makes the desk and what belongs to it, given the watchers that it tells.
        base: folder that the paths in the settings start from.

    Attributes:
        port: TCP port that it listens on.
        memory: that its calls take at most, for a reader.

    Raises:
        ConfigError: ``bind`` if the address cannot be listened on, ``tls`` for files that cannot be used, ``memory`` if
            the limits allow more than there is.
    """

    def __init__(self, make: Callable[[Watches], ServiceParts], settings: ServiceSettings, base: Path) -> None:
        limits = settings.limits
        self.memory = require_memory(limits.most_bytes(len(settings.tenants)), limits.memory_bytes)
        self._guard = ConnectionGuard(limits.bounds())
        credentials = _credentials(settings.tls, base) if settings.tls is not None else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="training-service", daemon=True)
        self._thread.start()
        self._watches = Watches(self._loop)
        try:
            parts = make(self._watches)
            self._servicer = _TrainingServicer(parts, settings, self._watches, self._guard)
            serving = asyncio.run_coroutine_threadsafe(self._servicer.serve(credentials), self._loop)
            self.port = serving.result(START_DEADLINE_S)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        self._guard.start(self.port)

    @property
    def watches(self) -> int:
        """The number of streams of changes that clients hold open."""
        return self._watches.number

    def stop(self, grace_s: float) -> None:
        """End all streams, finish the calls under way for up to ``grace_s`` seconds, then close."""
        self._guard.stop()
        # A loop that hangs must not keep the process from ending.
        with suppress(TimeoutError):
            ended = asyncio.run_coroutine_threadsafe(self._servicer.stop(grace_s), self._loop)
            ended.result(grace_s + START_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_DEADLINE_S)
        self._loop.close()


def _credentials(tls: TlsConfig, base: Path) -> Any:
    """Return the server's TLS credentials; ConfigError ``tls`` if a file cannot be read."""
    certificate, key = _read(base / tls.certificate), _read(base / tls.key)
    authority = _read(base / tls.client_ca) if tls.client_ca is not None else None
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=authority, require_client_auth=authority is not None
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise file_error("tls", "read", path, error) from None
