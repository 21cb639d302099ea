"""The order of each client's operations: which is handed to its driver, and how each one ends.

An operation is *queued* until it is handed to the driver, and *running* from then on. Handed is one step at a time: a
step that is cancelled while it is queued was never charged. A running step is cancelled when the driver says that
nobody computes it; until then it may still come to its end.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import error_to_wire
from raycloak.coordinator.service.client_book import ClientBook
from raycloak.coordinator.service.driver_desk import DriverDesk
from raycloak.coordinator.service.operations import cancelled, operation_id, plan_of, run_ended, steps_done
from raycloak.coordinator.service.pipe import Batches, Copy, Load, Save
from raycloak.coordinator.service.ports import SamplerPort
from raycloak.coordinator.service.sampling.requests import COPY_SUFFIX
from raycloak.coordinator.service.store import ClientRow, ClientState, OperationKind, OperationRow, OperationState
from raycloak.metrics.service_errors import FutureCancelledError, FutureFailedError, ServiceError, ServiceStateError

AT_ONCE: Final = 16  # operations that are looked at for one decision; more never run at once
_COPIES: Final = "copies"
"""Folder of the copies of weights, with one folder for each client that sampled."""
MOST_SAMPLES: Final = 8
"""Samples of one tenant that the sampler has at once, so that it has room for those of the others."""
STEP: Final = (OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP)
_LOG = logging.getLogger(__name__)


class OperationQueues:
    """The operations of all clients, in their order. For one thread at a time.

    Args:
        folder: of the files that clients sent, and of copies of weights that samples need.
    """

    def __init__(self, book: ClientBook, drivers: DriverDesk, sampler: SamplerPort, folder: Path) -> None:
        self._book, self._store = book, book.store
        self._drivers = drivers
        self._sampler = sampler
        self._folder = folder

    def begin(self) -> None:
        """Go on with the samples of the service's last process, and remove files that nobody will ask for."""
        samples = self._store.running_samples()
        for operation in samples:
            owner = self._store.client(operation.client_id)
            assert owner is not None, "an operation has a client"
            self._generate(owner, operation)
        known = {self._folder / name for name in self._store.batch_files()}
        known |= {Path(operation.package) for operation in samples}
        self._book.later(lambda: _remove_all_but(known, self._folder.rglob("*")))

    @contextmanager
    def changing(self, client: ClientRow) -> Iterator[None]:
        """Write what the block changes in ``client`` at its end, and tell watchers."""
        with self._book.changing(client) as changed:
            yield
        if changed & {"digest", "status", "open"}:
            self._tidy(client)
        self._drivers.note_work(client)

    def advance(self, client: ClientRow) -> None:
        """Hand the next operations to the driver, in order, as far as they may run."""
        if client.status == ClientState.LIVE and client.open:
            while self._advance_some(client):
                pass
        self._drivers.allow(client)

    def _advance_some(self, client: ClientRow) -> bool:
        """Look at the first open operations; return whether there are more to look at."""
        in_step, samples = False, 0
        operations = self._store.open_operations(client.client_id, AT_ONCE)
        for operation in operations:
            if operation.state == OperationState.QUEUED:
                if in_step and operation.kind != OperationKind.OPTIM_STEP:
                    return False
                if (
                    operation.kind == OperationKind.SAMPLE
                    and self._store.samples_under_way(client.tenant) >= MOST_SAMPLES
                ):
                    return False
                if not self._hand(client, operation):
                    return False
            if operation.state == OperationState.RUNNING:
                if operation.kind == OperationKind.FORWARD_BACKWARD:
                    # It is to be cancelled: what comes after it waits for the driver's word.
                    if client.steps.held:
                        return False
                    in_step = True
                elif operation.kind == OperationKind.SAMPLE and operation.package:
                    samples += 1
                else:
                    return False
        return len(operations) == AT_ONCE and client.open > samples + in_step

    def _hand(self, client: ClientRow, operation: OperationRow) -> bool:
        """Let an operation run, or end it at once; False if it has to wait for the driver."""
        operation.step = client.steps.finished
        if operation.kind == OperationKind.SAMPLE and client.digest:
            # From the newest released weights, if an artifact has them or a copy that an earlier sample needed.
            found = self._store.artifact_of(client.client_id, client.digest)
            if found is not None or self._copy(client.client_id, client.digest).exists():
                self._book.run(client, operation)
                self.sample(client, operation, client.digest, found.package if found is not None else "")
                return True
        if client.ending and operation.kind in STEP:
            self._fail_by_ending(client, operation)
            return True
        driver = self._drivers.of.get(client.client_id)
        if driver is None or not driver.is_ready:
            return False
        if operation.kind in STEP:
            if client.steps.finished >= plan_of(client.facts).steps:
                self.retire(client, operation, steps_done(FutureFailedError))
                return True
            client.steps = client.steps.handed(operation.kind == OperationKind.OPTIM_STEP)
        if operation.kind == OperationKind.OPTIM_STEP:
            self.tell_batches(client, client.steps.finished)
        self._book.run(client, operation)
        self.command(client, operation)
        return True

    def command(self, client: ClientRow, operation: OperationRow) -> None:
        """Tell the driver of an operation that watermarks do not."""
        name, after = operation_id(operation), operation.step
        if operation.kind == OperationKind.LOAD_STATE:
            self._drivers.tell(client.client_id, Load(id=name, after=after, package=operation.package))
        elif operation.kind == OperationKind.SAVE_STATE:
            self._drivers.tell(client.client_id, Save(id=name, after=after))
        elif operation.kind == OperationKind.SAMPLE and not operation.package:
            copy = self._copy(client.client_id, client.digest)
            self._drivers.tell(client.client_id, Copy(id=name, after=after, path=copy))

    def sample(self, client: ClientRow, operation: OperationRow, digest: str, package: str = "") -> None:
        """Have text generated from the weights with this digest, in a package or in the client's copy of them."""
        package = package or str(self._copy(client.client_id, digest))
        result = wire.SampleResult(step=operation.step, model_digest=digest)
        self._store.change_operation(operation, package=package, result=result.SerializeToString())
        self._generate(client, operation)

    def _generate(self, client: ClientRow, operation: OperationRow) -> None:
        where = operation_id(operation), client.tenant, operation.package, client.run_dir
        request = wire.Sample.FromString(operation.payload)
        self._book.later(lambda: self._sampler.submit(*where, request))

    def _copy(self, client_id: str, digest: str) -> Path:
        return self._folder / _COPIES / client_id / f"{digest}{COPY_SUFFIX}"

    def _tidy(self, client: ClientRow) -> None:
        """Have copies of a client's weights removed that no sample needs; the newest stays for the next sample."""
        # Asked at the end of each operation, and most clients never sample: paths of parts cost more than the rest.
        if not os.access(f"{self._folder}/{_COPIES}/{client.client_id}", os.F_OK):
            return
        newest = self._copy(client.client_id, client.digest)
        needed = {Path(each.package) for each in self._store.open_samples(client.client_id)}
        if client.status == ClientState.LIVE:
            needed.add(newest)
        self._book.later(lambda: _remove_all_but(needed, newest.parent.glob(f"[!.]*{COPY_SUFFIX}")))

    def tell_batches(self, client: ClientRow, step: int) -> None:
        """Name the files of a step that the client sent, before its charge is allowed."""
        if client.sent:
            rows = [row for row in self._store.batches_from(client.client_id, step) if row.step == step]
            files = tuple(self._folder / row.file for row in rows)
            self._drivers.tell(client.client_id, Batches(step=step, files=files))

    def end(self, client: ClientRow) -> None:
        """End what is open of a closed client. Its batches are removed; its run has kept what was to be charged."""
        self._fail_open(
            client, FutureFailedError("client_closed", "the client was closed; what was charged stays charged.")
        )
        folder = self._folder / client.client_id
        if client.sent:
            self._book.later(lambda: shutil.rmtree(folder, ignore_errors=True))

    def retire(self, client: ClientRow, operation: OperationRow, error: ServiceError) -> None:
        """End an operation without a result, and its part in the order of steps."""
        state = OperationState.CANCELLED if isinstance(error, FutureCancelledError) else OperationState.FAILED
        client.steps = client.steps.retired(operation.number, operation.kind == OperationKind.OPTIM_STEP)
        if operation.kind == OperationKind.SAMPLE and operation.package:
            # It is nobody's any more, and others wait for the sampler.
            name = operation_id(operation)
            self._book.later(lambda: self._sampler.cancel(name))
        self._book.finish(client, operation, state, error=error)

    def cancel_queued(self, client: ClientRow, *operations: OperationRow) -> None:
        """Cancel those operations that do not run."""
        for each in operations:
            if each.state == OperationState.QUEUED:
                self.retire(client, each, cancelled(charged=False))

    def cancel(self, client: ClientRow, operation: OperationRow) -> None:
        """Cancel an open operation as far as that is still possible; see `Desk.cancel`.

        Raises:
            ServiceStateError: ``batch_follows``.
        """
        open_operations = self._store.open_operations(client.client_id)
        later = [each for each in open_operations if each.number > operation.number]
        is_running = operation.state == OperationState.RUNNING
        if operation.kind == OperationKind.FORWARD_BACKWARD and not is_running:
            its = [each for each in later if each.kind == OperationKind.OPTIM_STEP][:1]
            self.cancel_queued(client, operation, *its)
        elif operation.kind == OperationKind.OPTIM_STEP and (client.sent or not is_running):
            # Whether or not their own optim_step was submitted: they were sealed for a step that would be another one.
            if self._is_followed(client, operation):
                raise ServiceStateError(
                    "batch_follows", "batches of the next step were sent after this optim_step.", "Let it run."
                )
            if not is_running:
                self.cancel_queued(client, operation, *later)
                self._reopen_step(client, operation)
        elif operation.kind == OperationKind.SAMPLE and operation.package:
            self.retire(client, operation, cancelled(charged=False))
        else:
            self.cancel_queued(client, operation)
        if is_running and (
            operation.kind == OperationKind.FORWARD_BACKWARD
            or (operation.kind == OperationKind.OPTIM_STEP and client.sent)
        ):
            driver = self._drivers.of.get(client.client_id)
            # Asked later, the driver could answer with a report that it sent before, while it goes on.
            if driver is None or driver.computed < operation.step:
                client.steps = client.steps.holding(True)

    def leave_step(self, client: ClientRow, step: int) -> bool:
        """Cancel a step that the driver has left, and what waits behind it; False if it comes to its end or goes on."""
        running = self._store.of_step(client.client_id, OperationKind.OPTIM_STEP, step)
        if any(each.state == OperationState.RUNNING and self._is_followed(client, each) for each in running):
            client.steps = client.steps.holding(False)  # its examples are needed as they were sealed
        if not client.steps.held:
            return False
        client.steps = client.steps.left(step)
        for operation in self._store.open_operations(client.client_id):
            if operation.state == OperationState.RUNNING and operation.kind in STEP:
                is_charged = client.private and client.steps.charged > operation.step
                self.retire(client, operation, cancelled(charged=is_charged))
                if client.sent:
                    self._reopen_step(client, operation)
            elif operation.state == OperationState.QUEUED:
                if operation.kind == OperationKind.FORWARD_BACKWARD:
                    break
                self.cancel_queued(client, operation)
        return True

    def _is_followed(self, client: ClientRow, optim: OperationRow) -> bool:
        """Return whether batches were sent, and so sealed, for a step after that of an ``optim_step``."""
        return client.sent and self._store.newest_forward(client.client_id, client.next_number) > optim.number

    def _reopen_step(self, client: ClientRow, optim: OperationRow) -> None:
        """Have the ``forward_backward`` of a cancelled ``optim_step`` wait for another one."""
        pending, examples = self._store.newest_forward(client.client_id, optim.number), client.steps.sent_examples
        if client.sent:
            batches = self._store.batches_from(client.client_id, client.steps.submitted_steps)
            examples = sum(batch.examples for batch in batches)
        client.steps = client.steps.reopened(pending, examples)

    def run_ended(self, client: ClientRow, concerns: Callable[[OperationRow], bool]) -> None:
        """End the open operations that the end of the run leaves without a result."""
        for operation in filter(concerns, self._store.open_operations(client.client_id)):
            self._fail_by_ending(client, operation)

    def _fail_by_ending(self, client: ClientRow, operation: OperationRow) -> None:
        self.retire(client, operation, run_ended(client, FutureFailedError, operation.kind in STEP))

    def fail(self, client: ClientRow, cause: ServiceError) -> None:
        """End a client, and all its open operations, for one cause; one that has ended keeps its own."""
        if client.status not in (ClientState.INITIALIZING, ClientState.LIVE):
            return
        client.status, client.error = ClientState.ERROR, error_to_wire(cause).SerializeToString()
        _LOG.warning("client %s failed: %s", client.client_id, cause.code)
        self._fail_open(client, cause)
        driver = self._drivers.of.get(client.client_id)
        if driver is not None and not driver.has_ended:
            self._drivers.leave(client.client_id)

    def _fail_open(self, client: ClientRow, cause: ServiceError) -> None:
        for operation in self._store.open_operations(client.client_id):
            self.retire(client, operation, cause)


def _remove_all_but(known: set[Path], files: Iterable[Path]) -> None:
    for file in files:
        if file.is_file() and file not in known:
            file.unlink()
