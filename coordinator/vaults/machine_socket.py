"""A relay's seat at the socket of a machine's vaults."""

import select
import socket
from contextlib import suppress

from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.deadline import awaited


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
