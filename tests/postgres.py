"""A real PostgreSQL server for tests: the system's binaries, a cluster and a UNIX socket of its own."""

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.memory_folder import memory_folder

_START_DEADLINE_S = 300.0


def binaries() -> Path | None:
    """Return the folder of ``initdb`` and ``postgres``, which Debian keeps out of PATH; None if not installed."""
    found = shutil.which("postgres")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name))[::-1]
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class PostgresServer:
    """One server; every URL it gives is a schema of its own, as good as an empty database.

    Args:
        folder: where initdb and postgres are.
        settings: server settings; the cluster is durable unless they say otherwise.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._binaries, self._settings = folder, dict(settings or {})
        self._numbers = itertools.count()
        # Short, because of the socket in it, and reachable for the user that the server runs as.
        self._folder = Path(tempfile.mkdtemp(prefix="rcpg", dir=memory_folder()))
        self._user = _unprivileged()
        if "user" in self._user:
            os.chown(self._folder, self._user["user"], self._user["group"])
        command = ("initdb", "--pgdata", "data", "--username", "raycloak", "--auth", "trust", "--encoding", "UTF8")
        self._run(*command, "--locale", "C", "--no-sync")
        self.start()

    def start(self) -> None:
        """Start, and wait until a connection is accepted; recovers first after `kill`."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._folder),
            "shared_buffers": "16MB",
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", "data", *options], stdout=log, stderr=log, **self._environment()
            )
        self._await_connection()

    def kill(self) -> None:
        """SIGKILL the server and all its processes at once, as a crash of the machine would; they are gone then."""
        self._process.send_signal(signal.SIGSTOP)  # so that it starts no further process meanwhile
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for process in (self._process.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait(_START_DEADLINE_S)
        # No new server starts beside the shared memory that the last of them still holds.
        deadline = time.monotonic() + _START_DEADLINE_S
        while any(_is_running(child) for child in children):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def stop(self) -> None:
        """End the server without its last checkpoint, and remove the cluster."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(_START_DEADLINE_S)
        shutil.rmtree(self._folder)

    def url(self, user: str = "raycloak") -> str:
        """Return the URL of a schema that is empty."""
        name = f"schema_{next(self._numbers)}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"postgresql://{user}@/postgres?host={self._folder}&options=-csearch_path%3D{name}"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, in a transaction of its own."""
        import psycopg

        with psycopg.connect(dbname="postgres", user="raycloak", host=str(self._folder), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def reload(self, name: str, value: str) -> None:
        """Change a setting while the server runs, and wait until new and old connections have it."""
        deadline = time.monotonic() + _START_DEADLINE_S
        self.execute(f"ALTER SYSTEM SET {name} = {value}")
        self.execute("SELECT pg_reload_conf()")
        while self.execute(f"SHOW {name}") != [(value,)]:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _await_connection(self) -> None:
        import psycopg

        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            try:
                self.execute("SELECT 1")
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def _run(self, name: str, *arguments: str) -> None:
        command = [self._binaries / name, *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=_START_DEADLINE_S, **self._environment())

    def _environment(self) -> dict[str, Any]:
        return {"cwd": self._folder, "env": {"PATH": os.environ["PATH"], "LC_ALL": "C"}, **self._user}


def _is_running(process: str) -> bool:
    """Return whether a process of this id runs; one that ended counts as ended even before anybody has waited for
    it."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _unprivileged() -> dict[str, Any]:
    """Return arguments of Popen that give up root, as which PostgreSQL refuses to run."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
