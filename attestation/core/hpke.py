"""Encryption to a member's attested key: HPKE (RFC 9180) in base mode, with ML-KEM-768 and X25519 together.

A ciphertext stays closed unless both are broken, so that one recorded today does not open to a quantum computer later.
It opens only under the ``info`` that it was sealed with. HPKE in base mode says nothing about the sender, so the
packages that carry keys are signed as well.
"""

from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from raycloak.attestation.core.evidence import MLKEM_BYTES
from raycloak.attestation.core.keys import Secret, mlkem_public
from raycloak.metrics.errors import EvidenceError

_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


class HpkeKey:
    """A member's decryption key. ``public`` is ML-KEM-768 raw (1,184 bytes) followed by X25519 raw (32 bytes)."""

    __slots__ = ("_private", "public")

    def __init__(self, mlkem: MLKEM768PrivateKey, x25519: X25519PrivateKey) -> None:
        self._private = MLKEM768X25519PrivateKey(mlkem, x25519)
        self.public: bytes = mlkem.public_key().public_bytes_raw() + x25519.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """Make a new key."""
        return cls(MLKEM768PrivateKey.generate(), X25519PrivateKey.generate())

    @classmethod
    def from_seeds(cls, mlkem: Secret, x25519: Secret) -> Self:
        """Return the key of the ML-KEM seed ``mlkem`` (64 bytes, FIPS 203) and the X25519 scalar (32 bytes)."""
        return cls(
            MLKEM768PrivateKey.from_seed_bytes(mlkem.reveal()), X25519PrivateKey.from_private_bytes(x25519.reveal())
        )

    def open(self, ciphertext: bytes, info: bytes) -> bytes:
        """Decrypt; EvidenceError ``key_not_for_us`` if key, info or bytes do not match."""
        try:
            return _SUITE.decrypt(ciphertext, self._private, info=info)
        except (InvalidTag, ValueError):
            raise EvidenceError("key_not_for_us", "the key package was not sealed to this member's key") from None


def hpke_seal(plaintext: bytes, recipient: bytes, info: bytes) -> bytes:
    """Encrypt to the holder of ``recipient``, a :class:`HpkeKey`'s ``public``; ValueError if it is not a key."""
    mlkem = mlkem_public(recipient[:MLKEM_BYTES])
    x25519 = X25519PublicKey.from_public_bytes(recipient[MLKEM_BYTES:])
    return _SUITE.encrypt(plaintext, MLKEM768X25519PublicKey(mlkem, x25519), info=info)
