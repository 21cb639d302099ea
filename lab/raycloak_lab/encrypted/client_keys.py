"""A client's keys: the secret one, which never leaves this module, and the ones that it releases to a worker.

Every released ciphertext has its second half from a public seed. That halves it, and keeps the client honest: a worker
hides its answers behind the client's public key, which hides nothing if its second half is chosen.
"""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import digest
from raycloak_lab.encrypted.parameters import SET_F, BlockShape, context, key_header, library
from raycloak_lab.encrypted.residues import Factor, Residues, added, subtracted
from raycloak_lab.encrypted.seal_objects import (
    SEED_BYTES,
    ciphertext,
    key_residues,
    require_opaque,
    require_residues,
    require_size,
    residues_of,
    uniform_residues,
    write_seeded,
)


class ClientKeys:
    """The keys of one client session.

    The secret key and all randomness come from SEAL, which reads the operating system's.

    Args:
        shape: the blocks to encrypt.

    Attributes:
        released: the bytes that a worker may hold: the rotation keys of `shape` and one encryption of zero.
        fingerprint: the SHA-256 that names them.
    """

    def __init__(self, shape: BlockShape) -> None:
        seal = library()
        generator = seal.KeyGenerator(context())
        secret = generator.secret_key()
        self.shape = shape
        self._encryptor = seal.Encryptor(context(), secret)
        self._decryptor = seal.Decryptor(context(), secret)
        self._encoder = seal.CKKSEncoder(context())
        self._secret = Factor(key_residues(secret))
        self.released = key_header(shape) + self._public() + self._rotations(generator)
        self.fingerprint = digest(self.released)

    def __repr__(self) -> str:
        return f"<ClientKeys {self.fingerprint.hex()[:16]}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("ClientKeys must not leave its process")

    def encrypt(self, tokens: NDArray[Any]) -> tuple[bytes, NDArray[np.float64]]:
        """Encrypt a block of hidden states.

        Args:
            tokens: shape [t, width] with t at most the block's tokens; the rest of the block is zero.

        Returns:
            The bytes for a worker, and the factor of each token, float64 of shape [t], that :meth:`decrypt` needs.
            Each token is scaled to one norm, which uses all precision and stays at the client.
        """
        factors = np.linalg.norm(tokens, axis=1).astype(np.float64) / 2.0**SET_F.amplitude_bits
        # A token of zeros has a delta of zero at any factor.
        scaled = tokens / np.where(factors > 0, factors, 1.0)[:, None]
        count, width = tokens.shape
        columns = self.shape.columns
        slots = np.zeros((self.shape.ciphertexts(width), columns, self.shape.tokens))
        padded = np.zeros((count, slots.shape[0] * columns))
        padded[:, :width] = scaled
        slots[:, :, :count] = padded.T.reshape(slots.shape[0], columns, count)
        return self.encrypt_slots(slots.reshape(slots.shape[0], -1)), factors

    def encrypt_slots(self, slots: NDArray[Any]) -> bytes:
        """Encrypt raw slots, float64 or complex128 of shape [ciphertexts, slots], as one seeded upload."""
        seal = library()
        encrypted: list[Residues] = []
        for values in slots:
            encoded, fresh = seal.Plaintext(), seal.Ciphertext()
            level = context().first_parms_id()
            self._encoder.encode(values.tolist(), level, 2.0**SET_F.activation_scale_bits, encoded)
            self._encryptor.encrypt_symmetric(encoded, fresh)
            encrypted.append(residues_of(fresh))
        return self._seeded(encrypted)

    def decrypt(self, response: bytes, width: int, factors: NDArray[np.float64], gain: float) -> NDArray[np.float64]:
        """Return the delta of one block.

        Args:
            response: the bytes from a worker's `Rerandomiser`.
            width: columns of the delta.
            factors: the second result of :meth:`encrypt`, shape [t].
            gain: the projection's public gain.

        Returns:
            float64, shape [t, width].

        Raises:
            ProtocolError: ``ciphertext_size``, ``ciphertext_residue``, ``ciphertext_zero`` or
                ``ciphertext_transparent``.
        """
        slots = self.decrypt_slots(response, self.shape.ciphertexts(width)).real
        columns = slots.reshape(-1, self.shape.tokens)[:width, : len(factors)]
        return np.asarray(columns.T * (factors[:, None] * gain), np.float64)

    def decrypt_slots(self, response: bytes, count: int) -> NDArray[np.complex128]:
        """Return the slots of ``count`` response ciphertexts, complex128 of shape [count, slots]."""
        seal = library()
        require_size(response, count * 2 * SET_F.degree * 4)
        words = np.frombuffer(response, "<u4").reshape(count, 2, 1, SET_F.degree).astype(np.uint64)
        require_residues(words)
        # The middle of the dropped range, so that dropping adds no offset.
        residues = (words << np.uint64(SET_F.dropped_bits)) + np.uint64(1 << (SET_F.dropped_bits - 1))
        decoded = []
        for each in residues:
            encrypted = ciphertext(each, 2.0**SET_F.product_scale_bits / SET_F.primes[1], ntt=False)
            library().Evaluator(context()).transform_to_ntt_inplace(encrypted)
            require_opaque(encrypted)
            plain = seal.Plaintext()
            self._decryptor.decrypt(encrypted, plain)
            decoded.append(self._encoder.decode_complex(plain))
        return np.array(decoded, np.complex128)

    def _public(self) -> bytes:
        fresh = library().Ciphertext()
        self._encryptor.encrypt_zero_symmetric(context().first_parms_id(), fresh)
        return self._seeded([residues_of(fresh)])

    def _rotations(self, generator: Any) -> bytes:
        keys = library().GaloisKeys()
        elements = self.shape.galois_elements
        generator.create_galois_keys(list(elements), keys)
        return self._seeded([residues_of(digit.data()) for element in elements for digit in keys.key(element)])

    def _seeded(self, encrypted: list[Residues]) -> bytes:
        """Return the same plaintexts and errors with second halves from a fresh seed.

        A first half is what the ciphertext holds beyond its second half times the secret, minus the new half times
        the secret. SEAL's error stays, so the result is a fresh encryption.
        """
        seed = os.urandom(SEED_BYTES)
        first = []
        for index, (body, mask) in enumerate(encrypted):
            change = subtracted(mask, uniform_residues(seed, index, len(mask)))
            first.append(added(body, self._secret.times(change)))
        return write_seeded(seed, np.array(first).reshape(len(first), *(first[0].shape if first else (0, 0))))
