"""The listener at a machine's socket: starts a vault for each relay that connects, and ends it with the connection.

It runs as the user of its role, before Ray does, and holds no secret. Each vault is a process of its own, so a new
connection finds no key of a former one.

Guarantee: a vault is started for a process of the peer's user alone, and for at most ``sessions`` at a time. Once a
connection is closed its vault is killed, even if it is stopped. No vault outlives its listener.
"""

import os
import queue
import select
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.processes.program import Program
from raycloak.coordinator.vaults.exchange import VaultEnded
from raycloak.coordinator.vaults.settings import PlatformSettings, VaultSettings, WorkerSettings, uid_of
from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError
from raycloak.metrics.file_errors import file_error

_SEAT_S: Final = 10.0
"""For the vault of a relay that was just ended to be gone, when its successor connects."""
_TELL_S: Final = 5.0
"""For a relay to read the last word: it reads whenever it waits."""
_BACKLOG: Final = 16
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
"""The user id that the kernel shows for every user of a user namespace in which it has no name."""
_AGAIN_S: Final = 0.1
"""After a connection that could not be taken, for want of descriptors or threads: others end meanwhile."""


class Listener:
    """A socket of the machine. A context manager, which listens from its beginning to its end.

    Args:
        role: of its vaults; a key of `raycloak.coordinator.vaults.settings.ROLES`.
        settings: read from ``file``, which every vault reads again.

    Attributes:
        path: of the socket.

    Raises:
        ConfigError: ``vault_socket`` if it cannot listen there, or another one does.
    """

    def __init__(self, role: str, settings: VaultSettings, file: Path) -> None:
        self._role, self._settings, self._file = role, settings, file.resolve()
        served = (settings.peer, *settings.vaults) if isinstance(settings, PlatformSettings) else (settings.peer,)
        self._peers = {uid_of(each) for each in served}
        self._overflow = int(_OVERFLOW_UID.read_text(encoding="ascii"))
        self._closed = threading.Event()
        self._seats: queue.Queue[int] = queue.Queue()
        for seat in range(settings.sessions):
            self._seats.put(seat)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path = path = Path(settings.socket)
        try:
            # Of a listener that was killed. Where one still listens, it keeps its socket.
            if path.is_socket() and not _listens(path):
                path.unlink()
            self._socket.bind(settings.socket)
            self._socket.listen(_BACKLOG)
            # Who may connect is decided by the peer's user, not by the file's mode.
            path.chmod(0o666)
        except OSError as error:
            self._socket.close()
            raise file_error("vault_socket", "listen at", path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> None:
        """Take connections until :meth:`close`."""
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._closed.wait(_AGAIN_S)
                continue
            try:
                threading.Thread(target=self._seat, args=(connection,), daemon=True).start()
            except RuntimeError:
                connection.close()
                self._closed.wait(_AGAIN_S)

    def close(self) -> None:
        """Take no more connections, and remove the socket."""
        self._closed.set()
        # While it still listens: a successor that finds nobody at the socket puts its own there.
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _seat(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            self._require_peer(channel.peer.uid)
            try:
                seat = self._seats.get(timeout=_SEAT_S)
            except queue.Empty:
                raise ProtocolError(
                    "vault_busy", f"{self._settings.sessions} vaults of the {self._role} run here."
                ) from None
            try:
                last = self._host(connection, seat)
            finally:
                self._seats.put(seat)
        except (RefusedError, ProtocolError, ConfigError) as error:
            last = VaultEnded(refusal=Failed.of(error).encode())
        with suppress(OSError):  # it has gone
            channel.send(last, by=Deadline(_TELL_S))
        channel.close()

    def _require_peer(self, uid: int) -> None:
        if uid == self._overflow:
            raise RefusedError(
                "vault_peer",
                "the relay's user has no name here: it is in another user namespace.",
                "Run Ray and its vaults in one user namespace.",
            )
        if uid not in self._peers:
            raise RefusedError(
                "vault_peer",
                f"user {uid} asks for a vault of user {os.getuid()}, which serves {self._settings.peer} alone.",
                f"Run Ray as {self._settings.peer}, or name its user in the vault's settings.",
            )

    def _host(self, connection: socket.socket, seat: int) -> VaultEnded:
        """Run a vault until it has ended or its relay has gone; return the last word to that."""
        # The kernel also kills it with this thread: its listener may be killed, and then sees no end of the relay.
        command = [sys.executable, "-m", "raycloak.attestation.processes.inside", "0.0"]
        command += ["raycloak.coordinator.vaults.hosted:serve_machine", self._role, str(self._file)]
        # Modules are those that are installed, whatever the folder holds.
        devices = self._settings.devices if isinstance(self._settings, WorkerSettings) else ()
        device = str(devices[seat]) if devices else ""
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": device}
        try:
            program = Program(command, environment=environment, folder=Path("/"), stdin=connection.fileno())
        except OSError as error:
            raise ConfigError("vault_start", f"no vault can be started: {error.strerror}.", "Free memory.") from None
        with program:
            poll = select.poll()
            poll.register(program.fileno(), select.POLLIN)
            poll.register(connection.fileno(), select.POLLRDHUP)
            ended = {descriptor for descriptor, _ in poll.poll()}
            exited = program.wait() if program.fileno() in ended else program.destroy()
            return VaultEnded(out_of_memory=exited.out_of_memory)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as tried:
        try:
            tried.connect(str(path))
        except BlockingIOError:
            return True  # it has no room for one more connection
        except OSError:
            return False
        return True
