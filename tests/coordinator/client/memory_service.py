"""A training service that keeps everything in memory: the whole protocol over real gRPC, and no training."""

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import TRAILER, error_to_wire
from raycloak.coordinator.client.service_pb2_grpc import TrainingServicer, add_TrainingServicer_to_server
from raycloak.metrics.service_errors import (
    FutureCancelledError,
    ServiceAuthenticationError,
    ServiceError,
    ServiceNotFoundError,
    ServiceStateError,
)
from raycloak.version import VERSION

ENDED = ("done", "failed", "cancelled")
STREAM_ENDS_S = 60


class MemoryService(TrainingServicer):
    """The service. A test may hold operations back, and make calls fail.

    Args:
        token: that every call must carry, if any.
        runs: whether operations are done at once; else `finish` does them.
    """

    def __init__(self, token=None, runs=True):
        self.token, self.runs = token, runs
        self.changed = threading.Condition()
        self.clients: dict[str, wire.Client] = {}
        self.operations: dict[str, list[wire.Operation]] = {}
        self.created: dict[str, str] = {}
        self.calls: list[tuple[str, dict[str, str]]] = []
        """Method and metadata of every call."""
        self.submitted: list[str] = []
        """Idempotency keys, once for each attempt."""
        self.failures: dict[str, list[ServiceError | grpc.StatusCode]] = {}
        """Of the next calls of a method; they fail before anything happens."""
        self.may_answer = threading.Event()
        """Cleared while submissions are to get no answer, of whatever kind."""
        self.may_answer.set()
        self.lost_replies = 0
        """How many submissions are taken from here on, without an answer."""
        self.outcomes: dict[str, ServiceError] = {}
        """Errors that operations of a kind end with."""
        self.artifacts: dict[str, bytes] = {}
        self.told: list[wire.Change] = []
        self.batches: list[bytes] = []
        """Ciphertext of every attempt to send a batch."""
        self.examples: dict[str, int] = {}
        self.server = None
        self.address = ""

    def start(self, address="127.0.0.1:0", credentials=None):
        self.server = grpc.server(ThreadPoolExecutor(32))
        add_TrainingServicer_to_server(self, self.server)
        if credentials is None:
            port = self.server.add_insecure_port(address)
        else:
            port = self.server.add_secure_port(address, credentials)
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self.server.start()
        return self

    def stop(self):
        """End all calls and the server, as a crash does; what was taken stays."""
        server, self.server = self.server, None
        if server is not None:
            done = server.stop(0)
            with self.changed:
                self.changed.notify_all()
            done.wait(30)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    # What a test does.

    def finish(self, client_id, number=None):
        """Do the operation of that number, or all that wait."""
        with self.changed:
            for operation in self.operations[client_id]:
                if operation.state not in ENDED and number in (None, operation.number):
                    self._run(operation)

    def tell(self, change):
        """Send a change that is not durable to all streams that are open."""
        with self.changed:
            self.told.append(change)
            self.changed.notify_all()

    # The protocol.

    def GetCapabilities(self, request, context):  # noqa: N802
        self._enter("GetCapabilities", context)
        return wire.Capabilities(
            version=VERSION, tenant="hospital", datasets=["digits"], models=["tiny"], most_queued=9
        )

    def CreateClient(self, request, context):  # noqa: N802
        self._enter("CreateClient", context)
        with self.changed:
            client_id = self.created.get(request.idempotency_key)
            if client_id is None:
                client_id = self.created[request.idempotency_key] = f"c{len(self.clients)}"
                config = json.loads(request.config_json)
                self.clients[client_id] = wire.Client(
                    client_id=client_id,
                    name=config.get("name", "run"),
                    status="READY",
                    config_json=request.config_json,
                    metadata=config.get("metadata", {}),
                    revision=1,
                )
                self.operations[client_id] = []
            if self._loses("CreateClient"):
                context.abort(grpc.StatusCode.UNAVAILABLE, "the reply is lost")
            return self.clients[client_id]

    def GetClient(self, request, context):  # noqa: N802
        self._enter("GetClient", context)
        return self._client(request.client_id, context)

    def ListClients(self, request, context):  # noqa: N802
        self._enter("ListClients", context)
        return wire.ListClientsReply(clients=self.clients.values())

    def CloseClient(self, request, context):  # noqa: N802
        self._enter("CloseClient", context)
        client = self._client(request.client_id, context)
        with self.changed:
            for operation in self.operations[client.client_id]:
                self._cancel(operation)
            client.status = "TERMINATED"
            self._touch(client)
        return client

    def Submit(self, request, context):  # noqa: N802
        self.submitted.append(request.idempotency_key)
        assert self.may_answer.wait(STREAM_ENDS_S)
        self._enter("Submit", context)
        kind = request.WhichOneof("kind")
        return self._take(request.client_id, request.idempotency_key, kind, request, context)

    def SendBatch(self, requests, context):  # noqa: N802
        head = next(requests).head
        self.submitted.append(head.idempotency_key)
        self._enter("SendBatch", context)
        content = b"".join(piece.data for piece in requests)
        assert (len(content), hashlib.sha256(content).digest()) == (head.bytes, head.sha256)
        assert len(head.example_hashes) == 16 * head.examples
        self.batches.append(content)
        return self._take(head.client_id, head.idempotency_key, "forward_backward", head, context)

    def GetOperation(self, request, context):  # noqa: N802
        self._enter("GetOperation", context)
        return self._operation(request, context)

    def CancelOperation(self, request, context):  # noqa: N802
        self._enter("CancelOperation", context)
        operation = self._operation(request, context)
        with self.changed:
            self._cancel(operation)
        return operation

    def Watch(self, request, context):  # noqa: N802
        self._enter("Watch", context)
        client = self._client(request.client_id, context)
        seen, told = request.since, len(self.told)
        ends = time.monotonic() + STREAM_ENDS_S
        while context.is_active() and self.server is not None and time.monotonic() < ends:
            with self.changed:
                newer = [
                    wire.Change(operation=each)
                    for each in sorted(self.operations[client.client_id], key=lambda each: each.revision)
                    if each.revision > seen
                ]
                if client.revision > seen:
                    newer.append(wire.Change(client=client))
                seen = max(client.revision, seen)
                newer += self.told[told:]
                told = len(self.told)
                if not newer:
                    self.changed.wait(0.05)
            yield from newer

    def ListArtifacts(self, request, context):  # noqa: N802
        self._enter("ListArtifacts", context)
        client = self._client(request.client_id, context)
        done = [each for each in self.operations[client.client_id] if each.HasField("save_state")]
        return wire.ListArtifactsReply(artifacts=[each.save_state.artifact for each in done])

    def PullArtifact(self, request, context):  # noqa: N802
        self._enter("PullArtifact", context)
        content = self.artifacts.get(request.artifact_id)
        if content is None:
            self._refuse(context, ServiceNotFoundError("artifact_unknown", "no such artifact.", resource="artifact"))
        for start in range(0, len(content), 1000):
            if start and self._loses("PullArtifact"):
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection breaks")
            yield wire.ArtifactPiece(data=content[start : start + 1000])

    # Inside.

    def _enter(self, method, context):
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        self.calls.append((method, metadata))
        if self.token is not None and metadata.get("authorization") != f"Bearer {self.token}":
            self._refuse(context, ServiceAuthenticationError("token_unknown", "the token is unknown."))
        failures = self.failures.get(method)
        if failures:
            failure = failures.pop(0)
            if isinstance(failure, ServiceError):
                self._refuse(context, failure)
            context.abort(failure, "as the test asked")

    def _refuse(self, context, error):
        context.set_trailing_metadata(((TRAILER, error_to_wire(error).SerializeToString()),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.code)

    def _loses(self, method):
        failures = self.failures.get(f"{method} reply")
        return bool(failures and failures.pop())

    def _client(self, client_id, context):
        if client_id not in self.clients:
            self._refuse(context, ServiceNotFoundError("client_unknown", "no such client.", resource="client"))
        return self.clients[client_id]

    def _operation(self, request, context):
        for operation in self.operations[self._client(request.client_id, context).client_id]:
            if operation.operation_id == request.operation_id:
                return operation
        return self._refuse(context, ServiceNotFoundError("future_unknown", "no such future.", resource="future"))

    def _take(self, client_id, key, kind, request, context):
        client = self._client(client_id, context)
        with self.changed:
            known = next((each for each in self.operations[client_id] if each.idempotency_key == key), None)
            if known is None:
                if client.status == "TERMINATED":
                    self._refuse(context, ServiceStateError("terminated", "the client has ended."))
                number = len(self.operations[client_id])
                known = wire.Operation(
                    operation_id=f"{client_id}-{number}",
                    client_id=client_id,
                    kind=kind,
                    state="queued",
                    number=number,
                    idempotency_key=key,
                )
                self.operations[client_id].append(known)
                client.revision += 1
                known.revision = client.revision
                client.operations = number + 1
                if isinstance(request, wire.BatchHead):
                    self.examples[key] = request.examples
                if kind == "sample":
                    known.sample.completions.extend(
                        wire.Completion(prompt=place, text=prompt[::-1], finish_reason="stop", tokens=1)
                        for place, prompt in enumerate(request.sample.prompts)
                    )
                self.changed.notify_all()
                if self.runs:
                    self._run(known)
            if self.lost_replies:
                self.lost_replies -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "the reply is lost")
            # As it is now: it may be finished before the reply is on its way.
            reply = wire.Operation()
            reply.CopyFrom(known)
            return reply

    def _run(self, operation):
        client = self.clients[operation.client_id]
        error = self.outcomes.get(operation.kind)
        if error is not None:
            operation.state = "failed"
            operation.error.CopyFrom(error_to_wire(error))
            operation.ClearField("sample")
        else:
            operation.state = "done"
            if operation.kind == "forward_backward":
                client.dp_metrics.steps_charged += 1
                client.dp_metrics.epsilon_spent += 0.5
                operation.forward_backward.step = client.step
                operation.forward_backward.examples_sent = self.examples.get(operation.idempotency_key, 0)
                operation.forward_backward.dp_metrics.CopyFrom(client.dp_metrics)
            elif operation.kind == "optim_step":
                client.step += 1
                operation.optim_step.step = client.step
                operation.optim_step.dp_metrics.CopyFrom(client.dp_metrics)
            elif operation.kind == "save_state":
                artifact = f"a{operation.number}"
                self.artifacts[artifact] = bytes(range(256)) * 20
                operation.save_state.artifact.artifact_id = artifact
                operation.save_state.artifact.step = client.step
            elif operation.kind == "load_state":
                operation.load_state.step = client.step
        self._touch(client, operation)

    def _cancel(self, operation):
        if operation.state not in ENDED:
            operation.state = "cancelled"
            charged = FutureCancelledError("cancelled", "the operation was cancelled; what was charged stays charged.")
            operation.error.CopyFrom(error_to_wire(charged))
            self._touch(self.clients[operation.client_id], operation)

    def _touch(self, client, operation=None):
        if operation is not None:
            client.revision += 1
            operation.revision = client.revision
        client.revision += 1
        self.changed.notify_all()
