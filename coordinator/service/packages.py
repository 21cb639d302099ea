"""Artifacts: the packages that clients saved, as they are sent to them.

Guarantee: an artifact is sent only if it is the very package that was saved, by its digest. What it holds is encrypted
to its recipients, and its reader verifies it.
"""

from collections.abc import Iterator

from raycloak.attestation.core.messages import parse
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.checkpoints.package_file import file_bytes, file_pieces
from raycloak.coordinator.checkpoints.storage import MANIFEST, STORAGE_ERRORS, PackageStorage, one_line, split_location
from raycloak.metrics.errors import ConfigError, EvidenceError, ProtocolError


class SavedPackage:
    """A saved package.

    Args:
        location: as `raycloak.coordinator.training.state_requests.save` states it.
        package_digest: of the package, 32 bytes.

    Raises:
        EvidenceError: ``package_file_missing`` if it is not there, ``package_file_changed`` if another one is.
        ConfigError: ``storage`` if it cannot be read.
    """

    def __init__(self, location: str, package_digest: bytes) -> None:
        storage, self._name = split_location(location)
        self._storage = PackageStorage.open(storage)
        try:
            size = self._storage.files(self._name).get(MANIFEST, -1)
            if size < 0:
                raise EvidenceError(
                    "package_file_missing", f"the package {self._name} is not there.", "Save the state again."
                )
            with self._storage.reader(self._name, MANIFEST) as stream:
                stated = parse(PackageManifest, bytes(stream.read(size)))
            self.bytes = file_bytes(self._storage, self._name)
        except STORAGE_ERRORS as error:
            raise _unreadable(error) from None
        except ProtocolError:
            raise _changed(self._name) from None
        if stated.digest() != package_digest:
            raise _changed(self._name)

    def pieces(self) -> Iterator[bytes]:
        """Yield the package as one file, a tar, in pieces of at most 256 KiB; ``bytes`` is the size of all of them.

        Raises:
            EvidenceError, ConfigError: as the constructor, if it disappears meanwhile.
        """
        try:
            yield from file_pieces(self._storage, self._name)
        except STORAGE_ERRORS as error:
            raise _unreadable(error) from None


def _changed(name: str) -> EvidenceError:
    return EvidenceError(
        "package_file_changed", f"the package {name} is not the one that was saved.", "Do not use this package."
    )


def _unreadable(error: BaseException) -> ConfigError:
    return ConfigError("storage", f"the package cannot be read: {one_line(error)}.", "Restore the storage.")
