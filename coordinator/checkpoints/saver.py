"""Checkpoints: sealed packages of a running training. No step waits for a disk or a network.

    main thread        offer(snapshot) ──┐                ┌── sign ──┐                 ┌── record published
    background thread                    └── write draft ─┘          └── publish ──────┘            └── retain

Only the main thread talks to actors; only a background thread touches the storage. One package is under way at a
time. Of the snapshots that wait, the newest is kept. An error of the storage is reported once, and tried again later.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any

from raycloak.attestation.sealed.package_keys import RecipientPublic, TrustStore
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.checkpoints.reader import signed_manifest
from raycloak.coordinator.checkpoints.storage import (
    MANIFEST,
    RUN_MANIFEST,
    SIGNATURE,
    STORAGE_ERRORS,
    Draft,
    PackageStorage,
    one_line,
)
from raycloak.coordinator.checkpoints.writer import Snapshot, write_draft
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.terms.manifest import Manifest

# Pause before a storage that failed is tried again; a newer snapshot may take the waiting one's place meanwhile.
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Published:
    """A package that is in its storage, and in the log of its run."""

    name: str
    manifest: PackageManifest


@dataclass(eq=False)
class Checkpoints:
    """The sealer of one run's packages while it trains.

    Guarantee: only :meth:`settle` and :meth:`close` wait for the storage. The newest offered snapshot is never dropped
    for an older one. A published package stays until a newer one is published and recorded. Neither the newest nor the
    best is ever deleted, and no wanted one is.

    Args:
        config: how often packages are sealed, and which are kept.
        storage: holds this run's packages alone.
        run: the run's manifest, which is in each package.
        recipients: parties that may open a package besides the run; see
            `raycloak.attestation.sealed.package_keys.load_recipients`.
        notice: told once why packages are not published, and once that they are again.
        published: called with the finished steps and the digest of each package that is.
        wanted: digests of packages that are never deleted.
        clock: unix seconds; monotonic: seconds that only grow.
    """

    config: CheckpointConfig
    storage: PackageStorage
    control: Control
    run: Manifest
    recipients: InitVar[Sequence[RecipientPublic]]
    notice: Callable[[str], None]
    metrics: RunMetrics
    _: KW_ONLY
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    published: Callable[[int, bytes], None] = lambda steps, digest: None
    wanted: InitVar[Iterable[bytes]] = ()

    def __post_init__(self, recipients: Sequence[RecipientPublic], wanted: Iterable[bytes]) -> None:
        orchestrator = self.control.orchestrator
        self._recipients = (orchestrator.package_recipient(), *recipients)
        before = orchestrator.newest_published()
        self._previous = before.digest if before else b""
        trust = TrustStore.of("run", orchestrator.package_signer())
        self._retention = PackageRetention(self.config, self.storage, trust, self.run.digest(), set(wanted))
        self._waiting: Snapshot | None = None
        # A package that still lacks its signature; its snapshot has the whole manifest.
        self._drafted: tuple[Draft, Snapshot] | None = None
        self._newest: Published | None = None
        self._not_before = self.monotonic()
        self._in_trouble = False
        # The background thread's present work, and what this thread does once it is done, or has failed.
        self._job: tuple[Future[Any], Callable[[Any], None], Callable[[BaseException], None]] | None = None
        # First remove what a writer that died left unfinished. Nobody else writes here.
        self._start(self.storage.sweep, lambda _: None, self._not_tidied)

    def due(self, finished_steps: int) -> bool:
        """Return whether the configuration asks for a package after so many steps."""
        every = self.config.checkpoint_frequency
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
        self._push(lambda: self._job is None or self._published_of(finished_steps) is not None, deadline_s)
        return self._published_of(finished_steps)

    def _published_of(self, finished_steps: int) -> Published | None:
        newest = self._newest
        return newest if newest is not None and newest.manifest.step == finished_steps else None

    def _push(self, is_done: Callable[[], bool], deadline_s: float) -> None:
        """Work until ``is_done``, at most for ``deadline_s`` seconds."""
        end = self.monotonic() + deadline_s
        # Somebody waits for it, so a storage that failed is tried again now.
        self._not_before = self.monotonic()
        self.poll()
        while not is_done() and (left := end - self.monotonic()) > 0:
            if self._job is not None:
                wait([self._job[0]], left)
            else:
                time.sleep(min(left, max(self._not_before - self.monotonic(), 0.0)))
            self.poll()

    def want(self, package_digest: bytes) -> None:
        """Keep a package for good from now on, whatever the configuration says."""
        self._retention.wanted.add(package_digest)

    def close(self, deadline_s: float) -> bool:
        """Finish the offered packages within ``deadline_s`` seconds; return whether all of them were published.

        The last step must be committed before. Otherwise, or if the storage keeps refusing, the newest published
        package stays the newest.
        """
        # A draft without a signature waits for a commit that will not come, and the other work waits behind it.
        self._push(lambda: self._job is None and (self._waiting is None or self._drafted is not None), deadline_s)
        unfinished = self._drafted[1] if self._drafted else self._waiting
        if unfinished is not None:
            self.notice(f"the checkpoint of step {unfinished.stated.step} was not published.")
        return unfinished is None and self._job is None

    def _advance(self) -> bool:
        """Take one step of the state machine; return False if there is nothing to do now."""
        if self._job is not None:
            future, then, failed = self._job
            if not future.done():
                return False
            # First, because `then` and `failed` may start the next one.
            self._job = None
            error = future.exception()
            if error is None:
                then(future.result())
            elif isinstance(error, STORAGE_ERRORS):
                failed(error)
            else:
                raise error
            return True
        if self._drafted is not None:
            return self._sign(*self._drafted)
        if self._waiting is not None and self.monotonic() >= self._not_before:
            self._write(self._waiting)
            return True
        return False

    def _write(self, snapshot: Snapshot) -> None:
        previous, created_at = self._previous, int(self.clock())

        def write() -> tuple[Draft, Snapshot]:
            draft = self.storage.draft(snapshot.stated.step)
            with _discarded_on_error(draft):
                stated = write_draft(
                    draft, snapshot, self.run, self._recipients, previous=previous, created_at=created_at
                )
            return draft, replace(snapshot, stated=stated)

        def take(drafted: tuple[Draft, Snapshot]) -> None:
            self._drafted = drafted

        self._waiting = None
        self._start(write, take, lambda error: self._retry(snapshot, error))

    def _sign(self, draft: Draft, snapshot: Snapshot) -> bool:
        body = snapshot.stated.encode()
        try:
            signature = self.control.orchestrator.sign_package(body)
        except EvidenceError as refusal:
            # Asked again at the next step boundary.
            if refusal.code == "not_committed":
                return False
            raise
        self._drafted = None
        # The signature comes last: on S3 it makes the package appear.
        files = {RUN_MANIFEST: self.run.encode(), MANIFEST: body, SIGNATURE: signature}

        def publish() -> str:
            with _discarded_on_error(draft):
                return draft.publish(files)

        self._start(
            publish,
            lambda name: self._record(Published(name, snapshot.stated)),
            lambda error: self._retry(snapshot, error),
        )
        return True

    def _record(self, package: Published) -> None:
        manifest = package.manifest
        self._previous = manifest.digest()
        # Only now: what the log calls published has to be there.
        self.control.orchestrator.record_published(manifest.step, self._previous)
        self._newest = package
        self.metrics.checkpoint_written()
        self.published(manifest.step, self._previous)
        if self._in_trouble:
            self._in_trouble = False
            self.notice(f"checkpoints are published again, from step {manifest.step}.")
        self._start(self._retention.apply, lambda _: None, self._not_tidied)

    def _retry(self, snapshot: Snapshot, error: BaseException) -> None:
        """Schedule another attempt, with a newer snapshot if there is one."""
        self._waiting = self._waiting or snapshot
        self._not_before = self.monotonic() + RETRY_S
        if not self._in_trouble:
            self._in_trouble = True
            self.notice(
                f"the checkpoint of step {snapshot.stated.step} could not be published ({one_line(error)}); "
                "the run continues, earlier ones stay, and it will be tried again."
            )

    def _not_tidied(self, error: BaseException) -> None:
        self.notice(f"old checkpoints could not be removed: {one_line(error)}.")

    def _start(
        self, work: Callable[[], Any], then: Callable[[Any], None], failed: Callable[[BaseException], None]
    ) -> None:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the main thread raises it again
                future.set_exception(error)

        self._job = future, then, failed
        # A daemon: work in progress is lost when the process exits.
        threading.Thread(target=run, name="checkpoints", daemon=True).start()


@contextmanager
def _discarded_on_error(draft: Draft) -> Iterator[None]:
    try:
        yield
    except STORAGE_ERRORS:
        # The first error is the one to report; a sweep removes what stays.
        with suppress(*STORAGE_ERRORS):
            draft.discard()
        raise


@dataclass(slots=True)
class PackageRetention:
    """Keeps the newest packages of a run, the best by a released metric, and the wanted ones; deletes the others.

    Packages of other runs are left alone.

    Attributes:
        trust: in the run's own signer.
        run: digest of the run's manifest.
        wanted: digests of packages that stay whatever the configuration says.
    """

    config: CheckpointConfig
    storage: PackageStorage
    trust: TrustStore
    run: bytes
    wanted: set[bytes]
    _known: dict[str, PackageManifest | None] = field(default_factory=dict)

    def apply(self) -> None:
        """Keep the newest ``num_to_keep``, the best and the wanted ones; delete the others."""
        own = {name: manifest for name in self.storage.names() if (manifest := self._own(name))}
        kept = set(list(own)[-self.config.num_to_keep :])
        if (metric := self.config.keep_best) is not None:
            sign = -1 if metric == "evaluation_loss" else 1
            scores = {name: score for name, each in own.items() if (score := getattr(each, metric)) is not None}
            # Of equal scores the newest wins: names are in the order of steps.
            kept |= {max(reversed(scores), key=lambda name: sign * scores[name])} if scores else set()
        kept |= {name for name, manifest in own.items() if manifest.digest() in self.wanted}
        for name in [each for each in own if each not in kept]:
            self.storage.delete(name)
            del self._known[name]

    def _own(self, name: str) -> PackageManifest | None:
        """Return a package's manifest if it is this run's; None for any other, which is not ours to judge or delete."""
        # A published package never changes, so each is read once.
        if name not in self._known:
            try:
                manifest = signed_manifest(self.storage, name, self.trust)
            except EvidenceError:
                manifest = None
            self._known[name] = manifest if manifest and manifest.manifest_digest == self.run else None
        return self._known[name]
