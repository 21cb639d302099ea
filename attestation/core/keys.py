"""Key types that cannot be printed or pickled, and the table of HKDF purposes.

Every symmetric key in raycloak comes from :func:`derive` with a purpose of this table. So no two uses can share a key.
Primitives: HKDF-SHA-256 (RFC 5869), Ed25519 (RFC 8032), X25519 (RFC 7748), all from `cryptography`.
"""

from enum import StrEnum
from functools import lru_cache
from typing import Any, NoReturn, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from raycloak.attestation.core.canonical import length_prefixed


class Purpose(StrEnum):
    """The purpose of a derived key, which is the domain label of its derivation."""

    RUN_ID = "raycloak/run-id/v1"
    ORCHESTRATOR_IDENTITY = "raycloak/orchestrator-identity/v1"
    ORCHESTRATOR_ML_DSA = "raycloak/orchestrator-ml-dsa/v1"
    VIRTUAL_WORKER = "raycloak/virtual-worker/v1"
    KEY_COMMITMENT = "raycloak/key-commitment/v1"
    DATA_COMMITMENT = "raycloak/data-commitment/v1"
    VIRTUAL_WORKER_HALVES = "raycloak/virtual-worker-halves/v1"
    DATA_COMMITMENT_HALVES = "raycloak/data-commitment-halves/v1"
    DATASET_FINGERPRINT = "raycloak/dataset-fingerprint/v2"
    DATASET_KEY_NAME = "raycloak/dataset-key-name/v1"
    DATASET_CODES = "raycloak/dataset-codes/v1"
    SAMPLING = "raycloak/stream/sampling/v1"
    PLACES = "raycloak/stream/places/v1"
    UNIT_ROWS = "raycloak/stream/unit-rows/v1"
    VERSIONS = "raycloak/stream/versions/v1"
    NOISE = "raycloak/stream/noise/v1"
    NOISE_INDEX = "raycloak/stream/noise-index/v1"
    NOISE_RESIDUE = "raycloak/stream/noise-residue/v1"
    VECTOR_TAG = "raycloak/vector-tag/v2"
    SUM_TAG = "raycloak/sum-tag/v1"
    PAIR = "raycloak/pair/v1"
    PAIR_RATCHET = "raycloak/pair-ratchet/v1"
    MASK_CIRCLE = "raycloak/mask-circle/v1"
    MASK = "raycloak/mask/v1"
    PAYLOAD_TAG = "raycloak/payload-tag/v1"
    KNOWN_ANSWER = "raycloak/known-answer/v1"
    SEALED_SLICE = "raycloak/sealed-data/slice-key/v1"
    SEALED_EVALUATION_SLICE = "raycloak/sealed-data/evaluation-slice-key/v1"
    SENT_EXAMPLES = "raycloak/sent-data/virtual-worker/v1"
    SENT_PART = "raycloak/sent-data/part/v1"
    SENT_IDS = "raycloak/sent-data/example-ids/v1"
    ADAPTER_KEYS = "raycloak/encrypted-adapter/keys/v1"
    ADAPTER_ANSWER = "raycloak/encrypted-adapter/answer/v1"
    ADAPTER_MASK = "raycloak/encrypted-adapter/stream/mask/v1"
    ADAPTER_ERROR = "raycloak/encrypted-adapter/stream/error/v1"
    ADAPTER_FLOODING = "raycloak/encrypted-adapter/stream/flooding/v1"
    ADAPTER_FLOODING_LOW = "raycloak/encrypted-adapter/stream/flooding-low/v1"
    PACKAGE_MLKEM = "raycloak/package/mlkem/v1"
    PACKAGE_X25519 = "raycloak/package/x25519/v1"
    PACKAGE_PAYLOAD = "raycloak/package/payload/v1"


class _Unexportable:
    """The base of secret-bearing types: no repr of the content, no pickle, no copy."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} must not leave its process")


SECRET_BYTES = 32
"""Length of a derived key: one output of SHA-256."""


class Secret(_Unexportable):
    """A piece of symmetric key material."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = bytes(raw)

    def reveal(self) -> bytes:
        """Return the raw bytes, for the call that needs them. Never keep or log the result."""
        return self._raw


def derive(secret: Secret, purpose: Purpose, *fields: bytes | str | int, length: int = SECRET_BYTES) -> Secret:
    """Derive ``length`` bytes by HKDF-SHA-256 with ``info = LP(purpose, fields...)``."""
    info = length_prefixed(purpose, *fields)
    return Secret(HKDF(hashes.SHA256(), length, salt=None, info=info).derive(secret.reveal()))


class IdentityKey(_Unexportable):
    """The Ed25519 signing key of an actor."""

    __slots__ = ("_key", "public")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: Secret) -> Self:
        """Return the key whose RFC 8032 seed is ``seed`` (32 bytes)."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed.reveal()))

    def sign(self, message: bytes) -> bytes:
        """Sign ``message``; the signature has 64 bytes."""
        return self._key.sign(message)

    def certify(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        """Issue the certificate that ``builder`` describes, signed by this key."""
        # Ed25519 includes its hash, so none is named.
        return builder.sign(self._key, None)


def signature_is_valid(public: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` is ``message``'s under the raw Ed25519 key ``public``; False for malformed input."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=256)  # an appraisal parses it, and the releases that follow do too
def mlkem_public(raw: bytes) -> MLKEM768PublicKey:
    """Parse the ML-KEM-768 public key in 1,184 raw bytes; ValueError if they are none (FIPS 203, 7.2)."""
    return MLKEM768PublicKey.from_public_bytes(raw)


class AgreementKey(_Unexportable):
    """The X25519 key from which pair secrets are agreed."""

    __slots__ = ("_agreed", "_key", "public")

    def __init__(self, key: X25519PrivateKey) -> None:
        self._key = key
        # Kept as long as the key, which gives no more away: with it anybody agrees on them again.
        self._agreed: dict[bytes, Secret] = {}
        self.public: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        return cls(X25519PrivateKey.generate())

    def agree(self, peer_public: bytes) -> Secret:
        """Agree on the shared secret with a peer's raw public key. A low-order point raises ValueError."""
        agreed = self._agreed.get(peer_public)
        if agreed is None:
            agreed = Secret(self._key.exchange(X25519PublicKey.from_public_bytes(peer_public)))
            self._agreed[peer_public] = agreed
        return agreed
