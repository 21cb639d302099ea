"""The reports of drivers and samplers, and what follows from each for its client.

A report changes the store as the driver's ledger and run directory say it is: what it reports twice counts once.
"""

import json
import logging
import re
from dataclasses import dataclass
from typing import Final

from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service import pipe
from raycloak.coordinator.service.client_book import ClientBook
from raycloak.coordinator.service.driver_desk import DriverDesk, DriverState
from raycloak.coordinator.service.operation_queues import AT_ONCE, STEP, OperationQueues
from raycloak.coordinator.service.operations import (
    CAP,
    artifact_to_wire,
    dp_metrics,
    operation_of,
    out_of_budget,
    texts_full,
)
from raycloak.coordinator.service.ports import Records
from raycloak.coordinator.service.store import (
    ArtifactRow,
    ClientRow,
    ClientState,
    OperationKind,
    OperationRow,
    OperationState,
)
from raycloak.metrics.errors import RaycloakError
from raycloak.metrics.service_errors import FutureFailedError, ServiceError

_RUN_LOCKED: Final = "run_in_progress"
_OF_OTHERS: Final = frozenset({"account_known", "account_private", "account_ambiguous", "fingerprint_key_unknown"})
"""Refusals that name accounts which are no business of a tenant."""
_RUN: Final = re.compile(r"\brun ([0-9a-f]{16})\b")
_RESUMABLE: Final = ("stopped", "void")
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class DriverReports:
    """The reports of all drivers and samples. For one thread at a time.

    Args:
        most_sampled: bytes of the texts that samples of one client may write.
    """

    _book: ClientBook
    _drivers: DriverDesk
    _queues: OperationQueues
    _records: Records
    _most_sampled: int

    def __post_init__(self) -> None:
        self._store = self._book.store

    def report(self, client_id: str, said: pipe.Report | Exited) -> None:
        """Take a report of a client's driver; `Exited` is its last."""
        driver, client = self._drivers.of.get(client_id), self._store.client(client_id)
        if driver is None or client is None:
            return
        with self._queues.changing(client):
            match said:
                case pipe.PhaseBegun():
                    driver.phase = said.words
                    self._book.show(client, driver.phase, client.steps.finished)
                case pipe.Notice():
                    _LOG.info("client %s: %s", client_id, said.line)
                case pipe.Opened():
                    self._opened(client, said)
                case pipe.Ready():
                    self._ready(client, driver, said)
                case pipe.Spent():
                    _spend(client, said.epsilon)
                case pipe.Computed():
                    driver.computed, driver.tokens = said.step, said.tokens
                    self._computed(client, said)
                case pipe.HeldStep():
                    self._held(client, driver, said)
                case pipe.ReleasedStep():
                    self._released(client, said, driver.tokens)
                case pipe.Saved() | pipe.Copied() | pipe.Loaded() | pipe.Refused():
                    operation = operation_of(self._store, client, said.id)
                    # One that is reported again has ended.
                    if operation.state == OperationState.RUNNING:
                        self._done(client, operation, said)
                case pipe.Over():
                    client.ending = said.ending
                    client.steps = client.steps.over()
                    self._queues.run_ended(
                        client, lambda each: each.state == OperationState.RUNNING and each.kind in STEP
                    )
                case pipe.Ended():
                    self._run_ended(client, driver, said)
                case Failed():
                    self._run_failed(client, driver, said)
                case Exited():
                    cause = self._drivers.gone(client, said)
                    client.waits_since = self._book.clock()
                    if client.status == ClientState.TERMINATED:
                        self._queues.end(client)
                    elif cause is not None:
                        self._queues.fail(client, cause)
            self._queues.advance(client)
        if isinstance(said, Exited):
            self._drivers.assign()

    def give_up(self, client_id: str) -> None:
        """End a client of whom a report could not be taken; what was charged stays charged.

        Guarantee: an operation whose outcome cannot be recorded fails, and no future waits for it for ever.
        """
        client = self._store.client(client_id)
        if client is not None:
            with self._queues.changing(client):
                message = "the service could not take what the client's driver reported."
                self._queues.fail(client, FutureFailedError("report_lost", message, "The service's log has the error."))

    def sampled(self, name: str, completions: list[wire.Completion], cause: ServiceError | None = None) -> None:
        """Take the outcome of a sample: its completions, or the ``cause`` for which there are none."""
        client, operation = self._sample(name)
        if client is None or operation is None:
            return
        with self._queues.changing(client):
            result = wire.SampleResult.FromString(operation.result)
            result.completions.extend(completions)
            size = result.ByteSize()
            if cause is None and client.sampled_bytes + size > self._most_sampled:
                cause = texts_full(self._most_sampled, FutureFailedError)
            if cause is not None:
                self._book.finish(client, operation, OperationState.FAILED, error=cause)
            else:
                client.sampled_bytes += size
                self._book.finish(client, operation, OperationState.DONE, result)
            self._queues.advance(client)

    def sampling(self, name: str, tokens_per_second: float) -> None:
        """Tell watchers how fast a sample is generated, while it is."""
        client, operation = self._sample(name)
        if client is not None and operation is not None:
            self._book.show(client, "sampling", operation.step, tokens_per_second, name)

    def tokens(self, name: str, completion: int, text: str) -> None:
        """Pass on text that a sample has generated. From any thread."""
        change = wire.Change(tokens=wire.Tokens(operation_id=name, completion=completion, text=text))
        self._book.publish([(name.rpartition(".")[0], change)])

    def _sample(self, name: str) -> tuple[ClientRow | None, OperationRow | None]:
        """Return a sample that runs, and its client."""
        client_id, _, number = name.rpartition(".")
        operation = self._store.operation(client_id, int(number))
        is_running = operation is not None and operation.state == OperationState.RUNNING
        return self._store.client(client_id), operation if is_running else None

    def _opened(self, client: ClientRow, said: pipe.Opened) -> None:
        # Another run than before only if that one was void: the watermarks would let it charge all steps again.
        is_another = client.run_id not in ("", said.run_id)
        if is_another and (client.steps.charged or self._store.batches_from(client.client_id, 0)):
            message = f"run {client.run_id} is gone, which steps or batches of this client belong to."
            self._queues.fail(client, FutureFailedError("run_lost", message))
            return
        client.run_id, client.run_dir = said.run_id, str(said.run_dir)

    def _ready(self, client: ClientRow, driver: DriverState, said: pipe.Ready) -> None:
        client.facts = said.encode().decode()
        client.private = said.private
        client.steps = client.steps.paid(said.charged_steps)
        _spend(client, said.epsilon)
        if client.status == ClientState.INITIALIZING:
            client.status = ClientState.LIVE
        if client.status == ClientState.TERMINATED:
            self._drivers.tell(client.client_id, pipe.Close())
            return
        self._drivers.ready(client.client_id)
        # Steps that a driver finished while no service was there to be told.
        known = client.steps.finished
        recorded = self._records.steps(client.run_dir) if said.finished_steps > known else {}
        for step in range(known, said.finished_steps):
            self._computed(client, pipe.Computed(step=step, epsilon=recorded[step].epsilon, loss=None))
            self._released(client, recorded[step])
        for step in range(said.finished_steps, client.steps.allowed_releases):
            self._queues.tell_batches(client, step)
        for operation in self._store.open_operations(client.client_id, AT_ONCE):
            if operation.state == OperationState.RUNNING:
                self._queues.command(client, operation)
        driver.told = None

    def _computed(self, client: ClientRow, said: pipe.Computed) -> None:
        self._drivers.moved(client.client_id)
        client.steps = client.steps.computed(said.step)
        _spend(client, said.epsilon)
        for operation in self._store.of_step(client.client_id, OperationKind.FORWARD_BACKWARD, said.step):
            if operation.state == OperationState.RUNNING:
                result = wire.ForwardBackwardResult(
                    step=operation.step, loss=said.loss, tokens=said.tokens, dp_metrics=dp_metrics(client)
                )
                self._book.finish(client, operation, OperationState.DONE, result)
        self._book.show(client, "computed", said.step)

    def _held(self, client: ClientRow, driver: DriverState, said: pipe.HeldStep) -> None:
        if said.epsilon is not None:
            client.steps = client.steps.paid(said.step + 1)
            _spend(client, said.epsilon)
        # A driver that resumed from an earlier package may be held before it has reached the step that is cancelled.
        step = max(said.step, client.steps.finished)
        if self._queues.leave_step(client, step):
            self._book.show(client, "cancelled", step)
        else:
            # The driver has taken the release back, and is told of it again.
            driver.told = None

    def _released(self, client: ClientRow, said: pipe.ReleasedStep, tokens: int | None = None) -> None:
        """Finish a step.

        Args:
            tokens: that `Computed` of this step stated; None of a private step, and of one found finished.
        """
        found = self._store.of_step(client.client_id, OperationKind.OPTIM_STEP, said.step)
        asked = next((each for each in found if each.state in (OperationState.RUNNING, OperationState.DONE)), None)
        if asked is None:
            message = f"step {said.step} was released and nobody had asked."
            self._queues.fail(client, FutureFailedError("released_unasked", message))
            return
        if asked.state == OperationState.DONE:
            # Repeated by a driver that resumed from an earlier package.
            if wire.OptimStepResult.FromString(asked.result).model_digest != said.model_digest:
                message = f"step {said.step} was repeated with another result."
                self._queues.fail(client, FutureFailedError("not_exact", message))
            return
        client.steps = client.steps.released(said.step)
        client.digest = said.model_digest
        _spend(client, said.epsilon)
        result = wire.OptimStepResult(
            step=said.step + 1,
            model_digest=said.model_digest,
            dp_metrics=dp_metrics(client),
            loss=said.loss,
            evaluation_accuracy=said.evaluation_accuracy,
            evaluation_loss=said.evaluation_loss,
            seconds=said.seconds,
            grad_norm=said.grad_norm,
        )
        self._book.finish(client, asked, OperationState.DONE, result)
        rate = None if tokens is None else tokens / said.seconds
        self._book.show(client, "released", client.steps.finished, rate)

    def _done(
        self, client: ClientRow, operation: OperationRow, said: pipe.Saved | pipe.Copied | pipe.Loaded | pipe.Refused
    ) -> None:
        match said:
            case pipe.Saved():
                self._saved(client, operation, said)
            case pipe.Copied():
                self._queues.sample(client, operation, said.model_digest)
            case pipe.Loaded():
                name = wire.LoadState.FromString(operation.payload).artifact_id
                client.digest = said.model_digest
                result = wire.LoadStateResult(artifact_id=name, step=said.step, model_digest=client.digest)
                self._book.finish(client, operation, OperationState.DONE, result)
            case pipe.Refused():
                self._queues.retire(client, operation, FutureFailedError(said.code, said.message, said.remedy))

    def _saved(self, client: ClientRow, operation: OperationRow, said: pipe.Saved) -> None:
        try:
            size = self._records.package_bytes(said.package, bytes.fromhex(said.package_digest))
        except RaycloakError as error:
            self._queues.retire(client, operation, FutureFailedError(error.code, error.message, error.remedy))
            return
        request = wire.SaveState.FromString(operation.payload)
        row = ArtifactRow(
            client_id=client.client_id,
            number=operation.number,
            step=said.step,
            package=said.package,
            package_digest=said.package_digest,
            model_digest=said.model_digest,
            metadata=json.dumps(dict(request.metadata), sort_keys=True),
            created=self._book.clock(),
            size=size,
        )
        self._store.add(row)
        client.digest = row.model_digest
        self._book.finish(client, operation, OperationState.DONE, wire.SaveStateResult(artifact=artifact_to_wire(row)))

    def _run_ended(self, client: ClientRow, driver: DriverState, said: pipe.Ended) -> None:
        driver.is_ready = False
        # One that stops though nobody told it to is lost, or it would be started again for ever.
        if said.ending in _RESUMABLE:
            return
        self._drivers.ended(driver)
        if client.status == ClientState.TERMINATED:
            return
        client.ending = said.ending
        self._queues.run_ended(client, lambda each: not (each.kind == OperationKind.SAMPLE and each.package))

    def _run_failed(self, client: ClientRow, driver: DriverState, said: Failed) -> None:
        self._drivers.ended(driver)
        _spend(client, said.epsilon)
        if said.code == _RUN_LOCKED and self._drivers.waits_for_lock(client.client_id):
            return
        # Names of other runs may be another tenant's on a shared account.
        message, remedy = (
            _RUN.sub(lambda found: found[0] if found[1] == client.run_id else "another run", text)
            for text in (said.message, said.remedy)
        )
        # A client's configuration has no ledger: who pays is the service's to say.
        remedy = remedy.replace("ledger.account", "the service's settings, as the account of the data")
        if said.code in _OF_OTHERS:
            message, remedy = "the service's ledger knows this data as another account's.", "Ask the operator."
        is_cap = said.code == CAP
        cause = out_of_budget(client, message, remedy) if is_cap else FutureFailedError(said.code, message, remedy)
        self._queues.fail(client, cause)


def _spend(client: ClientRow, epsilon: float | None) -> None:
    """Take note of an account's epsilon; a report of an earlier one comes late."""
    client.epsilon = max(client.epsilon, epsilon or 0.0)
