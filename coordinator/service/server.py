"""The gRPC server of the training service: who calls, how often, and which error they get. The desk decides the rest.

An event loop in a thread of its own reads and writes. A peer that is slow, silent or half open holds a coroutine or a
socket, never the desk's thread.

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
from typing import Any, Final, Self, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as aio_health
from grpc_reflection.v1alpha import reflection

from raycloak.attestation.core.rate_limit import RateLimit
from raycloak.attestation.sealed.sent_batch import SentHead
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.error_wire import TRAILER, error_to_wire
from raycloak.coordinator.client.service_pb2_grpc import TrainingServicer, add_TrainingServicer_to_server
from raycloak.coordinator.service.desk import PAGE, Desk
from raycloak.coordinator.service.limits import Slots
from raycloak.coordinator.service.operations import invalid
from raycloak.coordinator.service.settings import ServiceSettings, TlsConfig
from raycloak.coordinator.service.store import ArtifactRow
from raycloak.coordinator.service.tenants import Caller, Tenants, expired
from raycloak.coordinator.service.turns import Turns
from raycloak.coordinator.service.uploads import Upload
from raycloak.coordinator.service.watches import Watches
from raycloak.metrics.errors import ConfigError, EvidenceError
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
Context: TypeAlias = Any
"""A `grpc.aio.ServicerContext`; gRPC ships no types."""

SERVICE_NAME: Final = "raycloak.service.v1.Training"
START_DEADLINE_S: Final = 30.0
_CUT_S: Final = 2.0
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


class _PeerLeft(Exception):
    """The other end of a stream is gone."""


class _Servicer(TrainingServicer):
    """Turns calls into turns of the desk, under the limits."""

    def __init__(self, parts: "Parts", settings: ServiceSettings, watches: Watches) -> None:
        self._desk = parts.desk
        self._turns = parts.turns
        self._folder = parts.folder
        self._pieces = parts.pieces
        self._refused = parts.refused
        self._evidence = parts.evidence
        self._settings = settings
        self._limits = settings.limits
        self._tenants = Tenants(settings)
        self._watches = watches
        self._rates = RateLimit(self._limits.calls_per_second, self._limits.burst, time.monotonic)
        self._streams = Slots(self._limits.watches_per_tenant)
        self._sends = Slots(self._limits.sends_per_tenant)
        self._ending = asyncio.Event()

    def end_streams(self) -> None:
        """End all streams of changes; their clients come back with what they have seen."""
        self._ending.set()
        self._watches.wake()

    async def GetCapabilities(self, request: wire.CapabilitiesRequest, context: Context) -> wire.Capabilities:  # noqa: N802
        async with self._call(context) as caller:
            rights = self._settings.tenants[caller.tenant]
            return wire.Capabilities(
                version=VERSION,
                tenant=caller.tenant,
                datasets=rights.datasets,
                models=rights.models,
                evidence_class=self._evidence,
                largest_batch_bytes=self._limits.batch_bytes,
                most_queued=self._limits.queued_operations,
                expires_unix_s=caller.expires,
            )

    async def CreateClient(self, request: wire.CreateClientRequest, context: Context) -> wire.Client:  # noqa: N802
        return await self._ask(context, lambda tenant: self._desk.create_client(tenant, request))

    async def GetClient(self, request: wire.ClientRequest, context: Context) -> wire.Client:  # noqa: N802
        return await self._ask(context, lambda tenant: self._desk.client(tenant, request.client_id))

    async def ListClients(self, request: wire.ListClientsRequest, context: Context) -> wire.ListClientsReply:  # noqa: N802
        return await self._ask(context, lambda tenant: wire.ListClientsReply(clients=self._desk.clients(tenant)))

    async def CloseClient(self, request: wire.ClientRequest, context: Context) -> wire.Client:  # noqa: N802
        return await self._ask(context, lambda tenant: self._desk.close_client(tenant, request.client_id))

    async def Submit(self, request: wire.SubmitRequest, context: Context) -> wire.Operation:  # noqa: N802
        return await self._ask(context, lambda tenant: self._desk.submit(tenant, request))

    async def GetOperation(self, request: wire.OperationRequest, context: Context) -> wire.Operation:  # noqa: N802
        client, name = request.client_id, request.operation_id
        return await self._ask(context, lambda tenant: self._desk.operation(tenant, client, name))

    async def CancelOperation(self, request: wire.OperationRequest, context: Context) -> wire.Operation:  # noqa: N802
        client, name = request.client_id, request.operation_id
        return await self._ask(context, lambda tenant: self._desk.cancel(tenant, client, name))

    async def ListArtifacts(self, request: wire.ClientRequest, context: Context) -> wire.ListArtifactsReply:  # noqa: N802
        return await self._ask(
            context,
            lambda tenant: wire.ListArtifactsReply(artifacts=self._desk.artifacts(tenant, request.client_id)),
        )

    async def SendBatch(  # noqa: N802
        self, request_iterator: AsyncIterator[wire.BatchPiece], context: Context
    ) -> wire.Operation:
        async with self._call(context) as caller, self._slot(self._sends, caller, "uploads"):
            pieces = _patient(request_iterator, self._limits.stall_seconds)
            first = await anext(pieces, None)
            if first is None or first.WhichOneof("piece") != "head":
                raise invalid("head", "a batch begins with its head")
            tenant, head = caller.tenant, first.head
            known = await self._turns.ask(lambda: self._desk.announce_batch(tenant, head))
            if known is not None:
                return known
            upload = Upload(self._folder, head)
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

    async def Watch(self, request: wire.WatchRequest, context: Context) -> None:  # noqa: N802
        async with self._call(context) as caller, self._slot(self._streams, caller, "streams of changes"):
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
                        since = await self._write_durable(context, caller.tenant, client_id, since)
                    for change in stored or ():
                        await self._write(context, change)
                        since = change.operation.revision
            finally:
                self._watches.close(client_id, watch)

    async def _write_durable(self, context: Context, tenant: str, client_id: str, since: int) -> int:
        """Write all durable changes after a revision; return the revision of the last."""
        while True:
            changes = await self._turns.ask(partial(self._desk.changes, tenant, client_id, since))
            for change in changes:
                await self._write(context, change)
                what = change.operation if change.HasField("operation") else change.client
                since = max(since, what.revision)
            if len(changes) < PAGE:
                return since

    async def PullArtifact(self, request: wire.ArtifactRequest, context: Context) -> None:  # noqa: N802
        async with self._call(context) as caller, self._slot(self._streams, caller, "streams of changes"):
            # The name of an artifact begins with its client's.
            client_id = request.client_id or request.artifact_id.rpartition(".")[0]
            row = await self._turns.ask(lambda: self._desk.artifact(caller.tenant, client_id, request.artifact_id))
            try:
                pieces = await asyncio.to_thread(self._pieces, row)
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

    async def _ask(self, context: Context, call: Callable[[str], T]) -> T:
        async with self._call(context) as caller:
            return await self._turns.ask(lambda: call(caller.tenant))

    @asynccontextmanager
    async def _slot(self, slots: Slots, caller: Caller, what: str) -> AsyncIterator[None]:
        if not slots.take(caller.tenant):
            raise ServiceQueueFullError(
                "streams_full", f"this tenant has too many {what} open.", "Close one.", retry_after_s=1.0
            )
        try:
            yield
        finally:
            slots.leave(caller.tenant)

    @asynccontextmanager
    async def _call(self, context: Context) -> AsyncIterator[Caller]:
        """Admit a call; an error in the block becomes a status with a ServiceErrorInfo in its trailing metadata."""
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get("raycloak-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        error: ServiceError
        try:
            yield self._admitted(context, metadata)
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
        self._refused(error.kind)
        info = error_to_wire(error)
        info.request_id = request_id
        status = _STATUS.get(error.kind, grpc.StatusCode.INTERNAL)
        await context.abort(status, error.code, ((TRAILER, info.SerializeToString()),))

    def _admitted(self, context: Context, metadata: dict[str, Any]) -> Caller:
        """Return who calls, if it may now."""
        certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
        caller = self._tenants.caller(metadata, certificate)
        # After the credentials: who has none learns no version.
        _require_version(metadata.get("raycloak-version", ""))
        wait = self._rates.wait(caller.tenant)
        if wait > 0:
            raise ServiceRateLimitedError(
                "rate_limited", "this tenant calls more often than the service allows.", "Wait.", retry_after_s=wait
            )
        return caller


def _require_current(caller: Caller) -> None:
    """Refuse to go on with a stream whose credentials have expired since it began."""
    if caller.expires and caller.expires <= time.time():
        raise expired()


async def _while_current(caller: Caller, pieces: AsyncIterator[wire.BatchPiece]) -> AsyncIterator[wire.BatchPiece]:
    """Yield the pieces of an upload whose credentials have not expired, not even at its end."""
    async for piece in pieces:
        _require_current(caller)
        yield piece
    _require_current(caller)


def _require_version(version: str) -> None:
    """Refuse a client of another minor version, whose messages may mean something else."""
    if version.split(".")[:2] != VERSION.split(".")[:2]:
        raise ServiceConnectionError(
            "other_version",
            f"the service has version {VERSION}, and the client '{version[:32]}'.",
            "Install the version of the service.",
        )


async def _patient(pieces: AsyncIterator[wire.BatchPiece], stall_s: float) -> AsyncIterator[wire.BatchPiece]:
    """Yield the pieces of an upload; one that stalls is refused."""
    iterator = aiter(pieces)
    while True:
        try:
            async with asyncio.timeout(stall_s):
                piece = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise invalid("batch", "the upload stalled") from None
        yield piece


@dataclass(frozen=True, slots=True)
class Parts:
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


@dataclass(slots=True)
class TrainingServer:
    """A running server.

    Attributes:
        port: TCP port that it listens on.
    """

    port: int
    _loop: asyncio.AbstractEventLoop
    _thread: threading.Thread
    _stop: Callable[[float], Coroutine[Any, Any, None]]
    _watches: Watches

    @classmethod
    def start(cls, make: "Callable[[Watches], Parts]", settings: ServiceSettings, base: Path) -> Self:
        """Serve until :meth:`stop`.

        Args:
            make: makes the desk and what belongs to it, given the watchers that it tells.
            base: folder that the paths in the settings start from.

        Raises:
            ConfigError: ``bind`` if the address cannot be listened on, ``tls`` for files that cannot be used.
        """
        credentials = _credentials(settings.tls, base) if settings.tls is not None else None
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="training-service", daemon=True)
        thread.start()
        watches = Watches(loop)
        try:
            parts = make(watches)
            serving = asyncio.run_coroutine_threadsafe(_serve(parts, settings, watches, credentials), loop)
            port, stop = serving.result(START_DEADLINE_S)
        except BaseException:
            loop.call_soon_threadsafe(loop.stop)
            raise
        return cls(port, loop, thread, stop, watches)

    @property
    def watches(self) -> int:
        """The number of streams of changes that clients hold open."""
        return self._watches.number

    def stop(self, grace_s: float) -> None:
        """End all streams, finish the calls under way for up to ``grace_s`` seconds, then close."""
        # A loop that hangs must not keep the process from ending.
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._stop(grace_s), self._loop).result(grace_s + START_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_DEADLINE_S)
        self._loop.close()


async def _serve(
    parts: "Parts", settings: ServiceSettings, watches: Watches, credentials: Any | None
) -> tuple[int, Callable[[float], Coroutine[Any, Any, None]]]:
    server = grpc.aio.server(options=settings.limits.channel_options())
    servicer = _Servicer(parts, settings, watches)
    add_TrainingServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health = aio_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        if credentials is None:
            port = server.add_insecure_port(settings.bind)
        else:
            port = server.add_secure_port(settings.bind, credentials)
    # gRPC's only sign that it could not listen there.
    except RuntimeError:
        raise ConfigError("bind", f"cannot listen on '{settings.bind}'.", "Give host:port of this machine.") from None
    loop = asyncio.get_running_loop()

    async def tell(status: Any) -> None:
        for name in ("", SERVICE_NAME):
            await health.set(name, status)

    async def stop(grace_s: float) -> None:
        await tell(health_pb2.HealthCheckResponse.NOT_SERVING)
        servicer.end_streams()
        await server.stop(grace_s)
        # Calls that were cut have to end before their loop does.
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=_CUT_S)

    parts.turns.when_failed(
        lambda: asyncio.run_coroutine_threadsafe(tell(health_pb2.HealthCheckResponse.NOT_SERVING), loop)
    )
    await server.start()
    # Last, so that nobody is sent here before calls are answered.
    await tell(health_pb2.HealthCheckResponse.SERVING)
    return port, stop


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
