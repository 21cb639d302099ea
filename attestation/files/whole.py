"""Files that readers see whole: the old content or the new, never a part."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` when the block ends. If the block fails, nothing changes.

    Guarantee: no reader sees a part of it, and its content is on disk before its name is.

    Args:
        mode: mode of the new file, less the process's umask.
    """
    # A name of its own, so that concurrent writers do not share a draft.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # After the sync, so that the name never leads to content that is not on disk.
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` by ``data`` as a whole; see :func:`whole_file`."""
    with whole_file(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Put a file's bytes on disk, or the names in a folder: the bytes of a new file do not bring its name along."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
