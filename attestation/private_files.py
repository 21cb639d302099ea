"""Files with private keys: they appear as a whole, and only their owner can read them."""

import os
import secrets
import stat
from pathlib import Path

from metrics.errors import ConfigError


def public_half(path: Path, code: str) -> Path:
    """Where the public half of the private key in ``path`` goes: beside it, with ``.pub`` appended.

    Raises:
        ConfigError: ``code`` if the path names no file.
    """
    if not path.name:
        raise ConfigError(code, f"'{path}' is no name for a file.", "Name a new file.")
    return path.with_name(f"{path.name}.pub")


def publish(path: Path, data: bytes, mode: int = 0o600) -> bool:
    """Put ``data`` at ``path`` as a whole and durably, unless a file is there; returns whether it was put.

    Guarantee: of concurrent callers exactly one puts its data, and no reader ever sees a part of it.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        path.hardlink_to(draft)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def read_private(path: Path, code: str) -> bytes:
    """The content of a file that nobody but its owner can read.

    Raises:
        ConfigError: ``code`` if the file's mode lets others read it.
        OSError: as `Path.read_bytes`.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(code, f"{path} holds keys and has mode {mode:04o}.", f"Run chmod 600 {path}, or remove it.")
    return path.read_bytes()
