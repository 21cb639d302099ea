"""The archive of one run: the place of its sealed packages, who may open them besides the run, and how it is restored.

A package is opened with the run's key, which the orchestrator alone has.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.orchestrator.loads import StateLoad
from raycloak.attestation.orchestrator.package_desk import PublishedPackage
from raycloak.attestation.sealed.package_keys import TrustStore, load_recipients
from raycloak.attestation.sealed.package_manifest import PackageRefusal, refuse
from raycloak.coordinator.checkpoints.arrays import load_arrays
from raycloak.coordinator.checkpoints.reader import (
    Expected,
    VerifiedPackage,
    signed_manifest,
    verify_package,
    weights_of,
)
from raycloak.coordinator.checkpoints.saver import Checkpoints, Published
from raycloak.coordinator.checkpoints.storage import (
    STORAGE_ERRORS,
    PackageStorage,
    one_line,
    package_order,
    storage_of,
)
from raycloak.coordinator.checkpoints.writer import AVERAGED_WEIGHTS, OPTIMIZER, PARAMETERS
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import AVERAGED, split_flat


@dataclass(frozen=True, slots=True)
class Archive:
    """The packages of one run.

    Attributes:
        run_id: the run's id. Executions that repeat it share its packages.
        base: folder that relative paths of the configuration start from.
        notice: told why packages are not published.
        published: called with the finished steps and the digest of each package that is.
    """

    config: CheckpointConfig
    run_id: str
    base: Path
    notice: Callable[[str], None]
    published: Callable[[int, bytes], None] = lambda steps, digest: None

    @property
    def location(self) -> str:
        """The absolute folder, or s3:// URL, of the run's packages."""
        found = storage_of(self.config.storage, self.run_id, self.base)
        return found if "://" in found else str(Path(found).expanduser().absolute())

    def open(
        self, control: Control, manifest: Manifest, metrics: RunMetrics, wanted: Iterable[bytes] = ()
    ) -> Checkpoints:
        """Start to seal packages.

        Args:
            wanted: digests of packages that stay whatever the configuration says.

        Raises:
            ConfigError: if the storage or the public key of a recipient cannot be used.
        """
        recipients = load_recipients([self.base / path for path in self.config.recipients])
        storage, notice, told = PackageStorage.open(self.location), self.notice, self.published
        return Checkpoints(
            self.config, storage, control, manifest, recipients, notice, metrics, published=told, wanted=wanted
        )

    def restorer(self, control: Control, manifest: Manifest) -> "Restorer":
        """Return what opens the run's packages."""
        return Restorer(PackageStorage.open(self.location), control, manifest)


@dataclass(frozen=True, slots=True)
class Restored:
    """A run, restored from one of its packages.

    Attributes:
        finished_steps: the package's, or more if the run loaded it after them.
        parameters: float32[d], in canonical order.
        state: optimizer state of all tensors, with their averages.
        package: the one that it was restored from.
    """

    finished_steps: int
    parameters: NDArray[np.float32]
    state: Mapping[str, np.ndarray]
    package: Published


@dataclass(frozen=True, slots=True)
class Restorer:
    """The packages of one run, verified against the run's own signer and heads.

    Guarantee: returns only parameters that the run's orchestrator sealed. Their package was sealed after entries that
    ledger and evidence log still have.

    Raises:
        EvidenceError: every method, with a code of
            `raycloak.attestation.sealed.package_manifest.PackageRefusal`.
        ConfigError: every method, ``storage`` if the storage cannot be read.
    """

    storage: PackageStorage
    control: Control
    manifest: Manifest

    def newest(self, at_most: int | None = None) -> Restored | None:
        """Return the state of the newest package, or of the last load since; None without a package.

        Guarantee: the package is no older than the newest one that the log has as published. A loaded package is the
        very one that the log names.

        Args:
            at_most: for a replay, look only at packages and loads of at most so many finished steps.
        """
        # A replay goes back on purpose, so that newer packages are no rollback.
        published = self.control.orchestrator.newest_published() if at_most is None else None
        with _readable():
            names = [name for name in self.storage.names() if at_most is None or package_order(name)[0] <= at_most]
        if not names:
            if published is None:
                return None
            refuse(PackageRefusal.ROLLED_BACK, f"one of step {published.step} was published, and none is there.")
        package = self.verified(self.storage, names[-1], published)
        # Of the same step, the load came later: a state that was loaded is not sealed again.
        loads = [
            load
            for load in self.control.orchestrator.loads()
            if package.manifest.step <= load.after_step and (at_most is None or load.after_step <= at_most)
        ]
        return self.loaded(loads[-1]) if loads else self.opened(package)

    def verified(self, storage: PackageStorage, name: str, newest: PublishedPackage | None = None) -> VerifiedPackage:
        """Return a package of this run in ``storage``, whatever its step, but for one that is older than ``newest``."""
        expected = Expected(
            run=self.manifest.digest(),
            newest=newest,
            ledger_hash=self.control.ledger.hash_at,
            log_root=self.control.orchestrator.log_root_at,
        )
        with _readable():
            return verify_package(storage, name, self._trust(), expected)

    def loaded(self, load: StateLoad) -> Restored:
        """Return the state of a load that the log has, at the step after which the run loaded it."""
        with _readable():
            return replace(self.opened(self._named(load)), finished_steps=load.after_step)

    def opened(self, package: VerifiedPackage) -> Restored:
        """Decrypt a verified package."""
        orchestrator, manifest = self.control.orchestrator, package.manifest
        wrapped = package.wrapped_key(orchestrator.package_recipient().key_id)
        data_key = Secret(orchestrator.open_package(manifest.info(), wrapped))
        with _readable():
            parameters = weights_of(package, data_key, PARAMETERS)
            states = load_arrays(package.chunks(OPTIMIZER, data_key))
            # Behind the number of its range; a tensor is in one range alone.
            state = {key.partition("/")[2]: array for key, array in states.items()}
            if manifest.averaged_digest:
                tensors = self.manifest.computation.tensors
                parts = split_flat(weights_of(package, data_key, AVERAGED_WEIGHTS), tensors)
                state |= {
                    f"{each.name}/{AVERAGED}": part.reshape(each.shape)
                    for each, part in zip(tensors, parts, strict=True)
                }
        return Restored(
            finished_steps=manifest.step,
            parameters=parameters,
            state=state,
            package=Published(package.name, manifest),
        )

    def _named(self, load: StateLoad) -> VerifiedPackage:
        refusal: EvidenceError | None = None
        for name in self.storage.names():
            if package_order(name)[0] != load.step:
                continue
            try:
                if signed_manifest(self.storage, name, self._trust()).digest() == load.package_digest:
                    return self.verified(self.storage, name)
            except EvidenceError as found:
                # The one that was loaded may still be there, beside another of its step that was altered.
                refusal = found
        if refusal is not None:
            raise refusal
        refuse(
            PackageRefusal.FILE_MISSING,
            f"the run loaded one of step {load.step} after step {load.after_step}, and it is not there.",
        )

    def _trust(self) -> TrustStore:
        return TrustStore.of("run", self.control.orchestrator.package_signer())


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except STORAGE_ERRORS as error:
        raise ConfigError(
            "storage", f"the checkpoints cannot be read: {one_line(error)}.", "Restore the storage, then resume."
        ) from None
