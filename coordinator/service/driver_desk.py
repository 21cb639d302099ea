"""The desk's side towards drivers and samplers: their reports, and who gets a place for a driver.

A report changes the store as the driver's ledger and run directory say it is: what it reports twice counts once.
"""

import json
import logging
import re
from functools import partial
from typing import Final

from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.operation_queues import (
    DriverState,
    OperationQueues,
)
from raycloak.coordinator.service.operations import (
    CAP,
    FORWARD_BACKWARD,
    OPTIM_STEP,
    SAMPLE,
    artifact_to_wire,
    dp_metrics,
    failed,
    not_found,
    number_of,
    out_of_budget,
)
from raycloak.coordinator.service.pipe import (
    Begin,
    Close,
    Computed,
    Copied,
    Ended,
    HeldStep,
    Loaded,
    Notice,
    Opened,
    Over,
    PhaseBegun,
    Ready,
    Refused,
    ReleasedStep,
    Report,
    Saved,
    Spent,
)
from raycloak.coordinator.service.places import ClientPlace, late, leaving, next_client
from raycloak.coordinator.service.store import (
    DONE,
    FAILED,
    INITIALIZING,
    LIVE,
    RUNNING,
    TERMINATED,
    ArtifactRow,
    ClientRow,
    OperationRow,
)
from raycloak.metrics.errors import RaycloakError
from raycloak.metrics.service_errors import FutureFailedError, ServiceError

RETRY_S: Final = 1.0
"""The advice of when to ask again where a queue is full."""
_MOST_RESTARTS: Final = 3
"""Drivers of one client that may be lost without having finished a step between them."""
_MOST_LATE: Final = 3
"""Turns of one client that may end without having computed a step between them."""
_LOCKED_RETRY_S: Final = 1.0
_LOCKED_DEADLINE_S: Final = 600.0
"""For how long a driver is started again while another process executes the run: one of a service that was killed ends
after its step."""
_RUN_LOCKED: Final = "run_in_progress"
_OF_OTHERS: Final = frozenset({"account_known", "account_private", "account_ambiguous", "fingerprint_key_unknown"})
"""Refusals that name accounts which are no business of a tenant."""
_RUN: Final = re.compile(r"\brun ([0-9a-f]{16})\b")
_RESUMABLE: Final = ("stopped", "void")
_AT_ONCE: Final = 16  # more operations never run at once
_LOG = logging.getLogger(__name__)


class DriverDesk(OperationQueues):
    """The reports of drivers and samplers, and the places of drivers."""

    def tick(self) -> None:
        """Do what is due by time alone: idle clients, drivers to be tried again, samples that have room, old rows."""
        self._assign()
        self._retention.go_on()
        for client in self._store.clients_with_samples():
            with self._changing(client):
                self._advance(client)

    @property
    def drivers(self) -> int:
        """The number of driver processes."""
        return len(self._drivers)

    def stop(self) -> None:
        """Start no driver any more, and end each after its step."""
        self._stopping = True
        for client_id, driver in self._drivers.items():
            self._leave(client_id, driver)

    def report(self, client_id: str, said: Report | Exited) -> None:
        """Take a report of a client's driver; `Exited` is its last."""
        driver, client = self._drivers.get(client_id), self._store.client(client_id)
        if driver is None or client is None:
            return
        with self._changing(client):
            match said:
                case PhaseBegun():
                    driver.phase = said.words
                    self._show(client_id, wire.Progress(phase=driver.phase, step=client.finished))
                case Notice():
                    _LOG.info("client %s: %s", client_id, said.line)
                case Opened():
                    self._opened(client, said)
                case Ready():
                    self._ready(client, driver, said)
                case Spent():
                    client.epsilon = max(client.epsilon, said.epsilon or 0.0)
                case Computed():
                    driver.computed, driver.tokens = said.step, said.tokens
                    self._computed(client, said)
                case HeldStep():
                    self._held(client, driver, said)
                case ReleasedStep():
                    self._released(client, said, driver.tokens)
                case Saved():
                    self._saved(client, said)
                case Copied():
                    self._copied(client, said)
                case Loaded():
                    self._loaded(client, said)
                case Refused():
                    self._refused(client, said)
                case Over():
                    self._over(client, said)
                case Ended():
                    self._run_ended(client, driver, said)
                case Failed():
                    self._run_failed(client, driver, said)
                case Exited():
                    self._gone(client, driver, said)
            self._advance(client)
        if isinstance(said, Exited):
            self._assign()

    def give_up(self, client_id: str) -> None:
        """End a client of whom a report could not be taken; what was charged stays charged.

        Guarantee: an operation whose outcome cannot be recorded fails, and no future waits for it for ever.
        """
        client = self._store.client(client_id)
        if client is not None:
            with self._changing(client):
                message = "the service could not take what the client's driver reported."
                self._fail(client, failed("report_lost", message, "The service's log has the error."))

    def sampled(self, name: str, completions: list[wire.Completion], cause: ServiceError | None = None) -> None:
        """Take the outcome of a sample: its completions, or the ``cause`` for which there are none."""
        client_id, _, number = name.rpartition(".")
        client, operation = self._store.client(client_id), self._store.operation(client_id, int(number))
        if client is None or operation is None or operation.state != RUNNING:
            return
        with self._changing(client):
            if cause is not None:
                self._finish(client, operation, FAILED, error=cause)
            else:
                result = wire.SampleResult.FromString(operation.result)
                result.completions.extend(completions)
                size = result.ByteSize()
                if client.sampled_bytes + size > self._limits.sampled_bytes:
                    self._finish(
                        client, operation, FAILED, error=texts_full(self._limits.sampled_bytes, FutureFailedError)
                    )
                else:
                    client.sampled_bytes += size
                    self._finish(client, operation, DONE, result=result.SerializeToString())
            self._advance(client)

    def sampling(self, name: str, tokens_per_second: float) -> None:
        """Tell watchers how fast a sample is generated, while it is."""
        client_id, _, number = name.rpartition(".")
        client, operation = self._store.client(client_id), self._store.operation(client_id, int(number))
        if client is not None and operation is not None and operation.state == RUNNING:
            progress = wire.Progress(
                operation_id=name,
                step=operation.step,
                epsilon=client.epsilon,
                tokens_per_second=tokens_per_second,
                phase="sampling",
            )
            self._show(client_id, progress)

    def tokens(self, name: str, completion: int, text: str) -> None:
        """Pass on text that a sample has generated."""
        change = wire.Change(tokens=wire.Tokens(operation_id=name, completion=completion, text=text))
        self._publish([(name.rpartition(".")[0], change)])

    def _opened(self, client: ClientRow, said: Opened) -> None:
        # Another run than before only if that one was void: the watermarks would let it charge all steps again.
        if client.run_id not in ("", said.run_id) and (client.charged or self._store.batches_from(client.client_id, 0)):
            message = f"run {client.run_id} is gone, which steps or batches of this client belong to."
            self._fail(client, failed("run_lost", message))
            return
        client.run_id, client.run_dir = said.run_id, str(said.run_dir)

    def _ready(self, client: ClientRow, driver: DriverState, said: Ready) -> None:
        client.facts = said.encode().decode()
        client.private = int(said.private)
        # The driver before this one may have been lost between a charge and its report.
        client.charged = max(client.charged, said.charged_steps)
        client.epsilon = max(client.epsilon, said.epsilon or 0.0)
        if client.status == INITIALIZING:
            client.status = LIVE
        if client.status == TERMINATED:
            self._tell(client.client_id, Close())
            return
        driver.is_ready, driver.phase = driver.place.leaving_since is None, "training"
        self._locked.pop(client.client_id, None)
        self._catch_up(client, said.finished_steps)
        for step in range(said.finished_steps, client.allowed_releases):
            self._tell_batches(client, step)
        for operation in self._store.open_operations(client.client_id, _AT_ONCE):
            if operation.state == RUNNING:
                self._command(client, operation)
        driver.told = None

    def _catch_up(self, client: ClientRow, finished_steps: int) -> None:
        """Take note of steps that a driver finished while no service was there to be told."""
        if finished_steps > client.finished:
            recorded = self._recorded(client.run_dir)
            for step in range(client.finished, finished_steps):
                self._computed(client, Computed(step=step, epsilon=recorded[step].epsilon, loss=None))
                self._released(client, recorded[step])

    def _computed(self, client: ClientRow, said: Computed) -> None:
        step, epsilon = said.step, said.epsilon
        self._lost.pop(client.client_id, None)
        self._late.pop(client.client_id, None)
        client.charged = max(client.charged, step + 1)
        client.epsilon = max(client.epsilon, epsilon or 0.0)
        # A driver that resumed from an earlier package has not reached the step that is to be cancelled.
        if step >= client.finished:
            client.held = 0  # the cancellation came too late
        for operation in self._store.of_step(client.client_id, FORWARD_BACKWARD, step):
            if operation.state == RUNNING:
                self._finish_forward(client, operation, said.loss, said.tokens)
        self._show(client.client_id, wire.Progress(step=step, epsilon=client.epsilon, phase="computed"))

    def _held(self, client: ClientRow, driver: DriverState, said: HeldStep) -> None:
        if said.epsilon is not None:
            client.charged = max(client.charged, said.step + 1)
            client.epsilon = max(client.epsilon, said.epsilon)
        # A driver that resumed from an earlier package may be held before it has reached the step that is cancelled.
        step = max(said.step, client.finished)
        running = self._store.of_step(client.client_id, OPTIM_STEP, step)
        if any(each.state == RUNNING and self._is_followed(client, each) for each in running):
            client.held = 0  # its examples are needed as they were sealed
        if client.held:
            client.allowed_releases = min(client.allowed_releases, step)
            self._cancel_step(client)
            self._show(client.client_id, wire.Progress(step=step, epsilon=client.epsilon, phase="cancelled"))
        else:
            # It came to its end, or goes on. The driver has taken the release back, and is told of it again.
            driver.told = None

    def _released(self, client: ClientRow, said: ReleasedStep, tokens: int | None = None) -> None:
        """Finish a step.

        Args:
            tokens: that `Computed` of this step stated; None of a private step, and of one found finished.
        """
        found = self._store.of_step(client.client_id, OPTIM_STEP, said.step)
        asked = next((each for each in found if each.state in (RUNNING, DONE)), None)
        if asked is None:
            self._fail(client, failed("released_unasked", f"step {said.step} was released and nobody had asked."))
            return
        if asked.state == DONE:
            # Repeated by a driver that resumed from an earlier package.
            if wire.OptimStepResult.FromString(asked.result).model_digest != said.model_digest:
                self._fail(client, failed("not_exact", f"step {said.step} was repeated with another result."))
            return
        client.finished = max(client.finished, said.step + 1)
        client.digest = said.model_digest
        client.epsilon = max(client.epsilon, said.epsilon or 0.0)
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
        self._finish(client, asked, DONE, result=result.SerializeToString())
        rate = None if tokens is None else tokens / said.seconds
        progress = wire.Progress(step=client.finished, epsilon=client.epsilon, tokens_per_second=rate, phase="released")
        self._show(client.client_id, progress)

    def _saved(self, client: ClientRow, said: Saved) -> None:
        operation = self._running(client, said.id)
        if operation is None:
            return
        try:
            size = self._package_bytes(said.package, bytes.fromhex(said.package_digest))
        except RaycloakError as error:
            self._retire(client, operation, FAILED, failed(error.code, error.message, error.remedy))
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
            created=self._clock(),
            size=size,
        )
        self._store.add_artifact(row)
        client.digest = row.model_digest
        result = wire.SaveStateResult(artifact=artifact_to_wire(row))
        self._finish(client, operation, DONE, result=result.SerializeToString())

    def _loaded(self, client: ClientRow, said: Loaded) -> None:
        operation = self._running(client, said.id)
        if operation is None:
            return
        name = wire.LoadState.FromString(operation.payload).artifact_id
        client.digest = said.model_digest
        result = wire.LoadStateResult(artifact_id=name, step=said.step, model_digest=client.digest)
        self._finish(client, operation, DONE, result=result.SerializeToString())

    def _refused(self, client: ClientRow, said: Refused) -> None:
        operation = self._running(client, said.id)
        if operation is not None:
            self._retire(client, operation, FAILED, failed(said.code, said.message, said.remedy))

    def _over(self, client: ClientRow, said: Over) -> None:
        client.ending = said.ending
        # A driver that resumes the run is not to try again a step that nobody waits for.
        client.allowed_charges = client.allowed_releases = client.finished
        for operation in self._store.open_operations(client.client_id):
            if operation.state == RUNNING and operation.kind in (FORWARD_BACKWARD, OPTIM_STEP):
                self._fail_by_ending(client, operation)

    def _run_ended(self, client: ClientRow, driver: DriverState, said: Ended) -> None:
        # One that stops though nobody told it to is lost, or it would be started again for ever.
        driver.has_ended, driver.is_ready = said.ending not in _RESUMABLE, False
        if not driver.has_ended:
            return
        driver.place.leave(self._monotonic())
        if client.status == TERMINATED:
            return
        client.ending = said.ending
        for operation in self._store.open_operations(client.client_id):
            if not (operation.kind == SAMPLE and operation.package):
                self._fail_by_ending(client, operation)

    def _run_failed(self, client: ClientRow, driver: DriverState, said: Failed) -> None:
        driver.has_ended, driver.is_ready = True, False
        driver.place.leave(self._monotonic())
        client.epsilon = max(client.epsilon, said.epsilon or 0.0)
        if said.code == _RUN_LOCKED:
            now = self._monotonic()
            first, _ = self._locked.get(client.client_id, (now, now))
            self._locked[client.client_id] = (first, now + _LOCKED_RETRY_S)
            if now - first < _LOCKED_DEADLINE_S:
                return
        message, remedy = (_without_others(text, client.run_id) for text in (said.message, said.remedy))
        # A client's configuration has no ledger: who pays is the service's to say.
        remedy = remedy.replace("ledger.account", "the service's settings, as the account of the data")
        if said.code in _OF_OTHERS:
            message, remedy = "the service's ledger knows this data as another account's.", "Ask the operator."
        is_cap = said.code == CAP
        self._fail(client, out_of_budget(client, message, remedy) if is_cap else failed(said.code, message, remedy))

    def _gone(self, client: ClientRow, driver: DriverState, said: Exited) -> None:
        del self._drivers[client.client_id]
        client.waits_since = self._clock()
        if client.status == TERMINATED:
            self._fail_open(client, closed())
            self._drop_batches(client)
        elif driver.place.is_late and not driver.has_ended:
            self._late[client.client_id] += 1
            if self._late[client.client_id] > _MOST_LATE:
                self._fail(client, _too_long(self._limits.turn_seconds + self._limits.leave_seconds))
        elif driver.place.leaving_since is None:
            # In the operator's log alone: a log's line may be about what is no tenant's business.
            _LOG.warning("client %s: its driver ended (%d): %s", client.client_id, said.code, said.last_words)
            self._lost[client.client_id] += 1
            if self._lost[client.client_id] > _MOST_RESTARTS:
                self._fail(client, failed("driver_lost", "the client's driver process was lost again and again."))

    def _copied(self, client: ClientRow, said: Copied) -> None:
        operation = self._running(client, said.id)
        if operation is not None:
            copy = self._copy(client.client_id, said.model_digest)
            self._assign_package(client, operation, str(copy), said.model_digest)

    def _find_operation(self, client: ClientRow, name: str) -> OperationRow:
        number = number_of(client.client_id, name)
        operation = self._store.operation(client.client_id, number) if number is not None else None
        if operation is None:
            raise not_found("future")
        return operation

    def _running(self, client: ClientRow, name: str) -> OperationRow | None:
        """Return the running operation that a report names; None for one that is reported again."""
        operation = self._find_operation(client, name)
        return operation if operation.state == RUNNING else None

    def _assign(self) -> None:
        """Give free places to clients that wait, and have places given up for the others."""
        if self._stopping:
            return
        now = self._monotonic()
        waiting = [
            each
            for each in self._store.waiting_clients()
            if each[0] not in self._drivers and self._locked.get(each[0], (0.0, 0.0))[1] <= now
        ]
        while waiting and len(self._drivers) < self._limits.active_clients:
            chosen = next_client(waiting, [driver.place for driver in self._drivers.values()], self._served)
            waiting.remove(chosen)
            self._start(*chosen)
        places = {client_id: driver.place for client_id, driver in self._drivers.items()}
        limits = self._limits
        for client_id in leaving(waiting, places, self._served, now, limits.idle_seconds, limits.turn_seconds):
            self._leave(client_id, self._drivers[client_id])
        for client_id in late(places, now, limits.leave_seconds) if waiting else ():
            _LOG.warning("client %s: its driver did not give its place up in time and is ended", client_id)
            self._after.append(partial(self._processes.kill, client_id))

    def _start(self, client_id: str, tenant: str) -> None:
        client = self._store.client(client_id)
        assert client is not None, "a client that waits is in the store"
        begin = Begin(
            config=json.loads(client.run_config), base=self._base, run_secret=None, run_id=client.run_id or None
        )
        self._served[tenant] = self._monotonic()
        self._drivers[client_id] = DriverState(ClientPlace(tenant, self._served[tenant]))
        self._after.append(lambda: self._processes.start(client_id, begin))


def _too_long(seconds: float) -> ServiceError:
    return failed(
        "step_too_long",
        f"turn after turn of {seconds:g} s ended before a step had, while other clients waited.",
        "Make its steps shorter, by fewer examples or a smaller model; what was charged stays charged.",
    )


def texts_full(most: int, kind: type[ServiceError]) -> ServiceError:
    message = f"this client's samples have written as much as the service keeps of one client, {most} bytes."
    return kind("texts_full", message, "Sample with another client.", retry_after_s=RETRY_S)


def closed() -> ServiceError:
    return failed("client_closed", "the client was closed; what was charged stays charged.")


def _without_others(text: str, run_id: str) -> str:
    """Return an error's text without names of other runs, which may be another tenant's on a shared account."""
    return _RUN.sub(lambda found: found[0] if found[1] == run_id else "another run", text)
