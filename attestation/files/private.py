"""Writes and reads files with private keys. They appear whole, and only their owner can read them."""

import os
import re
import secrets
import stat
from contextlib import ExitStack
from pathlib import Path

from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error


def require_name(path: Path, code: str) -> None:
    """Raise ConfigError ``code`` unless ``path`` ends in a file's name."""
    if not path.name:
        raise ConfigError(code, f"'{path}' is not a file name.", "Name a new file.")


def publish_pair(path: Path, private: bytes, public: bytes, code: str) -> Path:
    """Put a private key at ``path``, mode 0600, and its public half beside it, with ``.pub`` appended.

    Returns the path of the public half.

    Guarantee: in the end both files exist, or neither was put.

    Raises:
        ConfigError: ``code`` with ``_exists`` appended if one of the files exists; ``code`` if they cannot be written.
    """
    public_path = path.with_name(f"{path.name}.pub")
    try:
        if not public_path.exists() and publish(path, private):
            with ExitStack() as undone:
                # A disk that fills up now, or an interrupt, must not leave a private key alone, under a name that is
                # then taken.
                undone.callback(path.unlink)
                if publish(public_path, public, mode=0o644):
                    undone.pop_all()
                    return public_path
    except FileExistsError:
        pass
    except OSError as error:
        raise file_error(code, "write", path, error) from None
    raise ConfigError(f"{code}_exists", f"{path} or {public_path} already exists.", "Choose another name.")


def publish(path: Path, data: bytes, mode: int = 0o600) -> bool:
    """Put ``data`` at ``path`` as a whole and durably, unless a file exists; return whether it was put.

    Guarantee: exactly one of concurrent callers puts its data, and no reader ever sees a part of it.
    """
    # A name of its own, so that concurrent writers do not share a draft.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        # Unlike a rename, a link fails if the name is taken. So exactly one of concurrent callers wins.
        path.hardlink_to(draft)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def read_private(path: Path, code: str) -> bytes:
    """Read a file that only its owner can read.

    Guarantee: the content comes into no process whose memory is open to another one of its user; see
    `raycloak.attestation.core.private_memory`.

    Raises:
        ConfigError: ``code`` if the file's mode lets others read it. ``memory_exposed``.
        OSError: as `Path.read_bytes`.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    # A key that others could have read is not used silently.
    if mode & 0o077:
        raise ConfigError(code, f"{path} holds keys and has mode {mode:04o}.", f"Run chmod 600 {path}, or remove it.")
    keep_memory_private()
    return path.read_bytes()


def read_hex_key(path: Path, code: str, remedy: str, *, owner_alone: bool) -> bytes:
    """Read a key of 64 hexadecimal digits, as :func:`read_private`; the mode counts only if ``owner_alone``.

    Raises:
        ConfigError: ``code`` if it cannot be read, or does not hold them. ``memory_exposed``.
    """
    try:
        if owner_alone:
            text = read_private(path, code)
        else:
            keep_memory_private()
            text = path.read_bytes()
    except OSError as error:
        raise file_error(code, "read", path, error) from None
    if not re.fullmatch(rb"[0-9a-fA-F]{64}", text.strip()):
        raise ConfigError(code, f"{path} must hold 64 hexadecimal digits.", remedy)
    return bytes.fromhex(text.decode())
