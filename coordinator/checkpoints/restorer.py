"""Restores a run from its own packages: from the newest one, or from one that the run loads.

A package is opened with the run's key, which the orchestrator alone has.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.orchestrator.loads import StateLoad
from raycloak.attestation.orchestrator.package_desk import PublishedPackage
from raycloak.attestation.sealed.package_keys import TrustStore
from raycloak.attestation.sealed.package_manifest import PackageManifest, PackageRefusal, refuse
from raycloak.coordinator.aggregation.ranges import split_ranges
from raycloak.coordinator.checkpoints.arrays import State, load_arrays, parted_states
from raycloak.coordinator.checkpoints.reader import (
    Expected,
    VerifiedPackage,
    check_parameters,
    signed_manifest,
    verify_package,
)
from raycloak.coordinator.checkpoints.storage import STORAGE_ERRORS, PackageStorage, one_line, package_order
from raycloak.coordinator.checkpoints.writer import OPTIMIZER, PARAMETERS
from raycloak.coordinator.cluster.control import Control
from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.workers.terms.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Restored:
    """A run, restored from one of its packages.

    Attributes:
        finished_steps: the package's, or more if the run loaded it after them.
        parameters, states: one per range, cut as in the run that sealed the package.
        name: of the package in its storage.
        package: the package's manifest.
    """

    finished_steps: int
    model_digest: bytes
    parameters: tuple[NDArray[np.float32], ...]
    states: tuple[State, ...]
    name: str
    package: PackageManifest


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
        try:
            names = [name for name in self.storage.names() if at_most is None or package_order(name)[0] <= at_most]
            if not names:
                if published is None:
                    return None
                refuse(PackageRefusal.ROLLED_BACK, f"one of step {published.step} was published, and none is there.")
            package = self._verified(self.storage, names[-1], published)
        except STORAGE_ERRORS as error:
            raise _unreadable(error) from None
        # Of the same step, the load came later: a state that was loaded is not sealed again.
        loads = [
            load
            for load in self.control.orchestrator.loads()
            if package.manifest.step <= load.after_step and (at_most is None or load.after_step <= at_most)
        ]
        return self.loaded(loads[-1]) if loads else self.opened(package)

    def verified(self, storage: PackageStorage, name: str) -> VerifiedPackage:
        """Return a package of this run in ``storage``, whatever its step."""
        try:
            return self._verified(storage, name, None)
        except STORAGE_ERRORS as error:
            raise _unreadable(error) from None

    def loaded(self, load: StateLoad) -> Restored:
        """Return the state of a load that the log has, at the step after which the run loaded it."""
        try:
            package = self._named(load)
        except STORAGE_ERRORS as error:
            raise _unreadable(error) from None
        return replace(self.opened(package), finished_steps=load.after_step)

    def opened(self, package: VerifiedPackage) -> Restored:
        """Decrypt a verified package."""
        orchestrator, manifest = self.control.orchestrator, package.manifest
        wrapped = package.wrapped_key(orchestrator.package_recipient().key_id)
        data_key = Secret(orchestrator.open_package(manifest.info(), wrapped))
        try:
            tensors = load_arrays(package.chunks(PARAMETERS, data_key))
            check_parameters(tensors.__getitem__, package)
            state = load_arrays(package.chunks(OPTIMIZER, data_key))
        except STORAGE_ERRORS as error:
            raise _unreadable(error) from None
        specs = package.run_manifest.computation.tensors
        flat = np.concatenate([tensors[each.name].reshape(-1) for each in specs])
        return Restored(
            finished_steps=manifest.step,
            model_digest=manifest.model_digest,
            parameters=tuple(flat[owned.start : owned.stop].copy() for owned in split_ranges(specs, manifest.ranges)),
            states=parted_states(state, manifest.ranges),
            name=package.name,
            package=manifest,
        )

    def _verified(self, storage: PackageStorage, name: str, newest: PublishedPackage | None) -> VerifiedPackage:
        expected = Expected(
            run=self.manifest.digest(),
            newest=newest,
            ledger_hash=self.control.ledger.hash_at,
            log_root=self.control.orchestrator.log_root_at,
        )
        return verify_package(storage, name, self._trust(), expected)

    def _named(self, load: StateLoad) -> VerifiedPackage:
        refusal: EvidenceError | None = None
        for name in self.storage.names():
            if package_order(name)[0] != load.step:
                continue
            try:
                if signed_manifest(self.storage, name, self._trust()).digest() == load.package_digest:
                    return self._verified(self.storage, name, None)
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


def _unreadable(error: BaseException) -> ConfigError:
    return ConfigError(
        "storage", f"the checkpoints cannot be read: {one_line(error)}.", "Restore the storage, then resume."
    )
