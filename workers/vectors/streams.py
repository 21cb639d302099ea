"""The keystreams of ChaCha20 (RFC 8439): the only source of randomness of sampling, noise and masks.

A key serves one purpose (see `raycloak.attestation.core.keys.Purpose`), so nonce 0 is right wherever one stream per
key is enough.
"""

import builtins
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import RefusedError

# Both are the cipher's: 64-byte blocks, and a block counter of 32 bits.
BLOCK_BYTES = 64
MAX_BLOCKS = 2**32

# One span of zeros that every stream encrypts: small enough to stay in the second-level cache, and long enough that
# threads, which encrypt side by side, seldom wait for each other between two spans.
_ZEROS = memoryview(bytes(1 << 18))


class KeyStream:
    """The keystream of one (key, nonce), which can be read from any 64-byte block on.

    Guarantee: equal (key, nonce, position) gives equal bytes on every platform, and no position is reached twice by
    wrapping: a read past block 2^32 raises and yields nothing. The order of reads and their sizes change nothing.

    Args:
        key: 32 bytes; another length raises ValueError.
        block_counter: first block to read, in [0, 2^32].
        nonce: the 96-bit nonce as a little-endian integer.
    """

    __slots__ = ("_encryptor", "_nonce", "_position")

    def __init__(self, key: Secret, *, block_counter: int = 0, nonce: int = 0) -> None:
        self._encryptor: CipherContext = Cipher(ChaCha20(key.reveal(), bytes(16)), mode=None).encryptor()
        self._nonce = nonce.to_bytes(12, "little")
        self.seek(block_counter)

    def seek(self, block_counter: int, nonce: int | None = None) -> None:
        """Continue at the start of a block, of the stream of another nonce if one is given.

        Raises:
            RefusedError: ``keystream_exhausted`` outside [0, 2^32].
        """
        if nonce is not None:
            self._nonce = nonce.to_bytes(12, "little")
        self._position = block_counter * BLOCK_BYTES
        self._check(0)
        # A tenth of the time that a new context takes.
        self._encryptor.reset_nonce((block_counter % MAX_BLOCKS).to_bytes(4, "little") + self._nonce)

    def into(self, buffer: np.ndarray[Any, Any]) -> None:
        """Overwrite ``buffer`` (C-contiguous, any integer dtype) with the next ``buffer.nbytes`` keystream bytes.

        Raises:
            RefusedError: ``keystream_exhausted``; the buffer is then unchanged.
        """
        if buffer.size == 0:
            return
        target = buffer.data.cast("B")
        self._check(len(target))
        for start in range(0, len(target), len(_ZEROS)):
            piece = target[start : start + len(_ZEROS)]
            self._encryptor.update_into(_ZEROS[: len(piece)], piece)
        self._position += len(target)

    def bytes(self, count: int) -> builtins.bytes:
        """Return the next ``count`` keystream bytes."""
        self._check(count)
        self._position += count
        return self._encryptor.update(bytes(count))

    def _check(self, count: int) -> None:
        if not 0 <= self._position <= MAX_BLOCKS * BLOCK_BYTES - count:
            raise RefusedError(
                "keystream_exhausted",
                f"a keystream ends after {MAX_BLOCKS} blocks; byte {self._position + count} was asked for.",
                "Split the model into more parameter ranges.",
            )
