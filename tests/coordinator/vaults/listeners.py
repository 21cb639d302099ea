"""Listeners at sockets of a test's folder, and the processes at both of their ends."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.vaults.exchange import Answered, Called, VaultEnded
from raycloak.coordinator.vaults.listener import Listener
from raycloak.coordinator.vaults.settings import read_settings
from raycloak.metrics.errors import RaycloakError
from tests.attestation.serving import eventually

DEADLINE_S = 120.0
STRANGER = 61_000
"""The id of a user that no machine has: the kernel needs no more of a user."""
ONE_USER = "needs root, to be several users"

needs_root = pytest.mark.skipif(os.getuid() != 0, reason=ONE_USER)


def written(folder: Path, role: str, **settings: Any) -> Path:
    """Write the settings of a role, whose vaults listen in the same folder and serve this user."""
    file = folder / f"{role}.yaml"
    raw = {"socket": str(folder / f"{role}.sock"), "peer": str(os.getuid()), **settings}
    file.write_text(yaml.safe_dump(raw))
    file.chmod(0o644)
    return file


@contextmanager
def listening(folder: Path, role: str, **settings: Any) -> Iterator[Listener]:
    """Listen in this process."""
    file = written(folder, role, **settings)
    with Listener(role, read_settings(role, file), file) as listener:
        running = Thread(target=listener.run)
        running.start()
        yield listener
    running.join(DEADLINE_S)
    assert not running.is_alive()


def platform(folder: Path, **settings: Any) -> Any:
    """Listen for the role whose vaults are started soonest."""
    return listening(folder, "platform", **{"state": str(folder / "vendor"), "vaults": [], **settings})


def vaults(parent: int | None = None) -> set[int]:
    """Return the vaults that run below a process: by default, this one."""
    found = set()
    for children in Path("/proc", str(parent or os.getpid()), "task").glob("*/children"):
        for pid in children.read_text().split():
            try:
                command = Path("/proc", pid, "cmdline").read_bytes()
            except OSError:
                continue
            if b"hosted:serve_machine" in command:
                found.add(int(pid))
    return found


def stop(pid: int) -> None:
    """Stop a process, and wait until the kernel has: until then it still sees the end of its relay."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def connected(path: Path) -> Channel:
    """Return a connection to a socket, by a relay that has said nothing yet."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(str(path))
    return Channel(end)


def connected_as(user: int, path: Path) -> Channel:
    """Return a connection that a process of another user has made."""
    # Its way leads over a descriptor: that user may not enter the folders above.
    path.parent.chmod(0o711)
    folder = os.open(path.parent, os.O_PATH)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            end.connect(f"/proc/self/fd/{folder}/{path.name}")
            socket.send_fds(theirs, [b"."], [end.fileno()])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(folder)
    theirs.close()
    with ours:
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    return Channel(socket.socket(fileno=descriptor))


def refused(channel: Channel) -> RaycloakError:
    """Return why a connection was not taken, or its vault not opened."""
    found = channel.receive(VaultEnded, by=Deadline(DEADLINE_S))
    assert found is not None
    assert found.refusal is not None, "it ended, and nobody says why"
    return parse(Failed, found.refusal).raised()


@contextmanager
def refusing(channel: Channel, kind: type[RaycloakError], code: str) -> Iterator[str]:
    """Require that a connection is refused so; yields the words, and closes it."""
    error = refused(channel)
    assert (type(error), error.code) == (kind, code)
    yield str(error)
    channel.close()


def called(channel: Channel, name: str, *frames: bytes) -> Answered:
    """Call a method of the vault at the other end, and return its answer."""
    channel.send(Called(call=1, name=name, returns=1, beside=False, frames=frames))
    answer = channel.receive(Answered, by=Deadline(DEADLINE_S))
    assert answer is not None
    return answer


def said(channel: Channel, *words: Message) -> Channel:
    """Say the first words of a relay."""
    for word in words:
        channel.send(word)
    return channel


def unshare_missing() -> str | None:
    """Return why this user cannot make a user namespace; None if it can."""
    if shutil.which("unshare") is None:
        return "needs unshare (apt-get install util-linux)"
    done = subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "needs user namespaces"
