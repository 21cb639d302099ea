"""The desk: what tenants ask for, checked and decided. No gRPC, no process, no thread of its own.

Desk (tenants' calls), DriverReports  ->  OperationQueues (order)  ->  DriverDesk (places)  ->  ClientBook (rows, turns)
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from raycloak.attestation.sealed.sent_batch import SentHead
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.client_book import ClientBook
from raycloak.coordinator.service.driver_desk import DriverDesk
from raycloak.coordinator.service.driver_reports import DriverReports
from raycloak.coordinator.service.operation_queues import STEP, OperationQueues
from raycloak.coordinator.service.operations import (
    RETRY_S,
    artifact_to_wire,
    check_batch,
    check_key,
    check_metadata,
    check_sample,
    client_to_wire,
    dp_metrics,
    fingerprint,
    invalid,
    listed_client,
    not_found,
    number_of,
    operation_of,
    operation_to_wire,
    plan_of,
    run_ended,
    steps_done,
    texts_full,
)
from raycloak.coordinator.service.ports import DriverPort, Measured, News, Records, SamplerPort
from raycloak.coordinator.service.retention import ClientRetention
from raycloak.coordinator.service.settings import ServiceSettings, completed, withdrawn
from raycloak.coordinator.service.store import (
    ArtifactRow,
    BatchRow,
    ClientRow,
    ClientState,
    OperationKind,
    OperationRow,
    OperationState,
    Store,
)
from raycloak.metrics.service_errors import ServiceQueueFullError, ServiceStateError, ServiceValidationError

MOST_LISTED: Final = 1000
"""Clients of a tenant, or artifacts of a client, in one list: the newest. More could outgrow a message."""
PAGE: Final = 256
"""Changes that a watcher gets at once, of at most `_PAGE_BYTES` together unless it is one; it may have megabytes."""
_PAGE_BYTES: Final = 2**20
_LARGEST: Final = 2**63 - 1
_AWAIT: Final = "Await some of their results first."


@dataclass(frozen=True, slots=True)
class Page:
    """Some changes of a client, and whether there are no more by now."""

    changes: list[wire.Change]
    is_last: bool


class Desk:
    """The decisions about clients and their operations. For one thread at a time.

    Args:
        base: folder that relative paths of the settings start from.
        folder: of the files that clients sent, and of copies of weights that samples need.
        publish: told of all changes of clients, of one turn at once: each costs a turn of another thread.
        measured: told of every operation that ended.
        records: reads what runs have written.
        recipient: public file of the service's key, to which every run's packages are sealed too.
        clock, monotonic: Unix time, and seconds that never go back.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        base: Path,
        store: Store,
        drivers: DriverPort,
        sampler: SamplerPort,
        folder: Path,
        publish: Callable[[Sequence[News]], None],
        measured: Measured,
        records: Records,
        recipient: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._store = store
        self._recipient = recipient
        self._retention = ClientRetention(store, records)
        self._rightful: set[str] = set()  # clients of this process, whose settings never change
        self.book = ClientBook(store, publish, measured, clock)
        self.drivers = DriverDesk(settings.limits, base, self.book, drivers, monotonic)
        self._queues = OperationQueues(self.book, self.drivers, sampler, folder)
        self.reports = DriverReports(self.book, self.drivers, self._queues, records, settings.limits.sampled_bytes)

    def begin(self) -> None:
        """Go on where the service's last process ended. Call it once, first.

        Files of batches that no driver will ask for are removed, as those whose senders never got an answer. So are
        copies of weights that no sample needs.
        """
        for client in self._store.left_open():
            with self._queues.changing(client):
                self._queues.end(client)
        self._retention.begin()
        self.drivers.assign()
        self._queues.begin()

    def tick(self) -> None:
        """Do what is due by time alone: idle clients, drivers to be tried again, samples that have room, old rows."""
        self.drivers.assign()
        self._retention.go_on()
        for client in self._store.clients_with_samples():
            with self._queues.changing(client):
                self._queues.advance(client)

    def create_client(self, tenant: str, request: wire.CreateClientRequest) -> wire.Client:
        """Record a client; its driver starts when it has a place.

        Raises:
            ServiceError: validation, not_found, permission or queue_full.
        """
        check_key(request.idempotency_key)
        mark = fingerprint(request)
        known = self._store.client_of_key(tenant, request.idempotency_key)
        if known is not None:
            _require_same(known.fingerprint, mark)
            if known.status == ClientState.FORGOTTEN:
                raise not_found("client")
            return self._shown(known)
        training, run = completed(self._settings, tenant, request.config_json)
        if self._store.live_clients(tenant) >= self._limits.clients_per_tenant:
            message = f"this tenant has {self._limits.clients_per_tenant} clients that are not closed."
            raise _full("clients_full", message, "Close one.")
        # The service samples from its packages.
        recipients = [*run.checkpoint.recipients, str(self._recipient)]
        checkpoint = run.checkpoint.model_copy(update={"recipients": recipients})
        dataset = run.dataset
        sent = dataset is not None and str(dataset.kind) == "sent"
        now = self.book.clock()
        client = ClientRow(
            client_id=f"c{secrets.token_hex(8)}",
            tenant=tenant,
            idempotency_key=request.idempotency_key,
            fingerprint=mark,
            name=training.name,
            config=training.to_json(),
            run_config=run.model_copy(update={"checkpoint": checkpoint}).model_dump_json(),
            sent=sent,
            most_sent=(getattr(dataset, "max_examples_per_step", None) or 0) if sent else 0,
            most_uses=(getattr(dataset, "max_participations", None) or 0) if sent else 0,
            private=run.dp_config.enabled,
            created=now,
            waits_since=now,
        )
        self._store.add(client)
        # Here alone, as nothing else makes their number grow.
        self._retention.forget(tenant, self._limits.closed_clients_per_tenant, self.drivers.of)
        self.drivers.assign()
        return self._shown(client)

    def client(self, tenant: str, client_id: str) -> wire.Client:
        """Return a client; ServiceNotFoundError if the tenant has no such one."""
        return self._shown(self._find(tenant, client_id))

    def clients(self, tenant: str) -> list[wire.Client]:
        """Return the newest clients of a tenant, oldest first, each without its configuration and its manifest."""
        rows = map(self._store.client, self._store.clients_of(tenant, MOST_LISTED))
        return [listed_client(row, self.drivers.phase(row)) for row in rows if row is not None]

    def close_client(self, tenant: str, client_id: str) -> wire.Client:
        """Cancel queued operations and end the client; the driver finishes what it does."""
        client = self._find(tenant, client_id)
        if client.status == ClientState.TERMINATED:
            return self._shown(client)
        with self._queues.changing(client):
            self._queues.cancel_queued(client, *self._store.open_operations(client_id))
            client.status, client.waits_since = ClientState.TERMINATED, self.book.clock()
            self._rightful.discard(client_id)
            driver = self.drivers.of.get(client_id)
            if driver is None:
                self._queues.end(client)
            elif driver.is_ready:
                self.drivers.close(client_id)
            else:
                # Before it is ready it has no steps that could be finished.
                self.drivers.leave(client_id)
        return self._shown(client)

    def submit(self, tenant: str, request: wire.SubmitRequest) -> wire.Operation:
        """Record an operation, and hand it to the driver if it is its turn.

        Raises:
            ServiceError: not_found, validation, state, queue_full or budget_exceeded; nothing was recorded.
        """
        check_key(request.idempotency_key)
        client = self._find(tenant, request.client_id)
        mark = fingerprint(request)
        known = self._store.operation_of_key(client.client_id, request.idempotency_key)
        if known is not None:
            _require_same(known.fingerprint, mark)
            return operation_to_wire(known)
        self._require_open(client)
        asked = request.WhichOneof("kind")
        if asked is None:
            raise invalid("kind", "the request names no operation")
        kind = OperationKind(asked)
        payload = getattr(request, kind)
        content = payload.SerializeToString()
        self._require_room(client, kind, len(content))
        package = self._checked(client, kind, payload)
        with self._queues.changing(client):
            operation = self._enter(client, kind, request.idempotency_key, mark, content, package)
            if kind in STEP:
                is_optim = kind == OperationKind.OPTIM_STEP
                client.steps = (
                    client.steps.optim_submitted() if is_optim else client.steps.forward_submitted(operation.number)
                )
            self._queues.advance(client)
        if client.client_id not in self.drivers.of and client.open:
            self.drivers.assign()
        return self._operation(client.client_id, operation.number)

    def _checked(self, client: ClientRow, kind: OperationKind, payload: Any) -> str:
        """Refuse an operation that does not fit; return the package that it loads."""
        in_step = not client.ending and client.steps.is_begun
        match kind:
            case OperationKind.FORWARD_BACKWARD:
                if client.sent:
                    raise invalid("batch", "this client sends its data; give forward_backward a batch")
                if client.steps.pending >= 0:
                    raise ServiceStateError(
                        "step_pending",
                        "a forward_backward without its optim_step was submitted before: one Poisson sample is drawn "
                        "for one step.",
                        "Submit optim_step first; accumulation over micro-batches is internal.",
                    )
                self._require_right(client)
                self._require_steps(client)
            case OperationKind.OPTIM_STEP:
                if payload.HasField("apply_dp_noise") and not payload.apply_dp_noise and client.private:
                    raise invalid("apply_dp_noise", "the data is private, and a step without noise would release it")
                if client.steps.pending < 0:
                    # Its forward_backward was refused for this reason, which a caller may not have looked at.
                    self._require_steps(client)
                    raise ServiceStateError(
                        "no_gradient", "no forward_backward waits for an optim_step.", "Submit forward_backward first."
                    )
                if client.sent:
                    self._require_steps(client)
            case OperationKind.SAVE_STATE | OperationKind.LOAD_STATE | OperationKind.SAMPLE:
                # The driver would be inside a step, where no state is between two steps.
                if in_step and (not client.sent or client.steps.held):
                    message = "a step has begun that was not released, so the run is not between two steps."
                    remedy = "Submit optim_step first; if the step was cancelled, submit it again."
                    raise ServiceStateError("step_pending", message, remedy)
                if kind == OperationKind.SAVE_STATE:
                    check_metadata(payload.metadata)
                elif kind == OperationKind.SAMPLE:
                    check_sample(payload, client.run_config)
                else:
                    return self._artifact(client, payload.artifact_id).package
        return ""

    def _require_right(self, client: ClientRow) -> None:
        """Refuse another step where the operator has withdrawn data, model or code since the client was made."""
        if client.client_id not in self._rightful:
            refusal = withdrawn(self._settings, client.tenant, client.config)
            if refusal is not None:
                raise refusal
            self._rightful.add(client.client_id)

    def _require_steps(self, client: ClientRow) -> None:
        """Refuse a step after the last one, where that is known already."""
        if client.ending:
            raise run_ended(client, ServiceStateError)
        if client.facts and client.steps.submitted_steps >= plan_of(client.facts).steps:
            raise steps_done(ServiceStateError)

    def announce_batch(self, tenant: str, head: wire.BatchHead) -> wire.Operation | None:
        """Check the head of a batch before its bytes are taken; return the operation if the batch came before.

        Raises:
            ServiceError: as `accept_batch`, as far as it can be told.
        """
        check_key(head.idempotency_key)
        client = self._find(tenant, head.client_id)
        known = self._store.operation_of_key(client.client_id, head.idempotency_key)
        if known is not None:
            _require_same(known.fingerprint, fingerprint(head))
            return operation_to_wire(known)
        self._check_batch(client, head)
        return None

    def accept_batch(self, tenant: str, head: wire.BatchHead, file: str, sealed: SentHead) -> wire.Operation:
        """Record a batch whose ciphertext is on disk, and count its examples, or nothing of it.

        Guarantee: an example is counted for every batch it is in, never above ``max_participations``, and never twice
        for one step. It is counted under the very hash that workers see. A refused batch counts nothing.

        Args:
            file: relative to the desk's folder; durable.
            sealed: the head of the ciphertext.

        Raises:
            ServiceError: not_found, validation (also ``participations_exceeded`` and ``id_repeated``), state,
                queue_full.
        """
        # The same request may have come twice, at once.
        known = self.announce_batch(tenant, head)
        if known is not None:
            return known
        client = self._find(tenant, head.client_id)
        ids = self._check_batch(client, head)
        step = client.steps.submitted_steps
        if sealed.hashes != head.example_hashes:
            raise invalid("example_ids", "the batch was sealed for other examples", "batch_foreign")
        earlier = self._store.number_of_batches(client.client_id, step)
        place = (client.run_id, client.client_id, step, earlier, client.steps.sent_examples)
        # Its step could not be computed with it, or its examples would be counted as others.
        if (sealed.run_id, sealed.client_id, sealed.step, sealed.number, sealed.first) != place:
            raise invalid("batch", "it was sealed for another run, client, step or place in the step", "batch_foreign")
        refused = self._store.count_ids(client.client_id, step, ids, client.most_uses)
        if refused is not None:
            _, last = self._store.used_in_step(client.client_id, refused)
            problem = f"an example would take part in more than max_participations ({client.most_uses}) steps"
            raise _repeated() if last == step else invalid("example_ids", problem, "participations_exceeded")
        with self._queues.changing(client):
            operation = self._enter(client, OperationKind.FORWARD_BACKWARD, head.idempotency_key, fingerprint(head))
            client.steps = client.steps.forward_submitted(operation.number, len(ids))
            self._store.add(
                BatchRow(client.client_id, operation.number, tenant, step, file, head.bytes, head.sha256, head.examples)
            )
            operation.step = step
            result = wire.ForwardBackwardResult(step=step, examples_sent=head.examples, dp_metrics=dp_metrics(client))
            self.book.finish(client, operation, OperationState.DONE, result)
        return self._operation(client.client_id, operation.number)

    def _check_batch(self, client: ClientRow, head: wire.BatchHead) -> list[bytes]:
        self._require_open(client)
        self._require_room(client, OperationKind.FORWARD_BACKWARD, 0)
        if not client.sent:
            raise invalid("batch", "this client trains on a registered dataset; forward_backward takes no batch")
        ids = check_batch(head, client, self._limits.batch_bytes)
        if len(set(ids)) < len(ids):
            raise _repeated()
        self._require_right(client)
        self._require_steps(client)
        # Its charge names its batches. One more would be counted, and be computed by no worker.
        if client.steps.allowed_charges > client.steps.submitted_steps:
            message = "the step that comes next has begun with the batches that it has."
            remedy = "Submit optim_step first; this batch is for the step after it."
            raise ServiceStateError("step_charged", message, remedy)
        if client.steps.sent_examples + len(ids) > client.most_sent:
            raise invalid("batch", f"the step would have more than {client.most_sent} examples")
        if self._store.batch_bytes(client.tenant) + head.bytes > self._limits.stored_batch_bytes:
            message = "this tenant's batches fill the room that the service keeps for them."
            raise _full("batches_full", message, "Ask the operator: batches stay, so that a run can be verified.")
        return ids

    def operation(self, tenant: str, client_id: str, name: str) -> wire.Operation:
        """Return an operation; ServiceNotFoundError if the tenant has no such client, or the client no such one."""
        return operation_to_wire(operation_of(self._store, self._find(tenant, client_id), name))

    def cancel(self, tenant: str, client_id: str, name: str) -> wire.Operation:
        """Cancel an operation, and those that depend on it, if that is still possible; return it as it is then.

        A queued one is cancelled: a ``forward_backward`` with its ``optim_step``, an ``optim_step`` with all later
        ones. A step that runs, by its ``forward_backward`` or by the ``optim_step`` of sent data, is cancelled when its
        driver says that nobody computes it: it stays charged. If it is computed by then, it goes on. Any other one that
        runs goes on, except a sample.

        Raises:
            ServiceStateError: ``batch_follows`` for an ``optim_step`` after which more batches were sent.
        """
        client = self._find(tenant, client_id)
        operation = operation_of(self._store, client, name)
        if operation.state not in (OperationState.QUEUED, OperationState.RUNNING):
            return operation_to_wire(operation)
        with self._queues.changing(client):
            self._queues.cancel(client, operation)
            self._queues.advance(client)
        return self._operation(client_id, operation.number)

    def changes(self, tenant: str, client_id: str, since: int) -> Page:
        """Return the next changes after revision ``since``, at most `PAGE` and one, in their order."""
        client = self._find(tenant, client_id)
        # What a database takes; a revision never gets there.
        rows, is_last = self._store.changes(client_id, min(since, _LARGEST), PAGE, _PAGE_BYTES)
        found = [(row.revision, wire.Change(operation=operation_to_wire(row))) for row in rows]
        # The client's own change may lie behind changes that are not in the page.
        if client.changed > since and (is_last or client.changed < rows[-1].revision):
            found.append((client.changed, wire.Change(client=self._shown(client))))
        return Page([change for _, change in sorted(found, key=lambda item: item[0])], is_last)

    def artifacts(self, tenant: str, client_id: str) -> list[wire.Artifact]:
        """Return a client's newest artifacts in the order they were made."""
        self._find(tenant, client_id)
        return [artifact_to_wire(row) for row in self._store.artifacts(client_id, MOST_LISTED)]

    def artifact(self, tenant: str, client_id: str, name: str) -> ArtifactRow:
        """Return an artifact; ServiceNotFoundError if the tenant's client has no such one."""
        return self._artifact(self._find(tenant, client_id), name)

    def queued_by_kind(self) -> tuple[Mapping[str, int], float]:
        """Return how many operations wait, by kind; and when the oldest open one was submitted, now if none is."""
        oldest = self._store.oldest_open()
        return self._store.queued_by_kind(), self.book.clock() if oldest is None else oldest

    def _find(self, tenant: str, client_id: str) -> ClientRow:
        """Return a tenant's client; another tenant's is answered as one that does not exist."""
        # No text of PostgreSQL has a null, and a statement that is refused ends the service.
        client = self._store.client(client_id) if "\0" not in client_id else None
        if client is None or client.tenant != tenant or client.status == ClientState.FORGOTTEN:
            raise not_found("client")
        return client

    def _artifact(self, client: ClientRow, name: str) -> ArtifactRow:
        number = number_of(client.client_id, name)
        row = self._store.artifact(client.client_id, number) if number is not None else None
        if row is None:
            raise not_found("artifact")
        return row

    def _enter(self, client: ClientRow, *what: Any) -> OperationRow:
        operation = self.book.enter(client, *what)
        if client.open == 1 and client.client_id not in self.drivers.of:
            client.waits_since = operation.submitted
        return operation

    def _operation(self, client_id: str, number: int) -> wire.Operation:
        operation = self._store.operation(client_id, number)
        assert operation is not None, "it was recorded in this turn"
        return operation_to_wire(operation)

    def _require_open(self, client: ClientRow) -> None:
        """Refuse a client that takes no operations."""
        if client.status == ClientState.TERMINATED:
            raise ServiceStateError("client_closed", "the client was closed.", "Create another one.")
        if client.status == ClientState.ERROR:
            cause = wire.ServiceErrorInfo.FromString(client.error)
            message = f"the client has failed: {cause.message} ({cause.code})"
            raise ServiceStateError("client_failed", message, cause.remedy)

    def _require_room(self, client: ClientRow, kind: OperationKind, size: int) -> None:
        """Refuse an operation, with a request of ``size`` bytes, that would go beyond a bound of its client."""
        limits = self._limits
        if client.open >= limits.queued_operations:
            raise _full("queue_full", f"{client.open} operations of this client wait.", _AWAIT)
        if client.open_bytes + size > limits.queued_bytes:
            message = f"requests of this client that wait would have more than {limits.queued_bytes} bytes together."
            raise _full("queue_full", message, _AWAIT)
        # The step of the last forward_backward is charged, so that it may be released.
        if client.next_number >= limits.operations_per_client + (kind == OperationKind.OPTIM_STEP):
            message = f"this client has submitted {client.next_number} operations, as many as the service keeps of one."
            raise _full("operations_full", message, "Pull what you have saved, and go on with another client.")
        most = limits.artifacts_per_client
        if kind == OperationKind.SAVE_STATE and self._store.number_of_artifacts(client.client_id) >= most:
            message = f"this client has saved {most} states, as many as the service keeps of one."
            raise _full("artifacts_full", message, "Save less often; the operator decides how many there may be.")
        if kind == OperationKind.SAMPLE and client.sampled_bytes >= limits.sampled_bytes:
            raise texts_full(limits.sampled_bytes, ServiceQueueFullError)

    def _shown(self, client: ClientRow) -> wire.Client:
        return client_to_wire(client, self.drivers.phase(client))


def _full(code: str, message: str, remedy: str) -> ServiceQueueFullError:
    return ServiceQueueFullError(code, message, remedy, retry_after_s=RETRY_S)


def _require_same(known: bytes, mark: bytes) -> None:
    if known != mark:
        raise invalid("idempotency_key", "it was used for another request")


def _repeated() -> ServiceValidationError:
    return invalid("example_ids", "an example is in this step twice", "id_repeated")
