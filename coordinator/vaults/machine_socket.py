"""The socket of a machine's vaults: who is at its other end, and a seat that a relay takes there."""

import os
import select
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.deadline import awaited

OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
"""The user id that the kernel shows for every user of a user namespace in which it has no name."""


class Seat:
    """A connection to a vault of the machine. The vault ends with it.

    Args:
        path: of the socket.

    Raises:
        OSError: nobody listens there, or this user may not connect.
    """

    pid: None = None

    def __init__(self, path: str) -> None:
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._end.connect(path)
        except OSError:
            self._end.close()
            raise
        self.channel = Channel(self._end)

    def wait(self) -> None:
        """Wait until the other end is gone."""
        awaited(self._end.fileno(), select.POLLRDHUP, None)

    def kill(self) -> None:
        """Close the connection, which ends the vault."""
        with suppress(OSError):  # it has ended
            self._end.shutdown(socket.SHUT_RDWR)


def overflow_uid() -> int:
    """Return the user id that stands for users without a name here."""
    return int(OVERFLOW_UID.read_text(encoding="ascii"))


def user_name(uid: int) -> str:
    """Return a user's name, or its number where it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_user() -> str:
    """Return the name of this process's user."""
    return user_name(os.getuid())
