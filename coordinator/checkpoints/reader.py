"""Reads a package. Everything is verified before anything is decrypted.

First come both signatures over the manifest's bytes, under one entry of the reader's own trust store; then the
manifest. Next come the run, the heads and the newest package that the reader knows of. The set of files and the bytes
of every file follow. Only then is a data key unwrapped. Every chunk is authenticated once more when it is decrypted.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.messages import parse
from raycloak.attestation.orchestrator.package_desk import PublishedPackage
from raycloak.attestation.sealed.chunk_stream import CHUNK_BYTES, read_payload
from raycloak.attestation.sealed.package_keys import TrustStore, open_manifest, recipient_key_id
from raycloak.attestation.sealed.package_manifest import PackageManifest, PackageRefusal, Payload, refuse
from raycloak.coordinator.checkpoints.arrays import load_arrays
from raycloak.coordinator.checkpoints.package_file import PackageFile
from raycloak.coordinator.checkpoints.storage import (
    MANIFEST,
    RUN_MANIFEST,
    SIGNATURE,
    STORAGE_ERRORS,
    PackageSource,
    PackageStorage,
    one_line,
    split_location,
)
from raycloak.coordinator.checkpoints.writer import AVERAGED_WEIGHTS, PARAMETERS
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import dimension, model_digest, split_flat, tensor_digests

# Wider than the names that runs give, since readers name copies as they like.
_STEP = re.compile(r"step-?([0-9]{1,18})", re.IGNORECASE)
_MOST_CLEAR_BYTES = 2**26  # of a file that is read before any signature over it is verified


@dataclass(frozen=True, slots=True)
class Expected:
    """A reader's knowledge from elsewhere. A field that is None is not checked.

    Attributes:
        run: digest of the run's manifest.
        run_id: of the run. step: number of finished steps.
        newest: the package that was published last, as far as the reader knows.
        ledger_hash: returns the hash of the ledger's entry at a sequence, None if it has none there.
        log_root: returns the evidence log's root over its first so many entries, None if it has fewer.
    """

    run: bytes | None = None
    run_id: str | None = None
    step: int | None = None
    newest: PublishedPackage | None = None
    ledger_hash: Callable[[int], bytes | None] | None = None
    log_root: Callable[[int], bytes | None] | None = None


NOTHING_EXPECTED = Expected()


@dataclass(frozen=True, slots=True)
class VerifiedPackage:
    """A verified package.

    Attributes:
        signer: the signer's name in the trust store.
        run_manifest: the run's manifest, as the package contains it.
    """

    storage: PackageSource
    name: str
    signer: str
    manifest: PackageManifest
    run_manifest: Manifest

    def chunks(self, payload_name: str, data_key: Secret) -> Iterator[bytes]:
        """Yield the plaintext of a payload, in constant memory.

        Raises:
            EvidenceError: ``package_file_changed`` if the file is no longer the one that was verified.
        """
        payload = next((each for each in self.manifest.payloads if each.name == payload_name), None)
        if payload is None:
            refuse(PackageRefusal.MALFORMED, f"its manifest has no payload {payload_name}.")
        with self.storage.reader(self.name, payload_name) as source:
            yield from read_payload(source, data_key, self.manifest.context(), payload)

    @property
    def exported(self) -> str:
        """The payload of the weights that are exported: the averaged ones, where the run keeps them."""
        return AVERAGED_WEIGHTS if self.manifest.averaged_digest else PARAMETERS

    def unwrap(self, key: HpkeKey) -> Secret:
        """Unwrap the data key for one of the recipients.

        Raises:
            EvidenceError: ``not_a_recipient``.
        """
        wrapped_key = self.wrapped_key(recipient_key_id(key.public))
        return Secret(key.open(wrapped_key, self.manifest.info()))

    def wrapped_key(self, key_id: bytes) -> bytes:
        """Return the wrapped data key of the recipient ``key_id``.

        Raises:
            EvidenceError: ``not_a_recipient``.
        """
        for recipient in self.manifest.recipients:
            if recipient.key_id == key_id:
                return recipient.wrapped_key
        names = ", ".join(recipient.name for recipient in self.manifest.recipients)
        refuse(PackageRefusal.NOT_A_RECIPIENT, f"it was not sealed to this key, but to the keys of: {names}.")


def verify_package(
    storage: PackageSource, name: str, trust: TrustStore, expected: Expected = NOTHING_EXPECTED
) -> VerifiedPackage:
    """Check a package as a whole, without any key that opens it.

    Guarantee: returns only if both signatures verify under one entry of ``trust`` and the package agrees with
    ``expected``, and with its name if that names a step. Its files are then exactly the manifest's, byte for byte.
    Nothing is decrypted.

    Raises:
        EvidenceError: with a code of `raycloak.attestation.sealed.package_manifest.PackageRefusal`.
        STORAGE_ERRORS of `raycloak.coordinator.checkpoints.storage`.
    """
    files = storage.files(name)
    # Nothing else in a package is believed before its signatures hold.
    signer, manifest = _signed_manifest(storage, name, files, trust)
    _check_name(manifest, name)
    _check_expected(manifest, expected)
    known = {MANIFEST, SIGNATURE, RUN_MANIFEST, *(payload.name for payload in manifest.payloads)}
    for stray in sorted(files.keys() - known):
        refuse(PackageRefusal.STRAY_FILE, f"{stray} is not in its manifest.")
    try:
        run_manifest = parse(Manifest, _read_clear(storage, name, RUN_MANIFEST, files))
    except ProtocolError:
        refuse(PackageRefusal.FILE_CHANGED, f"{RUN_MANIFEST} cannot be read.")
    if run_manifest.digest() != manifest.manifest_digest or run_manifest.run_id != manifest.run_id:
        refuse(PackageRefusal.FILE_CHANGED, f"{RUN_MANIFEST} is not the one the package was sealed with.")
    for payload in manifest.payloads:
        _check_payload(storage, name, payload, files)
    return VerifiedPackage(storage, name, signer, manifest, run_manifest)


@contextmanager
def package_at(path: str, trust: Path, expected: Expected = NOTHING_EXPECTED) -> Iterator[VerifiedPackage]:
    """Verify the package at ``path``, a folder, a file or an s3:// URL, for as long as the block reads it.

    Args:
        trust: file of the reader's trust store.

    Raises:
        ConfigError: ``trust_store``, or ``storage`` if something cannot be read or written, also in the block.
        EvidenceError: as :func:`verify_package`.
    """
    store = TrustStore.load(trust)
    try:
        source, name = _source(path)
        package = verify_package(source, name, store, expected)
        # The reader sees the name of the file, and not the one in it.
        _check_name(package.manifest, split_location(path)[1])
        yield package
    except STORAGE_ERRORS as error:
        raise ConfigError(
            "storage", f"cannot read or write: {one_line(error)}.", "Check the paths and the storage."
        ) from None


def signed_manifest(storage: PackageSource, name: str, trust: TrustStore) -> PackageManifest:
    """Return a package's manifest if both signatures verify. Its other files are not examined.

    Raises:
        EvidenceError: as :func:`verify_package`.
    """
    return _signed_manifest(storage, name, storage.files(name), trust)[1]


def _signed_manifest(
    storage: PackageSource, name: str, files: Mapping[str, int], trust: TrustStore
) -> tuple[str, PackageManifest]:
    body = _read_clear(storage, name, MANIFEST, files)
    return open_manifest(body, _read_clear(storage, name, SIGNATURE, files), trust)


def _source(path: str) -> tuple[PackageSource, str]:
    """Return where a package is read from, and its name there."""
    if "://" not in path:
        local = Path(path).expanduser()
        if local.is_file():
            found = PackageFile.open(local)
            return found, found.name
        # Its last part is the folder's name, which ``.`` and ``..`` are not.
        absolute = local.absolute()
        path = str(absolute.resolve() if absolute.name == ".." else absolute)
    location, name = split_location(path)
    return PackageStorage.open(location), name


def _check_name(manifest: PackageManifest, name: str) -> None:
    """Refuse a folder that names another step: its reader would take an old model for a new one."""
    stated = _STEP.match(name)
    if stated and int(stated[1]) != manifest.step:
        refuse(PackageRefusal.OTHER_STEP, f"the folder {name} holds the package of step {manifest.step}.")


def _check_expected(manifest: PackageManifest, expected: Expected) -> None:
    if expected.run_id is not None and manifest.run_id != expected.run_id:
        refuse(PackageRefusal.OTHER_RUN, f"it belongs to run {manifest.run_id}.")
    if expected.step is not None and manifest.step != expected.step:
        refuse(PackageRefusal.OTHER_STEP, f"it is of step {manifest.step}.")
    if expected.run is not None and manifest.manifest_digest != expected.run:
        refuse(PackageRefusal.OTHER_RUN, f"it belongs to run {manifest.run_id}, or to another manifest of it.")
    newest = expected.newest
    if newest and (
        manifest.step < newest.step or (manifest.step == newest.step and manifest.digest() != newest.digest)
    ):
        refuse(
            PackageRefusal.ROLLED_BACK,
            f"it is of step {manifest.step}; another one, of step {newest.step}, was published last.",
        )
    if expected.ledger_hash and expected.ledger_hash(manifest.ledger_sequence) != manifest.ledger_hash:
        refuse(
            PackageRefusal.LEDGER_ROLLED_BACK,
            f"it was sealed after the ledger's entry {manifest.ledger_sequence}, which this ledger does not have.",
        )
    if expected.log_root and expected.log_root(manifest.log_length) != manifest.log_hash:
        refuse(
            PackageRefusal.LOG_ROLLED_BACK,
            f"it was sealed after {manifest.log_length} entries of the evidence log, which this log does not have.",
        )


def _check_payload(storage: PackageSource, name: str, payload: Payload, files: Mapping[str, int]) -> None:
    _check_present(payload.name, files)
    # The size first, which spares reading a file that cannot be right.
    if files[payload.name] != payload.cipher_bytes:
        refuse(
            PackageRefusal.FILE_CHANGED,
            f"{payload.name} has {files[payload.name]} bytes, not {payload.cipher_bytes}.",
        )
    sha256 = hashlib.sha256()
    with storage.reader(name, payload.name) as source:
        while piece := source.read(CHUNK_BYTES):
            sha256.update(piece)
    if sha256.digest() != payload.sha256:
        refuse(PackageRefusal.FILE_CHANGED, f"{payload.name} has other bytes than were sealed.")


def _read_clear(storage: PackageSource, name: str, file: str, files: Mapping[str, int]) -> bytes:
    _check_present(file, files)
    if files[file] > _MOST_CLEAR_BYTES:
        refuse(PackageRefusal.MALFORMED, f"{file} has {files[file]} bytes.")
    with storage.reader(name, file) as source:
        return bytes(source.read(files[file]))


def _check_present(file: str, files: Mapping[str, int]) -> None:
    if files.get(file, -1) < 0:
        refuse(PackageRefusal.FILE_MISSING, f"{file} is not there.")


def check_weights(tensor: Callable[[str], np.ndarray], package: VerifiedPackage, payload: str) -> None:
    """Check decrypted weights against the digest that was signed.

    Args:
        tensor: returns the float32 array of a name.
        payload: that they are from, ``PARAMETERS`` or ``AVERAGED_WEIGHTS``.

    Raises:
        EvidenceError: ``package_parameters_differ``.
    """
    tensors = package.run_manifest.computation.tensors
    digests = [tensor_digests(tensor(each.name).reshape(-1), (each,))[0] for each in tensors]
    stated = package.manifest
    if model_digest(tensors, digests) != (stated.model_digest if payload == PARAMETERS else stated.averaged_digest):
        refuse(PackageRefusal.PARAMETERS_DIFFER, "its parameters do not have the digest that its manifest states.")


def weights_of(package: VerifiedPackage, data_key: Secret, payload: str) -> NDArray[np.float32]:
    """Decrypt the weights of a payload, float32[d] in canonical order, without another copy of them.

    Args:
        payload: ``PARAMETERS`` or ``AVERAGED_WEIGHTS``.

    Raises:
        EvidenceError: as :func:`open_to_file`.
    """
    tensors = package.run_manifest.computation.tensors
    flat = np.empty(dimension(tensors), np.float32)
    parts = zip(tensors, split_flat(flat, tensors), strict=True)
    places = {each.name: part.reshape(each.shape) for each, part in parts}
    if load_arrays(package.chunks(payload, data_key), places).keys() != places.keys():
        refuse(PackageRefusal.PARAMETERS_DIFFER, "its parameters are not the tensors of its run.")
    check_weights(places.__getitem__, package, payload)
    return flat


def open_to_file(package: VerifiedPackage, data_key: Secret, out: Path) -> None:
    """Decrypt the exported weights to the safetensors file ``out``, mode 0600.

    The file appears as a whole, once its digest is the signed one.

    Raises:
        EvidenceError: ``package_file_changed`` or ``package_parameters_differ``.
        OSError: if ``out`` cannot be written.
    """
    draft = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for chunk in package.chunks(package.exported, data_key):
                file.write(chunk)
        # Read back from the file, so that what is checked is what the reader gets.
        with safe_open(draft, framework="numpy") as tensors:
            check_weights(tensors.get_tensor, package, package.exported)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
