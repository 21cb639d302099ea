"""The run secret at rest: a file of 64 hexadecimal digits, mode 0600, that only the orchestrator opens."""

import os
import secrets
import stat
from pathlib import Path

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.files.private import read_hex_key
from raycloak.attestation.files.whole import sync
from raycloak.metrics.errors import ConfigError

_RECIPE = "Make one: (umask 077; openssl rand -hex 32 > FILE)."


def load_secret(path: Path) -> Secret:
    """Read a secret file.

    Raises:
        ConfigError: ``run_secret`` if it cannot be read or does not hold 64 hexadecimal digits.
    """
    return Secret(read_hex_key(path, "run_secret", _RECIPE, owner_alone=False))


def exposure(path: Path) -> str | None:
    """Return a one-line warning if others than its owner can read a secret file; None otherwise.

    It is only a warning because the file is the user's own, and the way it reached this machine may leave no choice.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None  # opening the file will report why
    if not mode & 0o077:
        return None
    return (
        f"warning: {path} has mode {mode:04o}. Anybody who reads this run secret can remove the noise and the masks "
        f"of the run. Run chmod 600 {path}"
    )


def create_secret(directory: Path) -> tuple[Path, Secret]:
    """Write a new random secret to ``directory/<run id>.secret``, durably, mode 0600."""
    secret = Secret(secrets.token_bytes(32))
    path = directory / f"{run_id_of(secret)}.secret"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret.reveal().hex() + "\n")
        file.flush()
        os.fsync(descriptor)
    # The name too, because steps will be charged for noise that derives from this secret.
    sync(directory)
    return path, secret


def kept_secret(directory: Path, run_id: str) -> tuple[Path, Secret]:
    """Load the secret that :func:`create_secret` made for a run, and return it with its file.

    Raises:
        ConfigError: ``secret_destroyed`` if it is gone, or was never in ``directory``.
    """
    path = directory / f"{run_id}.secret"
    try:
        secret = load_secret(path)
    # What the loss means matters more than why the file cannot be read.
    except ConfigError:
        raise _destroyed(run_id) from None
    if run_id_of(secret) != run_id:
        raise _destroyed(run_id)
    return path, secret


def require_kept(directory: Path, run_id: str) -> None:
    """Raise what :func:`kept_secret` raises for a secret that is gone. Reads no secret."""
    if not (directory / f"{run_id}.secret").exists():
        raise _destroyed(run_id)


def _destroyed(run_id: str) -> ConfigError:
    return ConfigError(
        "secret_destroyed",
        f"the generated secret of run {run_id} was destroyed when the run was complete or discarded, so that "
        "nobody can take its noise off again; without it, no step of the run can be computed again.",
        "Start a run that shall be replayed with --set secret_retention=keep, or with --run-secret FILE.",
    )


def destroy_secret(path: Path) -> None:
    """Overwrite and remove a secret file. Copies that a journaling or copying file system kept are beyond reach."""
    # Overwritten first, because removing a name leaves the bytes on disk.
    with path.open("r+b") as file:
        file.write(b"0" * path.stat().st_size)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def run_id_of(secret: Secret) -> str:
    """Derive the public name of the run that ``secret`` belongs to: 16 hexadecimal digits."""
    return derive(secret, Purpose.RUN_ID, length=8).reveal().hex()
