"""Retention keeps the newest packages of a run, and the best by a released metric.

`raycloak.coordinator.checkpoints.saver` decides when packages are written; only the rule for what stays is here.
"""

from collections.abc import Iterable, Mapping

from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.sealed.package_keys import TrustStore
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.checkpoints.reader import signed_manifest
from raycloak.coordinator.checkpoints.storage import PackageStorage
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.metrics.errors import EvidenceError


class PackageRetention:
    """The rule by which one run's packages are kept or deleted. Packages of other runs are left alone.

    Args:
        run: digest of the run's manifest.
        wanted: digests of packages that stay whatever the configuration says.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        storage: PackageStorage,
        signer: SignerPublic,
        run: bytes,
        wanted: Iterable[bytes] = (),
    ) -> None:
        self._config = config
        self._storage = storage
        self._trust = TrustStore.of("run", signer)
        self._run = run
        self._wanted = set(wanted)
        self._known: dict[str, PackageManifest | None] = {}

    def want(self, package_digest: bytes) -> None:
        """Keep a package for good from now on."""
        self._wanted.add(package_digest)

    def apply(self) -> None:
        """Keep the newest ``num_to_keep``, the best and the wanted ones; delete the others."""
        own = {name: manifest for name in self._storage.names() if (manifest := self._own(name))}
        kept = set(list(own)[-self._config.num_to_keep :])
        if best := self._best(own):
            kept.add(best)
        kept |= {name for name, manifest in own.items() if manifest.digest() in self._wanted}
        for name in own:
            if name not in kept:
                self._storage.delete(name)
                del self._known[name]

    def _own(self, name: str) -> PackageManifest | None:
        """Return a package's manifest if it is this run's; None for any other, which is not ours to judge or delete."""
        # A published package never changes, so each is read once.
        if name not in self._known:
            try:
                manifest = signed_manifest(self._storage, name, self._trust)
            except EvidenceError:
                manifest = None
            self._known[name] = manifest if manifest and manifest.manifest_digest == self._run else None
        return self._known[name]

    def _best(self, own: Mapping[str, PackageManifest]) -> str | None:
        match self._config.keep_best:
            case "evaluation_accuracy":
                scores = {name: manifest.evaluation_accuracy for name, manifest in own.items()}
            case "evaluation_loss":
                losses = {name: manifest.evaluation_loss for name, manifest in own.items()}
                scores = {name: None if loss is None else -loss for name, loss in losses.items()}
            case None:
                return None
        measured = {name: score for name, score in scores.items() if score is not None}
        # Of equal scores the newest wins: names are in the order of steps.
        return max(reversed(measured), key=measured.__getitem__, default=None)
