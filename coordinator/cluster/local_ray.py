"""The folder of a local Ray, looked at before Ray starts: Ray itself fails there late, and with an error of a library.

Hides where Ray puts the files and sockets of its processes on this machine.
"""

import os
from pathlib import Path

from raycloak.metrics.errors import ConfigError

SOCKET_BYTES = 107
"""Most bytes of a socket's path on Linux."""

# As Ray names them: a session has the time to the microsecond and a process id, of seven digits at most.
_SOCKET = "/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def temp_folder() -> tuple[Path, str]:
    """Return the folder below which a local Ray keeps its files, and the variable that named it, empty if none did."""
    named = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "")
    return Path(os.environ[named] if named else "/tmp").expanduser(), named


def check_temp() -> None:
    """Require that a local Ray can write its files and open its sockets; ConfigError ``ray_temp``."""
    folder, named = temp_folder()
    own = folder / "ray"
    remedy = f"Set RAY_TMPDIR to a short path of yours, such as /tmp/{_user()}."
    room = SOCKET_BYTES - len(os.fsencode(f"{own}{_SOCKET}"))
    if room < 0:
        raise ConfigError(
            "ray_temp",
            f"{named or 'Ray'} names {folder}, which is {-room} bytes too long for the paths of Ray's sockets there.",
            remedy,
        )
    nearest = next(each for each in (own, *own.absolute().parents) if os.path.lexists(each))
    if not nearest.is_dir():
        raise ConfigError("ray_temp", f"{nearest} is not a folder, and Ray keeps its files below it.", remedy)
    if not os.access(nearest, os.W_OK | os.X_OK):
        owner = " belongs to another user, and" if nearest.stat().st_uid != os.geteuid() else ""
        raise ConfigError("ray_temp", f"{nearest}{owner} cannot be written to, and Ray keeps its files there.", remedy)


def start_failed(error: Exception) -> ConfigError:
    """Return the refusal of a machine on which Ray does not start."""
    said = str(error).splitlines() or [type(error).__name__]
    return ConfigError(
        "ray_start",
        f"Ray does not start on this machine: {said[0].removesuffix('.')}.",
        "'raycloak doctor' examines it. RAY_TMPDIR names the folder of Ray's files.",
    )


def _user() -> str:
    # Not by name: a container's user often has none.
    return f"ray-{os.geteuid()}"
