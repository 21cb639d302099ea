"""The payloads of a package: chunks of authenticated encryption in the STREAM construction.

STREAM is the construction of Hoang, Reyhanitabar, Rogaway and Vizár (2015). A chunk's nonce is the payload's prefix,
the chunk's position and whether it is the last. So a chunk that was cut off, moved, repeated or added does not decrypt.
The cipher is AES-256-GCM under a key of one payload of one package. Memory: a few chunks, whatever the size.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.sealed.package_manifest import (
    NONCE_PREFIX_BYTES,
    TAG_BYTES,
    PackageRefusal,
    Payload,
    chunk_count,
    refuse,
)

# A tag of 16 bytes weighs little on a chunk of this size; larger ones would only take memory.
CHUNK_BYTES = 2**20

Piece = bytes | bytearray | memoryview


def write_payload(
    sink: BinaryIO, data_key: Secret, context: bytes, name: str, pieces: Iterable[Piece], chunk_bytes: int = CHUNK_BYTES
) -> Payload:
    """Encrypt ``pieces``, one after the other, into ``sink``.

    Args:
        data_key: the package's key, 32 bytes.
        context: the package's context; see `raycloak.attestation.sealed.package_manifest.package_context`.
    """
    # Fresh for each writing: a payload written again under one key must not repeat a nonce.
    prefix = secrets.token_bytes(NONCE_PREFIX_BYTES)
    sha256, plain_bytes, cipher_bytes = hashlib.sha256(), 0, 0
    cipher, associated = _cipher(data_key, context, name), _associated(context, name)
    for index, (chunk, is_last) in enumerate(_chunks(pieces, chunk_bytes)):
        encrypted = cipher.encrypt(_nonce(prefix, index, is_last), chunk, associated)
        sink.write(encrypted)
        sha256.update(encrypted)
        plain_bytes += len(chunk)
        cipher_bytes += len(encrypted)
    return Payload(
        name=name,
        plain_bytes=plain_bytes,
        cipher_bytes=cipher_bytes,
        chunk_bytes=chunk_bytes,
        chunks=chunk_count(plain_bytes, chunk_bytes),
        sha256=sha256.digest(),
        nonce_prefix=prefix,
    )


def read_payload(source: BinaryIO, data_key: Secret, context: bytes, payload: Payload) -> Iterator[bytes]:
    """Yield the plaintext of a payload, chunk by chunk.

    Guarantee: every yielded chunk is the one that was written at its place of this very payload. When the iterator
    ends, all of them were yielded, and nothing follows them.

    Raises:
        EvidenceError: ``package_file_changed``.
    """
    cipher, associated = _cipher(data_key, context, payload.name), _associated(context, payload.name)
    left = payload.plain_bytes
    for index in range(payload.chunks):
        size = min(left, payload.chunk_bytes)
        encrypted = _read_exactly(source, size + TAG_BYTES)
        try:
            yield cipher.decrypt(
                _nonce(payload.nonce_prefix, index, index == payload.chunks - 1), encrypted, associated
            )
        except InvalidTag:
            refuse(PackageRefusal.FILE_CHANGED, f"chunk {index} of {payload.name} is not the one written there.")
        left -= size
    # Every chunk was authentic, but bytes behind the last one were never sealed.
    if source.read(1):
        refuse(PackageRefusal.FILE_CHANGED, f"{payload.name} continues after its last chunk.")


def _chunks(pieces: Iterable[Piece], chunk_bytes: int) -> Iterator[tuple[bytearray, bool]]:
    """Join all pieces and cut them anew; yield each chunk, at least one, with whether it is the last."""
    chunk = bytearray()
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while len(rest):
            # A full chunk is held back until it is known whether another follows.
            if len(chunk) == chunk_bytes:
                yield chunk, False
                chunk = bytearray()
            taken = rest[: chunk_bytes - len(chunk)]
            chunk += taken
            rest = rest[len(taken) :]
    yield chunk, True


def _nonce(prefix: bytes, index: int, is_last: bool) -> bytes:
    """Return prefix (7 bytes), position (4, big-endian), and 1 for the last chunk, else 0."""
    return prefix + index.to_bytes(4, "big") + bytes([is_last])


def _cipher(data_key: Secret, context: bytes, name: str) -> AESGCM:
    return AESGCM(derive(data_key, Purpose.PACKAGE_PAYLOAD, context, name).reveal())


def _associated(context: bytes, name: str) -> bytes:
    return length_prefixed("raycloak/package/chunk/v1", context, name)


def _read_exactly(source: BinaryIO, size: int) -> bytes:
    """Read up to ``size`` bytes. Fewer come only at the end, and then the tag does not verify."""
    parts, left = [], size
    while left and (part := source.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
