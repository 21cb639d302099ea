"""The facts of the wire that both ends of a channel begin with."""

from typing import Final

from raycloak.attestation.core.canonical import digest, length_prefixed

PIECE_BYTES: Final = 256 * 2**10
"""Length of a piece of keys or of a block: what a server may have to hold for each client that it does not read."""


def introduction_digest(identity_key: bytes) -> bytes:
    """Return the digest by which a client is heard at all.

    It follows from the key of the worker at the other end, so it keeps nobody's secret.
    """
    return digest(length_prefixed("raycloak/encrypted-adapter/introduction/v1", identity_key))
