"""The archive of one run: the place of its sealed packages, and the recipients who may open them besides the run."""

from collections.abc import Callable, Iterable
from pathlib import Path

from raycloak.attestation.sealed.package_keys import load_recipients
from raycloak.coordinator.checkpoints.restorer import Restored, Restorer
from raycloak.coordinator.checkpoints.saver import Checkpoints
from raycloak.coordinator.checkpoints.storage import PackageStorage, storage_of
from raycloak.coordinator.checkpoints.writer import PackageOrigin
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.metrics.collectors import RunMetrics
from raycloak.workers.terms.manifest import Manifest


class Archive:
    """The packages of one run.

    Args:
        run_id: the run's id. Executions that repeat it share its packages.
        base: folder that relative paths of the configuration start from.
        notice: told why packages are not published.
        published: called with the finished steps and the digest of each package that is.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_id: str,
        base: Path,
        notice: Callable[[str], None],
        published: Callable[[int, bytes], None] = lambda steps, digest: None,
    ) -> None:
        self._config = config
        self._location = storage_of(config.storage, run_id, base)
        self._base = base
        self._notice = notice
        self._published = published

    @property
    def location(self) -> str:
        """The absolute folder, or s3:// URL, of the run's packages."""
        return self._location if "://" in self._location else str(Path(self._location).expanduser().absolute())

    def open(
        self, control: Control, terms: PackageOrigin, metrics: RunMetrics, wanted: Iterable[bytes] = ()
    ) -> Checkpoints:
        """Start to seal packages.

        Args:
            wanted: digests of packages that stay whatever the configuration says.

        Raises:
            ConfigError: if the storage or the public key of a recipient cannot be used.
        """
        recipients = load_recipients([self._base / path for path in self._config.recipients])
        storage = PackageStorage.open(self._location)
        return Checkpoints(
            self._config,
            storage,
            control,
            terms,
            recipients,
            self._notice,
            metrics,
            published=self._published,
            wanted=wanted,
        )

    def restore(self, control: Control, manifest: Manifest, at_most: int | None) -> Restored | None:
        """Restore the newest state, or the newest of at most so many finished steps; None if there is none.

        Raises:
            ConfigError, EvidenceError: as in `raycloak.coordinator.checkpoints.restorer.Restorer.newest`.
        """
        return self.restorer(control, manifest).newest(at_most)

    def restorer(self, control: Control, manifest: Manifest) -> Restorer:
        """Return what opens the run's packages."""
        return Restorer(PackageStorage.open(self._location), control, manifest)
