"""A machine with the users of a boundary: Ray's, and one of each role, whose vaults listen before Ray is started.

It takes root. Where checkout or interpreter lie in a folder that other users cannot enter, the programs see another
one in its place, in a mount namespace of their own.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from raycloak_lab.bench.chaos.raylets import end_session
from tests.attestation.serving import eventually
from tests.conftest import ROOT

RAY = 61_000
USERS = {"ledger": 61_001, "orchestrator": 61_002, "aggregator": 61_003, "worker": 61_004, "platform": 61_005}
"""Ids that no user of a machine has: the kernel needs no more of a user."""
DEADLINE_S = 300


_SHOWN = """
set -e
blocked=$1; shift
mkdir "$HOLD"
i=0; for each in "$@"; do i=$((i+1)); mkdir "$HOLD/$i"; mount --bind "$each" "$HOLD/$i"; done
mount -t tmpfs -o mode=755 none "$blocked"
i=0; for each in "$@"; do i=$((i+1)); mkdir -p "$each"; mount --bind "$HOLD/$i" "$each"; done
echo ready
exec sleep infinity
"""
"""Shows other users some folders below one that they may not enter, and nothing else of it."""


def missing() -> str | None:
    """Return why this machine cannot have users of a boundary; None if it can."""
    if os.getuid() != 0:
        return "needs root, to be several users"
    if any(shutil.which(each) is None for each in ("nsenter", "setpriv", "unshare")):
        return "needs nsenter, setpriv and unshare (apt-get install util-linux)"
    tried = {
        "mount namespaces": ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /tmp"],
        "to give up capabilities": [*_become(RAY), "true"],
    }
    for what, command in tried.items():
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return f"needs {what}"
    return None


def _become(user: int) -> list[str]:
    """Return the beginning of a command of another user, without any capability and none to be had."""
    bare = ["--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    return ["setpriv", f"--reuid={user}", f"--regid={user}", *bare]


def _blocked(path: Path) -> Path | None:
    """Return the highest folder above a path that other users may not enter."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & stat.S_IXOTH), None)


class Machine:
    """The machine's users, folders and listeners.

    Args:
        folder: that every user may enter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "sockets" / "{role}.sock")
        self.stack = ExitStack()
        self._enter = self._shown()
        (folder / "sockets").mkdir()
        (folder / "sockets").chmod(0o1777)
        for name, uid in {**USERS, "ray": RAY}.items():
            (folder / name).mkdir(mode=0o700)
            os.chown(folder / name, uid, uid)

    def run(self, user: int, *command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run ``python *command`` as a user."""
        return subprocess.run(
            self._as(user, command, variables), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    def start(self, user: int, *command: str, log: Path, **variables: str) -> "subprocess.Popen[bytes]":
        """Start ``python *command`` as a user; it is killed at the end."""
        output = self.stack.enter_context(log.open("w"))
        program = subprocess.Popen(
            self._as(user, command, variables), stdout=output, stderr=output, start_new_session=True
        )
        self.stack.callback(program.wait)
        self.stack.callback(end_session, program.pid)
        return program

    def listen(self, role: str, **settings: Any) -> dict[str, Any]:
        """Start the vaults of a role, and wait until they listen; return what they say."""
        path = self.folder / f"{role}.yaml"
        socket = Path(self.socket.replace("{role}", role))
        path.write_text(yaml.safe_dump({"socket": str(socket), "peer": str(RAY), **settings}))
        path.chmod(0o644)
        log = self.folder / f"{role}.log"
        program = self.start(USERS[role], "-m", "raycloak", "vault", role, str(path), "--json", log=log)
        eventually(lambda: log.read_text().endswith("}\n") or program.poll() is not None)
        assert program.poll() is None, log.read_text()
        return json.loads(log.read_text())

    def own(self, path: Path, role: str, mode: int = 0o600) -> Path:
        """Give a file to the user of a role."""
        os.chown(path, USERS[role], USERS[role])
        path.chmod(mode)
        return path

    def _as(self, user: int, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        home = self.folder / next((name for name, uid in USERS.items() if uid == user), "ray")
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": str(home),
            "RAYCLOAK_HOME": str(home / "raycloak"),
            **variables,
        }
        told = [f"{name}={value}" for name, value in environment.items()]
        become = _become(user) if user else []
        return [*self._enter, *become, "env", "-i", "-C", str(home), *told, sys.executable, *command]

    def _shown(self) -> list[str]:
        """Return the command before one that other users can run, with what checkout and interpreter need."""
        needed = [Path(each).resolve() for each in (ROOT, sys.prefix, sys.base_prefix)]
        hidden = {blocked: [each for each in needed if _blocked(each) == blocked] for blocked in map(_blocked, needed)}
        hidden.pop(None, None)
        if not hidden:
            return []
        ((blocked, shown),) = hidden.items()
        command = ["unshare", "--mount", "sh", "-c", _SHOWN, "sh", str(blocked), *map(str, shown)]
        holder = subprocess.Popen(
            command, env={**os.environ, "HOLD": str(self.folder / "shown")}, stdout=subprocess.PIPE, text=True
        )
        self.stack.callback(holder.wait)
        self.stack.callback(holder.kill)
        assert holder.stdout is not None
        with holder.stdout as said:
            assert said.readline() == "ready\n", "the namespace cannot be made"
        return ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"]


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Yield a machine whose listeners end with the block."""
    made = Machine(folder)
    with made.stack:
        yield made


def result(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Return the JSON of a command that must have ended well."""
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
