"""Keys of sealed packages: of signers, of the signers that a reader trusts, and of recipients.

A package is signed twice, with Ed25519 (RFC 8032) and ML-DSA-65 (FIPS 204), so that it holds as long as either scheme
does. Recipients hold HPKE keys of X25519 and ML-KEM-768. Trusted signers are never read from a package, only from a
file of the reader.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from pydantic import Field, ValidationError

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.hpke import HpkeKey, hpke_seal
from raycloak.attestation.core.hybrid_signature import (
    KEY_ID_BYTES,
    HybridSignature,
    HybridSigner,
    SignerPublic,
    new_seeds,
)
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.core.messages import Message, parse, parse_stored
from raycloak.attestation.files.private import publish, publish_pair, read_private, require_name
from raycloak.attestation.files.whole import write_whole
from raycloak.attestation.sealed.package_manifest import PackageManifest, PackageRefusal, refuse
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.metrics.file_errors import file_error

M = TypeVar("M", bound=Message)

RUN_RECIPIENT = "run"
SIGNER_FILE = "signer.json"
SIGNER_PUBLIC_FILE = "signer.pub.json"
_AGAIN = "Get the file from its owner again."


class _StoredSigner(Message):
    """The private seeds of both schemes, 32 bytes each."""

    DOMAIN: ClassVar[str] = "raycloak/package/stored-signer/v1"

    ed25519: bytes
    ml_dsa_65: bytes


class PackageSigner(HybridSigner):
    """A signer of packages, with both schemes."""

    __slots__ = ()

    @classmethod
    def load_or_create(cls, folder: Path) -> Self:
        """Load the signer whose seeds are in ``folder``; the first caller creates it. Public keys lie beside it.

        Guarantee: all callers, also concurrent ones, get the same keys; only the owner can read the seeds.

        Raises:
            ConfigError: ``signer`` if the file is damaged, cannot be used, or others may read it.
        """
        path = folder / SIGNER_FILE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                ed25519, ml_dsa_65 = (seed.reveal() for seed in new_seeds())
                publish(path, _StoredSigner(ed25519=ed25519, ml_dsa_65=ml_dsa_65).encode())
            # Read back even by the writer: of concurrent callers only one has put its seeds.
            stored = parse(_StoredSigner, read_private(path, "signer"))
            signer = cls(Secret(stored.ed25519), Secret(stored.ml_dsa_65))
            publish(folder / SIGNER_PUBLIC_FILE, signer.public.encode(), mode=0o644)
        except OSError as error:
            raise file_error("signer", "use", path, error) from None
        except (ProtocolError, ValueError):
            raise ConfigError("signer", f"{path} is damaged.", "Remove it to get a new signer.") from None
        return signer


class TrustedSigner(Message):
    """A signer that a trust store's owner knows by name."""

    DOMAIN: ClassVar[str] = "raycloak/package/trusted-signer/v1"

    name: str = Field(min_length=1)
    signer: SignerPublic


class TrustStore(Message):
    """The set of signers that a reader trusts."""

    DOMAIN: ClassVar[str] = "raycloak/package/trust-store/v1"

    version: Literal[1] = 1
    signers: tuple[TrustedSigner, ...] = ()

    @classmethod
    def of(cls, name: str, signer: SignerPublic) -> Self:
        """Make a store with one signer."""
        return cls(signers=(TrustedSigner(name=name, signer=signer),))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a store from JSON.

        Raises:
            ConfigError: ``trust_store`` if the file cannot be read or is not a trust store.
        """
        return _load(cls, path, "trust_store", "a trust store", "Make one: raycloak package trust.")

    def save(self, path: Path) -> None:
        """Write the store to ``path``. The file is replaced as a whole.

        Raises:
            ConfigError: ``trust_store`` if it cannot be written.
        """
        try:
            write_whole(path, self.encode() + b"\n")
        except OSError as error:
            raise file_error("trust_store", "write", path, error) from None

    def with_signer(self, name: str, signer: SignerPublic) -> Self:
        """Return this store with one more signer; the same store if it already has that signer.

        Raises:
            ConfigError: ``trust_store`` if another entry already has the name or the key.
        """
        added = TrustedSigner(name=name, signer=signer)
        if added in self.signers:
            return self
        if any(known.name == name or known.signer == signer for known in self.signers):
            raise ConfigError(
                "trust_store",
                f"the store knows the name {name} or this key from another entry.",
                "Choose another name.",
            )
        return self.model_copy(update={"signers": (*self.signers, added)})

    def verify(self, data: bytes, signature: HybridSignature) -> str:
        """Verify ``data``'s signature; return the name of its trusted signer.

        Guarantee: returns only if both signatures verify under the keys of one and the same entry.

        Raises:
            EvidenceError: ``package_unknown_signer``, ``package_half_signed`` or ``package_signature``.
        """
        trusted = [known for known in self.signers if known.signer.key_id == signature.key_id]
        if not trusted:
            refuse(PackageRefusal.UNKNOWN_SIGNER, f"no trusted signer has the key id {signature.key_id.hex()}.")
        # Both signatures are checked under one and the same entry.
        invalid = signature.invalid_parts(data, trusted[0].signer)
        if len(invalid) == 1:
            refuse(PackageRefusal.HALF_SIGNED, f"the {invalid[0]} signature does not verify; both must.")
        if invalid:
            refuse(PackageRefusal.SIGNATURE, "its signatures do not verify.")
        return trusted[0].name


def open_manifest(body: bytes, signature: bytes, trust: TrustStore) -> tuple[str, PackageManifest]:
    """Return the name of a package's signer and its manifest, from the bytes of ``manifest.json`` and ``manifest.sig``.

    Raises:
        EvidenceError: as :meth:`TrustStore.verify`, or ``package_malformed``.
        ConfigError: ``former_format``.
    """
    try:
        return trust.verify(body, parse(HybridSignature, signature)), parse_stored(PackageManifest, body, "the package")
    except ProtocolError as error:
        refuse(PackageRefusal.MALFORMED, f"{error.message}.")


def load_signer(path: Path) -> SignerPublic:
    """Read a signer's public file.

    Raises:
        ConfigError: ``signer`` if the file cannot be read or is not such a file.
    """
    return _load(SignerPublic, path, "signer", "the public file of a signer", _AGAIN)


class RecipientPublic(Message):
    """A party that may open packages. ``key`` is the public part of an `HpkeKey`, 1,216 bytes."""

    DOMAIN: ClassVar[str] = "raycloak/package/recipient/v1"

    name: str = Field(min_length=1)
    key: bytes

    @property
    def key_id(self) -> bytes:
        """The first 16 bytes of the key's digest. The owner's name is not part of it."""
        return recipient_key_id(self.key)


class _StoredRecipient(Message):
    """The private seeds: ML-KEM-768 (64 bytes) and X25519 (32 bytes)."""

    DOMAIN: ClassVar[str] = "raycloak/package/stored-recipient/v1"

    name: str
    mlkem: bytes
    x25519: bytes


def recipient_key_id(key: bytes) -> bytes:
    """Return the 16 bytes by which a package names a recipient's public key."""
    return digest(length_prefixed("raycloak/package/recipient-key/v1", key))[:KEY_ID_BYTES]


def create_recipient(path: Path) -> tuple[RecipientPublic, Path]:
    """Write a new private key to ``path``, mode 0600, and its public part to ``path`` with ``.pub`` appended.

    The name in both is the file's name without its suffix.

    Raises:
        ConfigError: ``recipient_exists`` if one of the files exists, ``recipient`` if they cannot be written.
    """
    require_name(path, "recipient")
    stored = _StoredRecipient(
        name=path.stem,
        mlkem=MLKEM768PrivateKey.generate().private_bytes_raw(),
        x25519=X25519PrivateKey.generate().private_bytes_raw(),
    )
    public = RecipientPublic(name=stored.name, key=_hpke_key(stored).public)
    return public, publish_pair(path, stored.encode(), public.encode(), "recipient")


def load_recipient_key(path: Path) -> HpkeKey:
    """Read a recipient's private file.

    Raises:
        ConfigError: ``recipient`` if it cannot be read, is damaged, or others may read it.
    """
    try:
        return _hpke_key(parse(_StoredRecipient, read_private(path, "recipient")))
    except OSError as error:
        raise file_error("recipient", "read", path, error) from None
    except (ProtocolError, ValueError):
        raise ConfigError(
            "recipient",
            f"{path} is not a recipient's private key.",
            "It is the one without .pub that `package keygen` wrote.",
        ) from None


def load_recipients(paths: Sequence[Path]) -> tuple[RecipientPublic, ...]:
    """Read recipients' public files.

    Raises:
        ConfigError: ``recipient`` if one cannot be read or is not such a file.
    """
    found = []
    for path in paths:
        public = _load(RecipientPublic, path, "recipient", "the public file of a recipient", _AGAIN)
        try:
            # Sealing to the key shows whether it is one.
            hpke_seal(b"", public.key, b"")
        except ValueError:
            raise ConfigError("recipient", f"{path} does not hold a public key.", _AGAIN) from None
        found.append(public)
    return tuple(found)


def run_recipient_key(run_secret: Secret) -> HpkeKey:
    """Derive the key with which a run opens its own packages. Every holder of the run secret has it."""
    return HpkeKey.from_seeds(
        derive(run_secret, Purpose.PACKAGE_MLKEM, length=64), derive(run_secret, Purpose.PACKAGE_X25519)
    )


def _hpke_key(stored: _StoredRecipient) -> HpkeKey:
    return HpkeKey.from_seeds(Secret(stored.mlkem), Secret(stored.x25519))


def _load(cls: type[M], path: Path, code: str, what: str, remedy: str) -> M:
    try:
        return cls.model_validate_json(path.read_bytes())
    except OSError as error:
        raise file_error(code, "read", path, error) from None
    except ValidationError:
        raise ConfigError(code, f"{path} is not {what}.", remedy) from None
