"""A client's released keys on their way to one attested worker: what its evidence must state, and the sealing.

The client's orchestrator appraises the worker and releases a key to it, as in a run. The contract of that release
names the keys' fingerprint, the parameter set and the adapter in place of a known answer. So the worker's evidence and
the client's log bind all three, and a worker opens keys for nothing else.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.metrics.errors import EvidenceError
from raycloak_lab.encrypted.parameters import SET_F

# Each derived key encrypts one message: its derivation has the fingerprint of that very message.
_NONCE = bytes(12)


def stated_answer(fingerprint: bytes, adapter_digest: bytes) -> bytes:
    """Return the known answer of a contract, 32 bytes: keys, parameter set and adapter."""
    return digest(length_prefixed("raycloak/encrypted-adapter/stated/v1", fingerprint, SET_F.digest(), adapter_digest))


SEAL_BYTES = 16
"""The bytes that sealing adds: the tag of Poly1305."""


def seal_released(key: Secret, fingerprint: bytes, released: bytes) -> bytes:
    """Encrypt released keys under the key that the client's orchestrator gives the worker."""
    return _cipher(key, fingerprint).encrypt(_NONCE, released, fingerprint)


def open_released(key: Secret, fingerprint: bytes, sealed: bytes) -> bytes:
    """Decrypt released keys.

    Raises:
        EvidenceError: ``key_package_mismatch`` if they are not those that the contract states.
    """
    try:
        released = _cipher(key, fingerprint).decrypt(_NONCE, sealed, fingerprint)
    except InvalidTag:
        released = b""
    if digest(released) != fingerprint:
        raise EvidenceError("key_package_mismatch", "the sealed keys are not the ones that the contract states")
    return released


def _cipher(key: Secret, fingerprint: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive(key, Purpose.ADAPTER_KEYS, fingerprint).reveal())
