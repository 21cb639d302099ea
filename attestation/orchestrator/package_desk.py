"""The orchestrator's part in sealed packages: it signs, remembers and opens them.

Guarantee: the desk signs a package only of its own run and manifest. Its log must say that the step was committed with
exactly those parameters, after that entry of the ledger. The log must also have the entry that the package was sealed
after. The log names the package before the signature leaves.
Not guaranteed: the rest of what a package states (epsilon, evidence class, metrics). That is the coordinator's word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.core.messages import parse
from raycloak.attestation.log.entries import Entry
from raycloak.attestation.sealed.package_keys import RUN_RECIPIENT, PackageSigner, RecipientPublic
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.metrics.errors import EvidenceError

if TYPE_CHECKING:
    from raycloak.attestation.orchestrator.orchestrator import OpenRun


@dataclass(frozen=True, slots=True)
class PublishedPackage:
    """A package that reached its storage: number of finished steps, and its digest."""

    step: int
    digest: bytes


class PackageDesk:
    """The packages face of a session: it signs, remembers and opens the sealed packages of the run.

    Args:
        manifest_digest: of the manifest that the session began with.
        draw_key: counts and logs that the key of a package leaves; EvidenceError ``release_denied`` beyond its quota.
    """

    def __init__(self, run: "OpenRun", manifest_digest: bytes, draw_key: Callable[[bytes], None]) -> None:
        self._run = run
        self._books = run.books
        self._manifest_digest = manifest_digest
        self._draw_key = draw_key

    @cached_property
    def _signer(self) -> PackageSigner:
        # Not in the constructor: a run that seals nothing leaves no signer behind.
        return PackageSigner.load_or_create(self._run.signer_folder)

    def signer(self) -> SignerPublic:
        """Return the public keys under which this run's packages verify."""
        return self._signer.public

    def recipient(self) -> RecipientPublic:
        """Return the run as a recipient of its own packages."""
        return RecipientPublic(name=RUN_RECIPIENT, key=self._run.recipient_key.public)

    def sign(self, manifest_bytes: bytes) -> bytes:
        """Return the bytes of ``manifest.sig`` for a package of this run; logged as ``sealed`` before they return.

        Raises:
            EvidenceError: ``not_committed`` if the step is not committed yet. ``seal_refused`` if the package is of
                another run or manifest, or states a log head that is not in the log. Also raised if it has other
                parameters or another ledger entry than were committed.
            ProtocolError: ``malformed``.
        """
        manifest = parse(PackageManifest, manifest_bytes)
        if manifest.run_id != self._run.run_id:
            raise EvidenceError("seal_refused", f"the package is of run {manifest.run_id}, not {self._run.run_id}")
        if manifest.manifest_digest != self._manifest_digest:
            raise EvidenceError("seal_refused", "the package is of another manifest than the run's")
        step = manifest.step - 1
        committed = self._books.commits.of(step)
        if committed is None:
            raise EvidenceError("not_committed", f"step {step} was not committed yet")
        if committed.model.digests != (manifest.model_digest, manifest.averaged_digest):
            raise EvidenceError("seal_refused", f"step {step} was committed with other parameters than the package's")
        if (committed.ledger_sequence, committed.ledger_hash) != (manifest.ledger_sequence, manifest.ledger_hash):
            raise EvidenceError("seal_refused", f"step {step} was charged by another entry of the ledger")
        if self._books.log.root_at(manifest.log_length) != manifest.log_hash:
            raise EvidenceError("seal_refused", "the package states an evidence log head that is not in the log")
        # Logged first: no signature exists that the log does not name.
        self._record("sealed", PublishedPackage(step=manifest.step, digest=manifest.digest()))
        return self._signer.sign(manifest_bytes).encode()

    def record_published(self, step: int, package_digest: bytes) -> None:
        """Log that a sealed package reached its storage; a repeat does nothing.

        Raises:
            EvidenceError: ``seal_refused`` if this run never sealed it.
        """
        package = PublishedPackage(step=step, digest=package_digest)
        if package not in map(_package, self._books.log.newest("sealed")):
            raise EvidenceError("seal_refused", "a package was published that this run never sealed")
        self._record("published", package)

    def newest_published(self) -> PublishedPackage | None:
        """Return the published package of the highest step; of several, the last."""
        return max(map(_package, self._books.log.newest("published")), key=lambda package: package.step, default=None)

    def open(self, info: bytes, wrapped_key: bytes) -> bytes:
        """Open the data key that was sealed to this run; logged before it returns.

        Args:
            info: what the key is bound to; it names the package.

        Raises:
            EvidenceError: ``key_not_for_us``, or ``release_denied`` if the key was opened as often as its quota says.
        """
        data_key = self._run.recipient_key.open(wrapped_key, info)
        # After the opening, so that a foreign package uses up no quota; before the key leaves.
        self._draw_key(info)
        return data_key

    def _record(self, kind: str, package: PublishedPackage) -> None:
        """Log ``package``, unless the newest entry of ``kind`` is the same."""
        newest = next(map(_package, self._books.log.newest(kind)), None)
        if newest != package:
            with self._books.state.transaction():
                self._books.log.append(kind, {"step": package.step, "package_digest": package.digest.hex()})


def _package(entry: Entry) -> PublishedPackage:
    content = entry.content
    return PublishedPackage(step=content["step"], digest=bytes.fromhex(content["package_digest"]))
