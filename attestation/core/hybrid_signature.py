"""Signatures that must hold for years: Ed25519 (RFC 8032) and ML-DSA-65 (FIPS 204) together.

Guarantee: a verified signature holds as long as either scheme does, because both must verify. Sealed packages and heads
of the evidence log are signed so. Messages that live no longer than a step are signed with Ed25519 alone.
"""

from typing import ClassVar, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey, MLDSA65PublicKey
from pydantic import Field

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.keys import IdentityKey, Secret, signature_is_valid
from raycloak.attestation.core.messages import Message

# Short, because it only finds a key: both signatures are verified under what it finds.
KEY_ID_BYTES = 16


class SignerPublic(Message):
    """The public keys of a signer, raw: Ed25519 (32 bytes) and ML-DSA-65 (1,952 bytes)."""

    DOMAIN: ClassVar[str] = "raycloak/package/signer/v1"

    ed25519: bytes = Field(min_length=32, max_length=32)
    ml_dsa_65: bytes = Field(min_length=1952, max_length=1952)

    @property
    def key_id(self) -> bytes:
        """The first 16 bytes of the digest of both keys."""
        return digest(length_prefixed("raycloak/package/signer-key/v1", self.ed25519, self.ml_dsa_65))[:KEY_ID_BYTES]


class HybridSignature(Message):
    """The two signatures over ``LP(domain, bytes)``, and the key id of their signer."""

    DOMAIN: ClassVar[str] = "raycloak/package/signature/v1"

    key_id: bytes
    ed25519: bytes
    ml_dsa_65: bytes

    def invalid_parts(self, data: bytes, signer: SignerPublic) -> tuple[str, ...]:
        """Return the parts that are not ``signer``'s over ``data``: ``Ed25519``, ``ML-DSA-65``, ``key id``."""
        signed = length_prefixed(self.DOMAIN, data)
        valid = {
            "Ed25519": signature_is_valid(signer.ed25519, signed, self.ed25519),
            "ML-DSA-65": _ml_dsa_is_valid(signer.ml_dsa_65, signed, self.ml_dsa_65),
            "key id": self.key_id == signer.key_id,
        }
        return tuple(part for part, is_valid in valid.items() if not is_valid)


class HybridSigner:
    """A signer with both schemes.

    Args:
        ed25519, ml_dsa_65: the seeds, 32 bytes each.
    """

    __slots__ = ("_ed25519", "_ml_dsa_65", "public")

    def __init__(self, ed25519: Secret, ml_dsa_65: Secret) -> None:
        self._ed25519 = IdentityKey.from_seed(ed25519)
        self._ml_dsa_65 = MLDSA65PrivateKey.from_seed_bytes(ml_dsa_65.reveal())
        self.public = SignerPublic(
            ed25519=self._ed25519.public, ml_dsa_65=self._ml_dsa_65.public_key().public_bytes_raw()
        )

    @classmethod
    def generate(cls) -> Self:
        """Make a signer with new keys."""
        return cls(*new_seeds())

    def sign(self, data: bytes) -> HybridSignature:
        """Sign ``data`` with both schemes."""
        signed = length_prefixed(HybridSignature.DOMAIN, data)
        return HybridSignature(
            key_id=self.public.key_id, ed25519=self._ed25519.sign(signed), ml_dsa_65=self._ml_dsa_65.sign(signed)
        )


def new_seeds() -> tuple[Secret, Secret]:
    """Make seeds of a new signer: Ed25519, ML-DSA-65."""
    return (
        Secret(Ed25519PrivateKey.generate().private_bytes_raw()),
        Secret(MLDSA65PrivateKey.generate().private_bytes_raw()),
    )


def _ml_dsa_is_valid(public: bytes, message: bytes, signature: bytes) -> bool:
    try:
        MLDSA65PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
