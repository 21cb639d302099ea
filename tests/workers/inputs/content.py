"""The digest of a file's content, as `raycloak.workers.inputs.file_sets.CommittedFile` has it, of all bytes at once."""

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.workers.inputs import file_sets


def content_digest(content: bytes) -> bytes:
    """Return SHA-256 over the digests of the blocks."""
    block = file_sets._BLOCK
    blocks = [digest(content[start : start + block]) for start in range(0, len(content), block)]
    return digest(length_prefixed("raycloak/file-blocks/v1", *blocks))
