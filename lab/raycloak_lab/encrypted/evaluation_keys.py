"""A client's released keys at the worker, checked before anything is used, and the batches encrypted under them."""

from typing import Any

from raycloak.attestation.core.canonical import digest
from raycloak.metrics.errors import ProtocolError
from raycloak_lab.encrypted.parameters import KEY_HEADER, SET_F, BlockShape, require_key_header
from raycloak_lab.encrypted.seal_objects import (
    ciphertext,
    galois_keys,
    read_seeded,
    require_opaque,
    require_size,
    seeded_bytes,
)

# One digit of a rotation key for each prime that an activation has.
_DIGITS = len(SET_F.data_primes)


def released_bytes(shape: BlockShape) -> int:
    """Return the length of the keys that a client releases for blocks of this shape."""
    steps = len(shape.galois_elements)
    return KEY_HEADER.size + seeded_bytes(1, _DIGITS) + seeded_bytes(steps * _DIGITS, len(SET_F.primes))


def batch_bytes(shape: BlockShape, width: int) -> int:
    """Return the length of an encrypted block of ``width`` columns; ProtocolError ``projection_width``."""
    return seeded_bytes(shape.ciphertexts(width), _DIGITS)


class EvaluationKeys:
    """The keys by which a worker computes on one client's ciphertexts: rotations, and fresh encryptions of zero.

    Args:
        shape: the blocks that the client sends.
        released: the bytes from `ClientKeys.released`.

    Raises:
        ProtocolError: ``encryption_set``, ``key_steps``, ``ciphertext_size``, ``ciphertext_residue`` or
            ``ciphertext_zero``.

    Attributes:
        fingerprint: the SHA-256 that names these keys in requests and in the log.
    """

    def __init__(self, shape: BlockShape, released: bytes) -> None:
        steps, primes = len(shape.galois_elements), len(SET_F.primes)
        require_key_header(released, shape)
        public_end = KEY_HEADER.size + seeded_bytes(1, _DIGITS)
        require_size(released, released_bytes(shape))
        self.shape = shape
        self.fingerprint = digest(released)
        self.zero = read_seeded(released[KEY_HEADER.size : public_end], 1, _DIGITS)[0]
        keys = read_seeded(released[public_end:], steps * _DIGITS, primes)
        self.rotations = galois_keys(shape.galois_elements, keys.reshape(steps, _DIGITS, *keys.shape[1:]))

    def require(self, fingerprint: bytes) -> None:
        """Require that a request means these keys; ProtocolError ``keys_of_another_session``."""
        if fingerprint != self.fingerprint:
            raise ProtocolError(
                "keys_of_another_session",
                "the request names keys that this session does not hold.",
                "Register the keys, and send what was encrypted under them.",
            )

    def read_batch(self, content: bytes, width: int) -> list[Any]:
        """Return the ciphertexts of one encrypted block of ``width`` columns.

        Raises:
            ProtocolError: ``projection_width``, ``ciphertext_size``, ``ciphertext_residue``, ``ciphertext_zero`` or
                ``ciphertext_transparent``.
        """
        residues = read_seeded(content, self.shape.ciphertexts(width), _DIGITS)
        loaded = [ciphertext(each, 2.0**SET_F.activation_scale_bits) for each in residues]
        for each in loaded:
            require_opaque(each)
        return loaded
