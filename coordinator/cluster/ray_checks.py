"""A Ray that cannot be joined or started is refused before it is asked: itself it fails late, or waits for minutes.

Hides where a local Ray puts the files and sockets of its processes on this machine. Ray is not imported.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raycloak.metrics.errors import ConfigError

ANSWER_S = 5.0
"""A head that is there answers within milliseconds, also from another continent."""
SOCKET_BYTES = 107
"""Most bytes of a socket's path on Linux."""


def check_ray() -> str | None:
    """Require the Ray of RAY_ADDRESS, or else that a local one can start; return that address."""
    if address := os.environ.get("RAY_ADDRESS"):
        check_address(address)
        return address
    check_temp()
    return None


def temp_folder() -> tuple[Path, str]:
    """Return the folder below which a local Ray keeps its files, and the variable that named it, empty if none did."""
    named = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "")
    return Path(os.environ[named] if named else "/tmp").expanduser(), named


def check_temp() -> None:
    """Require that a local Ray can write its files and open its sockets; ConfigError ``ray_temp``."""
    folder, named = temp_folder()
    own = folder / "ray"
    # Not by name: a container's user often has none.
    remedy = f"Set RAY_TMPDIR to a short path of yours, such as /tmp/ray-{os.geteuid()}."
    # As Ray names them: a session has the time to the microsecond and a process id, of seven digits at most.
    longest = f"{own}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
    room = SOCKET_BYTES - len(os.fsencode(longest))
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


def start_failed(
    error: Exception, remedy: str = "'raycloak doctor' examines it. RAY_TMPDIR names the folder of Ray's files."
) -> ConfigError:
    """Return the refusal of a machine on which Ray does not start."""
    said = str(error).splitlines() or [type(error).__name__]
    return ConfigError("ray_start", f"Ray does not start on this machine: {said[0].removesuffix('.')}.", remedy)


def check_address(address: str, deadline_s: float = ANSWER_S) -> None:
    """Require that a server of gRPC answers at ``address``, as RAY_ADDRESS names it: ``host:port`` or ``ray://...``.

    With TLS between Ray's processes, only that a port is open there. Names that Ray resolves itself pass.

    Raises:
        ConfigError: ``ray_address`` if it has another form, ``ray_unreachable`` if nobody answers in time.
    """
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            "ray_address",
            f"RAY_ADDRESS is '{address}', which is no address of a Ray cluster.",
            "Write host:port, for example 10.0.0.1:6379, or unset it to start a local Ray.",
        )
    began = time.monotonic()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=deadline_s).close()
    except OSError as error:
        raise unreachable(address, error.strerror or "no answer") from None
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    import grpc  # late: a local Ray does not need it

    # A port alone may be another server's, for which Ray would wait just as long.
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(max(deadline_s - (time.monotonic() - began), 0.5))
        except grpc.FutureTimeoutError:
            raise unreachable(address, "a port is open there, but no Ray answers") from None


def unreachable(address: str, why: str) -> ConfigError:
    """Return the refusal of a Ray that does not answer."""
    return ConfigError(
        "ray_unreachable",
        f"RAY_ADDRESS names {address}, and nothing can be started there: {why}.",
        "Start that Ray again, or unset RAY_ADDRESS to start a local one.",
    )


@contextmanager
def variables(given: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process, which others inherit that are started meanwhile; None removes one."""
    before = {name: os.environ.get(name) for name in given}
    _set(given)
    try:
        yield
    finally:
        _set(before)


def _set(given: Mapping[str, str | None]) -> None:
    for name, value in given.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
