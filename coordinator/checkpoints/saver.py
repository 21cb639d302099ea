"""Checkpoints: sealed packages of a running training. No step waits for a disk or a network.

    main thread        offer(snapshot) ──┐                ┌── sign ──┐                 ┌── record published
    background thread                    └── write draft ─┘          └── publish ──────┘            └── retain

Only the main thread talks to actors; only the background thread touches the storage. One package is under way at a
time. Of the snapshots that wait, the newest is kept. An error of the storage is reported once, and tried again later.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from raycloak.attestation.sealed.package_keys import RecipientPublic
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.checkpoints.retention import PackageRetention
from raycloak.coordinator.checkpoints.storage import (
    MANIFEST,
    RUN_MANIFEST,
    SIGNATURE,
    STORAGE_ERRORS,
    Draft,
    PackageStorage,
    one_line,
)
from raycloak.coordinator.checkpoints.writer import PackageOrigin, Snapshot, write_draft
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import EvidenceError

# Pause before a storage that failed is tried again; a newer snapshot may take the waiting one's place meanwhile.
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Published:
    """A package that is in its storage, and in the log of its run."""

    name: str
    manifest: PackageManifest


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A package that still lacks its signature."""

    snapshot: Snapshot
    draft: Draft
    manifest: PackageManifest


@dataclass(frozen=True, slots=True)
class _Work:
    """The background thread's present work, and what the main thread does afterwards."""

    future: Future[Any]
    then: Callable[[Any], None]
    failed: Callable[[BaseException], None]


class Checkpoints:
    """The sealer of one run's packages while it trains.

    Guarantee: only :meth:`settle` and :meth:`close` wait for the storage. The newest offered snapshot is never dropped
    for an older one. A published package stays until a newer one is published and recorded. Neither the newest nor the
    best is ever deleted, and no wanted one is.

    Args:
        config: how often packages are sealed, and which are kept.
        storage: holds this run's packages alone.
        terms: the part that all packages share.
        recipients: parties that may open a package besides the run; see
        `raycloak.attestation.sealed.package_keys.load_recipients`.
        notice: told once why packages are not published, and once that they are again.
        published: called with the finished steps and the digest of each package that is.
        wanted: digests of packages that are never deleted.
        clock: unix seconds; monotonic: seconds that only grow.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        storage: PackageStorage,
        control: Control,
        terms: PackageOrigin,
        recipients: Sequence[RecipientPublic],
        notice: Callable[[str], None],
        metrics: RunMetrics,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        published: Callable[[int, bytes], None] = lambda steps, digest: None,
        wanted: Iterable[bytes] = (),
    ) -> None:
        self._config = config
        self._storage = storage
        self._control = control
        self._terms = terms
        self._notice = notice
        self._metrics = metrics
        self._clock = clock
        self._monotonic = monotonic
        self._published = published
        self._recipients = (control.orchestrator.package_recipient(), *recipients)
        before = control.orchestrator.newest_published()
        self._previous = before.digest if before else b""
        signer, run = control.orchestrator.package_signer(), terms.manifest.digest()
        self._retention = PackageRetention(config, storage, signer, run, wanted)
        self._background = Background()
        self._waiting: Snapshot | None = None
        self._drafted: _Drafted | None = None
        self._newest: Published | None = None
        self._not_before = monotonic()
        self._in_trouble = False
        # First remove what a writer that died left unfinished. Nobody else writes here.
        self._job: _Work | None = self._start(storage.sweep, lambda _: None, self._not_tidied)

    def due(self, finished_steps: int) -> bool:
        """Return whether the configuration asks for a package after so many steps."""
        every = self._config.checkpoint_frequency
        return every > 0 and finished_steps > 0 and finished_steps % every == 0

    def offer(self, snapshot: Snapshot) -> None:
        """Seal ``snapshot`` once the package in progress is done. It replaces a waiting snapshot."""
        self._waiting = snapshot
        self.poll()

    def poll(self) -> None:
        """Advance the package in progress as far as possible without waiting. Call this at every step boundary.

        A package is signed once the orchestrator's log says that its step was committed.

        Raises:
            RaycloakError: the orchestrator refuses, or is lost for good.
        """
        while self._advance():
            pass

    def settle(self, finished_steps: int, deadline_s: float) -> Published | None:
        """Wait until the offered package of so many finished steps is published, and return it.

        The step must be committed before. Returns None if the storage refuses the package or takes longer; it is then
        tried again like any other.
        """
        end = self._monotonic() + deadline_s
        # Somebody waits for it, so a storage that failed is tried again now.
        self._not_before = self._monotonic()
        self.poll()
        while (found := self._published_of(finished_steps)) is None and self._job is not None:
            if (left := end - self._monotonic()) <= 0:
                break
            self._background.wait(self._job.future, left)
            self.poll()
        return found

    def _published_of(self, finished_steps: int) -> Published | None:
        newest = self._newest
        return newest if newest is not None and newest.manifest.step == finished_steps else None

    def want(self, package_digest: bytes) -> None:
        """Keep a package for good, whatever the configuration says."""
        self._retention.want(package_digest)

    def close(self, deadline_s: float) -> bool:
        """Finish the offered packages within ``deadline_s`` seconds; return whether all of them were published.

        The last step must be committed before. Otherwise, or if the storage keeps refusing, the newest published
        package stays the newest.
        """
        end = self._monotonic() + deadline_s
        # At the end there is no later attempt to wait for.
        self._not_before = self._monotonic()
        self.poll()
        # A draft without a signature waits for a commit that will not come, and the other work waits behind it.
        while (left := end - self._monotonic()) > 0 and (self._job or (self._waiting and not self._drafted)):
            pause = left if self._job else min(left, max(self._not_before - self._monotonic(), 0.0))
            self._background.wait(self._job.future if self._job else None, pause)
            self.poll()
        unfinished = self._drafted.snapshot if self._drafted else self._waiting
        if unfinished is not None:
            self._notice(f"the checkpoint of step {unfinished.finished_steps} was not published.")
        is_done = unfinished is None and self._job is None
        self._background.stop()
        return is_done

    def _advance(self) -> bool:
        """Take one step of the state machine; return False if there is nothing to do now."""
        if self._job is not None:
            return self._finish_job(self._job)
        if self._drafted is not None:
            return self._sign(self._drafted)
        if self._waiting is not None and self._monotonic() >= self._not_before:
            self._write(self._waiting)
            return True
        return False

    def _finish_job(self, job: _Work) -> bool:
        if not job.future.done():
            return False
        self._job = None
        # The job is cleared first, because `then` and `failed` may start the next one.
        error = job.future.exception()
        if error is None:
            job.then(job.future.result())
        elif isinstance(error, STORAGE_ERRORS):
            job.failed(error)
        else:
            raise error
        return True

    def _write(self, snapshot: Snapshot) -> None:
        self._waiting = None
        previous, created_at = self._previous, int(self._clock())
        self._job = self._start(
            lambda: _write(self._storage, snapshot, self._terms, self._recipients, previous, created_at),
            self._take_draft,
            lambda error: self._retry(snapshot, error),
        )

    def _take_draft(self, drafted: _Drafted) -> None:
        self._drafted = drafted

    def _sign(self, drafted: _Drafted) -> bool:
        body = drafted.manifest.encode()
        try:
            signature = self._control.orchestrator.sign_package(body)
        except EvidenceError as refusal:
            # Asked again at the next step boundary.
            if refusal.code == "not_committed":
                return False
            raise
        self._drafted = None
        # The signature comes last: on S3 it makes the package appear.
        files = {RUN_MANIFEST: self._terms.manifest.encode(), MANIFEST: body, SIGNATURE: signature}
        self._job = self._start(
            lambda: _publish(drafted.draft, files),
            lambda name: self._record(Published(name, drafted.manifest)),
            lambda error: self._retry(drafted.snapshot, error),
        )
        return True

    def _record(self, package: Published) -> None:
        manifest = package.manifest
        self._previous = manifest.digest()
        # Only now: what the log calls published has to be there.
        self._control.orchestrator.record_published(manifest.step, self._previous)
        self._newest = package
        self._metrics.checkpoint_written()
        self._published(manifest.step, self._previous)
        if self._in_trouble:
            self._in_trouble = False
            self._notice(f"checkpoints are published again, from step {manifest.step}.")
        self._job = self._start(self._retention.apply, lambda _: None, self._not_tidied)

    def _retry(self, snapshot: Snapshot, error: BaseException) -> None:
        """Schedule another attempt, with a newer snapshot if there is one."""
        self._waiting = self._waiting or snapshot
        self._not_before = self._monotonic() + RETRY_S
        if not self._in_trouble:
            self._in_trouble = True
            self._notice(
                f"the checkpoint of step {snapshot.finished_steps} could not be published ({one_line(error)}); "
                "the run continues, earlier ones stay, and it will be tried again."
            )

    def _not_tidied(self, error: BaseException) -> None:
        self._notice(f"old checkpoints could not be removed: {one_line(error)}.")

    def _start(
        self, work: Callable[[], Any], then: Callable[[Any], None], failed: Callable[[BaseException], None]
    ) -> _Work:
        return _Work(self._background.run(work), then, failed)


def _write(
    storage: PackageStorage,
    snapshot: Snapshot,
    terms: PackageOrigin,
    recipients: Sequence[RecipientPublic],
    previous: bytes,
    created_at: int,
) -> _Drafted:
    draft = storage.draft(snapshot.finished_steps)
    with _discarded_on_error(draft):
        manifest = write_draft(draft, snapshot, terms, recipients, previous=previous, created_at=created_at)
    return _Drafted(snapshot, draft, manifest)


def _publish(draft: Draft, files: Mapping[str, bytes]) -> str:
    with _discarded_on_error(draft):
        return draft.publish(files)


@contextmanager
def _discarded_on_error(draft: Draft) -> Iterator[None]:
    try:
        yield
    except STORAGE_ERRORS:
        # The first error is the one to report; a sweep removes what stays.
        with suppress(*STORAGE_ERRORS):
            draft.discard()
        raise


class Background:
    """One daemon thread that does the work of its queue in order. Work in progress is lost when the process exits."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue ``work`` behind all earlier work."""
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def wait(self, future: Future[Any] | None, seconds: float) -> None:
        """Wait at most ``seconds`` for ``future``; without a future, sleep for ``seconds``."""
        if future is None:
            time.sleep(seconds)
        else:
            wait([future], seconds)

    def stop(self) -> None:
        """Let the thread end after its present work."""
        self._work.put(None)

    def _run(self) -> None:
        while item := self._work.get():
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the main thread raises it again
                future.set_exception(error)
