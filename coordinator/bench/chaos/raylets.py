"""Raylets: a Ray cluster of several nodes on this machine, for tests and the chaos bench.

A child process owns the cluster, so that this process may be a driver of another one, or of this one. The cluster is
a session of processes that ends as a whole. The child ends it by itself when its parent is gone. Its files are in a
temporary folder of its own.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

from raycloak.coordinator.cluster.machine_names import MACHINE_LABEL
from raycloak.coordinator.cluster.process_table import process_table

# They decide how soon a dead node is noticed. Ray's own settings need about 15 s. Shorter periods would take a busy
# node for dead: the run survives that, but its virtual workers move for nothing. The closed connection tells of a dead
# process before any check does.
HEALTH_CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "RAY_health_check_initial_delay_ms": "1000",
        # Three missed checks, a second apart: a dead node is noticed in about 3 s.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
)
"""The environment variables of a head, the same as in ``ray-cluster.yaml``. An existing cluster keeps its own."""

STORE_BYTES = 128 * 2**20
DRAIN_PREEMPTION = 2  # Ray's number for a node that is preempted
END_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node to start.

    Attributes:
        cpus: number of CPUs that Ray counts.
        resources: custom resources.
        labels: node labels.
        environment: variables of its processes, over those of the cluster.
    """

    cpus: int
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Raylet:
    """A started node: its id in Ray, and the process to kill."""

    node_id: str
    pid: int

    def kill(self) -> None:
        """Send SIGKILL, as if the machine had died. The node's other processes follow."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Raylets:
    """A head without CPUs, and the added nodes. A context manager.

    Attributes:
        address: the head's address, for ``ray.init``.
        environment: variables under which a driver joins the cluster.
        head: the node of the drivers. Killing it ends the cluster.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._stack = ExitStack()
        self._numbers = itertools.count()
        folder = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="rn", dir="/tmp", ignore_cleanup_errors=True)
        )
        # Short, because a socket path below it must stay under 108 characters. Ray does not create it.
        (Path(folder) / "ray").mkdir()
        self.environment = {**(environment or {}), "RAY_TMPDIR": folder}
        child = subprocess.Popen(
            [sys.executable, "-m", "raycloak.coordinator.bench.chaos.raylets"],
            env={**os.environ, **self.environment, **HEALTH_CHECKS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        self._child = child
        self._stack.callback(self._end)
        assert child.stdin is not None, "it was asked for"
        assert child.stdout is not None, "it was asked for"
        self._commands: IO[str] = child.stdin
        self._answers: IO[str] = child.stdout
        answer = self._read()
        self.address: str = answer["address"]
        self.environment["RAY_ADDRESS"] = self.address
        self.head = Raylet(answer["node_id"], answer["pid"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, node: Node) -> Raylet:
        """Start a node and wait until the cluster knows it.

        It stands for a machine of its own unless its labels name one.
        """
        labels = {MACHINE_LABEL: f"raylet-{next(self._numbers)}", **node.labels}
        answer = self._ask("add", asdict(replace(node, labels=labels)))
        return Raylet(answer["node_id"], answer["pid"])

    def drain(self, raylet: Raylet, deadline_s: float = 60.0) -> None:
        """Announce that a node will be taken away, as a preemption does."""
        answer = self._ask("drain", {"node_id": raylet.node_id, "deadline_s": deadline_s})
        assert answer["accepted"], "Ray accepts every drain for a preemption"

    def _ask(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._commands.write(json.dumps({"command": command, **arguments}) + "\n")
        self._commands.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise ChildProcessError("the cluster's process ended; its errors are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        end_session(self._child.pid)
        self._child.wait(timeout=END_DEADLINE_S)
        self._answers.close()
        # The child that would read them has ended.
        with suppress(BrokenPipeError):
            self._commands.close()


def end_session(session: int) -> None:
    """Send SIGKILL to every process of a session that this process started.

    Guarantee: on return none of them runs, not even a stopped one. A stopped one would outlive a cluster that ends by
    itself, and delay its end. The session's leader must not have been waited for, so that no other process has its id.

    Raises:
        TimeoutError: some processes are left after `END_DEADLINE_S`.
    """
    deadline = time.monotonic() + END_DEADLINE_S
    while running := [each.pid for each in process_table() if each.session == session and each.state not in "ZX"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {running} of session {session} do not end")
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _serve() -> None:
    """Run the child: start a head, then carry out each line of standard input until there is none."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # not in Ray's stubs
    from ray.cluster_utils import Cluster

    # Ray prints to standard output, where only answers may go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    cluster = Cluster()

    def start(**options: Any) -> dict[str, Any]:
        node = cluster.add_node(object_store_memory=STORE_BYTES, **options)
        raylet = node.all_processes["raylet"][0].process
        # The node's workers take a dead raylet that was not waited for to be alive, and would stay.
        threading.Thread(target=raylet.wait, daemon=True).start()
        return {"node_id": node.node_id, "pid": raylet.pid}

    def drain(node_id: str, deadline_s: float) -> dict[str, Any]:
        deadline_ms = int(1000 * (time.time() + deadline_s))
        client = GcsClient(address=cluster.address)
        accepted, _ = client.drain_node(node_id, DRAIN_PREEMPTION, "asked for by raycloak", deadline_ms)
        return {"accepted": accepted}

    try:
        # Nothing scales this cluster, and no driver of it reads its workers' logs.
        head = start(num_cpus=0, include_dashboard=False, include_log_monitor=False, no_monitor=True)
        print(json.dumps(head | {"address": cluster.address}), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            if asked.pop("command") == "add":
                options = {"resources": asked["resources"], "labels": asked["labels"]}
                answer = start(num_cpus=asked["cpus"], env_vars=asked["environment"], **options)
            else:
                answer = drain(**asked)
            print(json.dumps(answer), file=answers)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    _serve()
