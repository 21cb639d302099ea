"""The files of batches that clients send: written as they arrive, checked, and durable before they are named."""

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from raycloak.attestation.files.whole import sync
from raycloak.attestation.sealed.sent_batch import SentHead, head_of
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.limits import SEND_BYTES
from raycloak.coordinator.service.operations import invalid
from raycloak.metrics.errors import ProtocolError


class Upload:
    """A batch that arrives.

    Args:
        folder: of all batches; the file lies in its client's folder.
    """

    def __init__(self, folder: Path, head: wire.BatchHead) -> None:
        self._head = head
        self._folder = folder
        # A name of its own: of two attempts to send one batch, each has a whole file.
        self.name = f"{head.client_id}/{secrets.token_hex(16)}"
        self._path = folder / self.name

    async def take(self, pieces: AsyncIterator[wire.BatchPiece]) -> SentHead:
        """Write the ciphertext, and make the file and its name durable; return the head that it was sealed with.

        Raises:
            ServiceValidationError: the pieces are not what the head said, or no batch. The file is gone then.
        """
        try:
            await self._write(pieces)
            return await asyncio.to_thread(self._sealed_head)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Remove the file, if there is one."""
        self._path.unlink(missing_ok=True)

    def _sealed_head(self) -> SentHead:
        try:
            with self._path.open("rb") as file:
                return head_of(file, self._head.bytes, self._head.examples)
        except ProtocolError as refusal:
            raise invalid("batch", refusal.message, refusal.code) from None

    async def _write(self, pieces: AsyncIterator[wire.BatchPiece]) -> None:
        taken, digest = 0, hashlib.sha256()
        await asyncio.to_thread(self._path.parent.mkdir, 0o700, True, True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=SEND_BYTES) as file:
            async for piece in pieces:
                if piece.WhichOneof("piece") != "data":
                    raise invalid("head", "a second head came in one batch")
                taken += len(piece.data)
                if taken > self._head.bytes:
                    raise invalid("bytes", "more ciphertext came than the head says")
                digest.update(piece.data)
                await asyncio.to_thread(file.write, piece.data)
            if taken != self._head.bytes or digest.digest() != self._head.sha256:
                raise invalid("sha256", "the ciphertext is not what the head says")
            await asyncio.to_thread(file.flush)
            await asyncio.to_thread(os.fsync, file.fileno())
        # The names of the file and of a new folder.
        for folder in (self._path.parent, self._folder):
            await asyncio.to_thread(sync, folder)
