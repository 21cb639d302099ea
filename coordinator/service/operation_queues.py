"""The order of each client's operations: which is handed to its driver, and how each one ends.

Every change is made inside `OperationQueues.turn`, which makes it durable and only then tells drivers and watchers.
What a future depends on is in the store alone. In memory is only which driver processes there are.

An operation is *queued* until it is handed to the driver, and *running* from then on. Handed is one step at a time: a
step that is cancelled while it is queued was never charged. A running step is cancelled when the driver says that
nobody computes it; until then it may still come to its end.
"""

import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.error_wire import error_to_wire
from raycloak.coordinator.service.operations import (
    CAP,
    FORWARD_BACKWARD,
    LOAD_STATE,
    OPTIM_STEP,
    SAMPLE,
    SAVE_STATE,
    cancelled,
    client_status,
    dp_metrics,
    failed,
    operation_id,
    out_of_budget,
    plan_of,
)
from raycloak.coordinator.service.pipe import (
    Allow,
    Batches,
    Command,
    Copy,
    Load,
    Save,
)
from raycloak.coordinator.service.places import ClientPlace
from raycloak.coordinator.service.ports import DriverPort, Measured, News, Records, SamplerPort, Stored
from raycloak.coordinator.service.retention import ClientRetention
from raycloak.coordinator.service.sampling.requests import COPY_SUFFIX
from raycloak.coordinator.service.settings import ServiceSettings
from raycloak.coordinator.service.store import (
    CANCELLED,
    DONE,
    ERROR,
    FAILED,
    INITIALIZING,
    LIVE,
    QUEUED,
    RUNNING,
    ClientRow,
    OperationRow,
    Store,
)
from raycloak.metrics.service_errors import FutureFailedError, ServiceError

_AT_ONCE: Final = 16  # operations that are looked at for one decision
_COPIES: Final = "copies"
"""Folder of the copies of weights, with one folder for each client that sampled."""
MOST_SAMPLES: Final = 8
"""Samples of one tenant that the sampler has at once, so that it has room for those of the others."""
ENDINGS: Final = {
    "early_stopped": "the run was stopped early: its result no longer got better.",
    "complete": "the run is complete.",
}
_LOG = logging.getLogger(__name__)
# Made once, since each call reads all of a client twice.
_NAMES: Final = tuple(each.name for each in fields(ClientRow))
_values: Final[Callable[[ClientRow], tuple[Any, ...]]] = attrgetter(*_NAMES)
_SHOWN: Final = {"finished", "charged", "epsilon", "facts", "error", "run_id", "digest", "ending"}
"""Columns of a client whose change watchers are told, besides its status on the wire."""


@dataclass(slots=True)
class DriverState:
    """The known facts of a driver process; it is lost with this process, as the driver is."""

    place: ClientPlace
    is_ready: bool = False
    has_ended: bool = False
    told: Allow | None = None
    computed: int = -1  # the step that it computed last, and its tokens
    tokens: int | None = None
    phase: str = "waiting for the driver"


class OperationQueues:
    """The operations of all clients, in their order. For one thread at a time.

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
        self._base = base
        self._store = store
        self._processes = drivers
        self._sampler = sampler
        self._folder = folder
        self._publish = publish
        self._measured = measured
        self._recorded, self._package_bytes = records.steps, records.package_bytes
        self._retention = ClientRetention(store, records)
        self._recipient = recipient
        self._clock = clock
        self._monotonic = monotonic
        self._drivers: dict[str, DriverState] = {}
        self._served: dict[str, float] = {}  # when each tenant last got a place for a driver
        self._after: list[Callable[[], None]] = []
        self._news: list[News] = []
        self._changed: dict[int, OperationRow] = {}  # operations with a new revision, of one `_changing`
        self._stopping = False
        # Of clients whose driver was lost: how often since a step, and when the run's lock was first taken.
        self._lost: Counter[str] = Counter()
        # Of clients whose driver was ended as it gave its place up too late: how often since a step.
        self._late: Counter[str] = Counter()
        self._locked: dict[str, tuple[float, float]] = {}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Make all of the block's changes durable, or none if it raises; then tell drivers and watchers."""
        try:
            with self._store.transaction():
                yield
        except BaseException:
            self._after.clear()
            raise
        after, self._after = self._after, []
        for act in after:
            act()
        news, self._news = self._news, []
        if news:
            self._publish(news)

    @contextmanager
    def part(self) -> Iterator[None]:
        """Make a part of a turn, which is undone alone if it raises."""
        mark = len(self._after)
        try:
            with self._store.part():
                yield
        except BaseException:
            del self._after[mark:]
            raise

    @contextmanager
    def _changing(self, client: ClientRow) -> Iterator[None]:
        """Write what the block changes in ``client`` at its end, and tell watchers."""
        before, status = _values(client), client_status(client)
        self._changed = {}
        yield
        changed = {name: now for name, now, then in zip(_NAMES, _values(client), before, strict=True) if now != then}
        if client_status(client) != status or changed.keys() & _SHOWN:
            client.revision += 1
            client.changed = client.revision
            changed |= {"revision": client.revision, "changed": client.changed}
        if changed:
            self._store.change_client(client, **changed)
        if changed.keys() & {"digest", "status", "open"}:
            self._tidy(client)
        if "revision" in changed:
            stored = Stored(tuple(self._changed.values()), client.changed)
            self._after.append(lambda: self._news.append((client.client_id, stored)))
        driver = self._drivers.get(client.client_id)
        if driver is not None:
            since = driver.place.idle_since
            idle = driver.is_ready and not client.open
            driver.place.idle_since = (self._monotonic() if since is None else since) if idle else None

    def _enter(self, client: ClientRow, kind: str, key: str, mark: bytes, payload: bytes, package: str) -> OperationRow:
        """Record a new operation at the end of the queue."""
        now = self._clock()
        client.revision += 1
        operation = OperationRow(
            client_id=client.client_id,
            number=client.next_number,
            idempotency_key=key,
            fingerprint=mark,
            kind=kind,
            state=QUEUED,
            revision=client.revision,
            submitted=now,
            payload=payload,
            package=package,
        )
        self._store.add_operation(operation)
        self._changed[operation.number] = operation
        client.next_number += 1
        client.open += 1
        client.open_bytes += len(payload)
        if client.open == 1 and client.client_id not in self._drivers:
            client.waits_since = now
        return operation

    def _advance(self, client: ClientRow) -> None:
        """Hand the next operations to the driver, in order, as far as they may run."""
        if client.status == LIVE and client.open:
            while self._advance_some(client):
                pass
        driver = self._drivers.get(client.client_id)
        allowed = Allow(computed=client.allowed_charges, released=client.allowed_releases, held=bool(client.held))
        if driver is not None and driver.is_ready and driver.told != allowed:
            driver.told = allowed
            self._tell(client.client_id, allowed)

    def _advance_some(self, client: ClientRow) -> bool:
        """Look at the first open operations; return whether there are more to look at."""
        in_step, samples = False, 0
        operations = self._store.open_operations(client.client_id, _AT_ONCE)
        for operation in operations:
            if operation.state == QUEUED:
                if in_step and operation.kind != OPTIM_STEP:
                    return False
                if operation.kind == SAMPLE and self._store.samples_under_way(client.tenant) >= MOST_SAMPLES:
                    return False
                if not self._hand(client, operation):
                    return False
            if operation.state == RUNNING:
                if operation.kind == FORWARD_BACKWARD:
                    # It is to be cancelled: what comes after it waits for the driver's word.
                    if client.held:
                        return False
                    in_step = True
                elif operation.kind == SAMPLE and operation.package:
                    samples += 1
                else:
                    return False
        return len(operations) == _AT_ONCE and client.open > samples + in_step

    def _hand(self, client: ClientRow, operation: OperationRow) -> bool:
        """Let an operation run, or end it at once; False if it has to wait for the driver."""
        operation.step = client.finished
        if operation.kind == SAMPLE and self._sampled_at_once(client, operation):
            return True
        if client.ending and operation.kind in (FORWARD_BACKWARD, OPTIM_STEP):
            self._fail_by_ending(client, operation)
            return True
        driver = self._drivers.get(client.client_id)
        if driver is None or not driver.is_ready:
            return False
        if operation.kind in (FORWARD_BACKWARD, OPTIM_STEP):
            if client.finished >= plan_of(client.facts).steps:
                self._retire(client, operation, FAILED, steps_done(FutureFailedError))
                return True
            client.allowed_charges = max(client.allowed_charges, client.finished + 1)
            client.held = 0
        if operation.kind == OPTIM_STEP:
            client.allowed_releases = max(client.allowed_releases, client.finished + 1)
            self._tell_batches(client, client.finished)
        self._run(client, operation)
        self._command(client, operation)
        return True

    def _run(self, client: ClientRow, operation: OperationRow) -> None:
        client.revision += 1
        self._store.change_operation(
            operation, state=RUNNING, step=operation.step, handed=self._clock(), revision=client.revision
        )
        self._changed[operation.number] = operation

    def _command(self, client: ClientRow, operation: OperationRow) -> None:
        """Tell the driver of an operation that watermarks do not."""
        name, after = operation_id(operation), operation.step
        if operation.kind == LOAD_STATE:
            self._tell(client.client_id, Load(id=name, after=after, package=operation.package))
        elif operation.kind == SAVE_STATE:
            self._tell(client.client_id, Save(id=name, after=after))
        elif operation.kind == SAMPLE and not operation.package:
            copy = self._copy(client.client_id, client.digest)
            self._tell(client.client_id, Copy(id=name, after=after, path=copy))

    def _sampled_at_once(self, client: ClientRow, operation: OperationRow) -> bool:
        """Sample from the newest released weights, if an artifact has them or a copy that an earlier sample needed."""
        if not client.digest:
            return False
        found = self._store.artifact_of(client.client_id, client.digest)
        copy = self._copy(client.client_id, client.digest)
        if found is None and not copy.exists():
            return False
        self._run(client, operation)
        self._assign_package(client, operation, found.package if found is not None else str(copy), client.digest)
        return True

    def _copy(self, client_id: str, digest: str) -> Path:
        return self._folder / _COPIES / client_id / f"{digest}{COPY_SUFFIX}"

    def _tidy(self, client: ClientRow) -> None:
        """Have copies of a client's weights removed that no sample needs; the newest stays for the next sample."""
        # Asked at the end of each operation, and most clients never sample: paths of parts cost more than the rest.
        if not os.access(f"{self._folder}/{_COPIES}/{client.client_id}", os.F_OK):
            return
        newest = self._copy(client.client_id, client.digest)
        needed = {Path(each.package) for each in self._store.open_samples(client.client_id)}
        if client.status == LIVE:
            needed.add(newest)
        self._after.append(lambda: remove_all_but(needed, newest.parent.glob(f"[!.]*{COPY_SUFFIX}")))

    def _assign_package(self, client: ClientRow, operation: OperationRow, package: str, digest: str) -> None:
        result = wire.SampleResult(step=operation.step, model_digest=digest)
        self._store.change_operation(operation, package=package, result=result.SerializeToString())
        self._generate(client, operation)

    def _generate(self, client: ClientRow, operation: OperationRow) -> None:
        where = operation_id(operation), client.tenant, operation.package, client.run_dir
        request = wire.Sample.FromString(operation.payload)
        self._after.append(lambda: self._sampler.submit(*where, request))

    def _tell_batches(self, client: ClientRow, step: int) -> None:
        """Name the files of a step that the client sent, before its charge is allowed."""
        if client.sent:
            rows = [row for row in self._store.batches_from(client.client_id, step) if row.step == step]
            self._tell(client.client_id, Batches(step=step, files=tuple(self._folder / row.file for row in rows)))

    def _drop_batches(self, client: ClientRow) -> None:
        """Have the files of a closed client's batches removed; its run has kept those that were to be charged."""
        folder = self._folder / client.client_id
        if client.sent:
            self._after.append(lambda: shutil.rmtree(folder, ignore_errors=True))

    def _finish_forward(
        self, client: ClientRow, operation: OperationRow, loss: float | None, tokens: int | None
    ) -> None:
        metrics = dp_metrics(client)
        result = wire.ForwardBackwardResult(step=operation.step, loss=loss, tokens=tokens, dp_metrics=metrics)
        self._finish(client, operation, DONE, result=result.SerializeToString())

    def _finish(
        self,
        client: ClientRow,
        operation: OperationRow,
        state: str,
        result: bytes = b"",
        error: ServiceError | None = None,
    ) -> None:
        """End an operation, whose request nobody needs any more."""
        client.revision += 1
        client.open -= 1
        client.open_bytes -= len(operation.payload)
        now = self._clock()
        queued_s = (operation.handed or now) - operation.submitted
        running_s = now - operation.handed if operation.handed else None
        self._after.append(lambda: self._measured.operation_ended(operation.kind, state, queued_s, running_s))
        self._store.change_operation(
            operation,
            state=state,
            step=operation.step,
            revision=client.revision,
            ended=now,
            payload=b"",
            result=result,
            error=error_to_wire(error).SerializeToString() if error is not None else b"",
        )
        self._changed[operation.number] = operation

    def _retire(self, client: ClientRow, operation: OperationRow, state: str, error: ServiceError) -> None:
        """End an operation without a result, and its part in the order of steps."""
        if operation.kind == OPTIM_STEP:
            client.submitted_steps -= 1
        if client.pending == operation.number:
            client.pending = -1
        if operation.kind == SAMPLE and operation.package:
            # It is nobody's any more, and others wait for the sampler.
            name = operation_id(operation)
            self._after.append(lambda: self._sampler.cancel(name))
        self._finish(client, operation, state, error=error)

    def _cancel_step(self, client: ClientRow) -> None:
        """Cancel the running step and what waits behind it for the same place between two steps."""
        for operation in self._store.open_operations(client.client_id):
            if operation.state == RUNNING and operation.kind in (FORWARD_BACKWARD, OPTIM_STEP):
                is_charged = bool(client.private) and client.charged > operation.step
                self._retire(client, operation, CANCELLED, cancelled(charged=is_charged))
                if client.sent:
                    self._reopen_step(client, operation)
            elif operation.state == QUEUED:
                if operation.kind == FORWARD_BACKWARD:
                    break
                self._retire(client, operation, CANCELLED, cancelled(charged=False))

    def _hold(self, client: ClientRow, operation: OperationRow) -> None:
        """Have the driver leave the running step of an operation, unless it has computed it."""
        driver = self._drivers.get(client.client_id)
        # Asked later, the driver could answer with a report that it sent before, while it goes on.
        if driver is None or driver.computed < operation.step:
            client.held = 1

    def _is_followed(self, client: ClientRow, optim: OperationRow) -> bool:
        """Return whether batches were sent, and so sealed, for a step after that of an ``optim_step``."""
        return bool(client.sent) and self._store.newest_forward(client.client_id, client.next_number) > optim.number

    def _reopen_step(self, client: ClientRow, optim: OperationRow) -> None:
        """Have the ``forward_backward`` of a cancelled ``optim_step`` wait for another one."""
        client.pending = self._store.newest_forward(client.client_id, optim.number)
        if client.sent:
            batches = self._store.batches_from(client.client_id, client.submitted_steps)
            client.sent_examples = sum(batch.examples for batch in batches)

    def _fail_by_ending(self, client: ClientRow, operation: OperationRow) -> None:
        if client.ending == CAP and operation.kind in (FORWARD_BACKWARD, OPTIM_STEP):
            cause = no_room(client)
        else:
            cause = failed("run_ended", ENDINGS.get(client.ending, "the run has ended."))
        self._retire(client, operation, FAILED, cause)

    def _fail(self, client: ClientRow, cause: ServiceError) -> None:
        """End a client, and all its open operations, for one cause; one that has ended keeps its own."""
        if client.status not in (INITIALIZING, LIVE):
            return
        client.status, client.error = ERROR, error_to_wire(cause).SerializeToString()
        _LOG.warning("client %s failed: %s", client.client_id, cause.code)
        self._fail_open(client, cause)
        driver = self._drivers.get(client.client_id)
        if driver is not None and not driver.has_ended:
            self._leave(client.client_id, driver)

    def _fail_open(self, client: ClientRow, cause: ServiceError) -> None:
        for operation in self._store.open_operations(client.client_id):
            self._retire(client, operation, FAILED, cause)

    def _show(self, client_id: str, progress: wire.Progress) -> None:
        """Tell watchers of progress, which is not durable."""
        self._after.append(lambda: self._news.append((client_id, wire.Change(progress=progress))))

    def _tell(self, client_id: str, command: Command) -> None:
        self._after.append(lambda: self._processes.send(client_id, command))

    def _leave(self, client_id: str, driver: DriverState) -> None:
        """Have a driver give its place up after its step."""
        driver.is_ready = False
        driver.place.leave(self._monotonic())
        self._after.append(lambda: self._processes.stop(client_id))


def remove_all_but(known: set[Path], files: Iterable[Path]) -> None:
    for file in files:
        if file.is_file() and file not in known:
            file.unlink()


def steps_done(kind: type[ServiceError]) -> ServiceError:
    remedy = "Save the state; a client with more steps is another client."
    return kind("steps_done", "all planned steps are done.", remedy)


def no_room(client: ClientRow) -> ServiceError:
    return out_of_budget(
        client,
        "the account has no room for another step.",
        "Save what was released; train on with another client, with more noise or under a higher cap.",
    )
