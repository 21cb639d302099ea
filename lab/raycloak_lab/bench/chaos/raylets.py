"""Raylets: a Ray cluster of several nodes on this machine, for tests and the chaos bench.

A child process owns the cluster, so that this process may be a driver of another one, or of this one. The cluster is
a session of processes that ends as a whole. The child ends it by itself when its parent is gone. Its files are in a
temporary folder of its own.
"""

import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.coordinator.cluster.processes import MACHINE_LABEL, process_table

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
_ANSWER_S = 300.0
"""For a node to start on a busy machine."""


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


class Add(Message):
    """A request to add a node, with the fields of :class:`Node`."""

    DOMAIN: ClassVar[str] = "raycloak/raylets/add/v1"
    cpus: int
    resources: dict[str, float]
    labels: dict[str, str]
    environment: dict[str, str]


class Started(Message):
    """The answer: the node that has started, and the address of the cluster."""

    DOMAIN: ClassVar[str] = "raycloak/raylets/started/v1"
    address: str
    node_id: str
    pid: int


class Drain(Message):
    """A request to announce that a node will be taken away."""

    DOMAIN: ClassVar[str] = "raycloak/raylets/drain/v1"
    node_id: str
    deadline_s: float


class Drained(Message):
    """The answer."""

    DOMAIN: ClassVar[str] = "raycloak/raylets/drained/v1"
    accepted: bool


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
        # Without a grace: it ends the cluster, and then itself.
        self._child = Child(
            "raycloak_lab.bench.chaos.raylets:own_cluster",
            environment={**os.environ, **self.environment, **HEALTH_CHECKS},
            grace_s=None,
        )
        self._stack.callback(self._end)
        head = self._child.receive(Started, by=Deadline(_ANSWER_S))
        self.address = head.address
        self.environment["RAY_ADDRESS"] = self.address
        self.head = Raylet(head.node_id, head.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, node: Node) -> Raylet:
        """Start a node and wait until the cluster knows it.

        It stands for a machine of its own unless its labels name one.
        """
        labels = {MACHINE_LABEL: f"raylet-{next(self._numbers)}", **node.labels}
        asked = Add(cpus=node.cpus, resources=dict(node.resources), labels=labels, environment=dict(node.environment))
        started = self._child.call(asked, Started, by=Deadline(_ANSWER_S))
        return Raylet(started.node_id, started.pid)

    def drain(self, raylet: Raylet, deadline_s: float = 60.0) -> None:
        """Announce that a node will be taken away, as a preemption does."""
        asked = Drain(node_id=raylet.node_id, deadline_s=deadline_s)
        assert self._child.call(asked, Drained, by=Deadline(_ANSWER_S)).accepted, "Ray accepts every preemption's drain"

    def _end(self) -> None:
        end_session(self._child.pid)
        self._child.destroy()
        self._child.channel.close()


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


def own_cluster(parent: Channel) -> None:
    """Run the child: start a head, then add and drain nodes as it is asked until nothing more is."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # not in Ray's stubs
    from ray.cluster_utils import Cluster

    cluster = Cluster()

    def start(**options: Any) -> Started:
        node = cluster.add_node(object_store_memory=STORE_BYTES, **options)
        raylet = node.all_processes["raylet"][0].process
        # The node's workers take a dead raylet that was not waited for to be alive, and would stay.
        threading.Thread(target=raylet.wait, daemon=True).start()
        return Started(address=cluster.address, node_id=node.node_id, pid=raylet.pid)

    def drain(asked: Drain) -> Drained:
        deadline_ms = int(1000 * (time.time() + asked.deadline_s))
        client = GcsClient(address=cluster.address)
        accepted, _ = client.drain_node(asked.node_id, DRAIN_PREEMPTION, "asked for by raycloak", deadline_ms)
        return Drained(accepted=accepted)

    try:
        # Nothing scales this cluster, and no driver of it reads its workers' logs.
        parent.send(start(num_cpus=0, include_dashboard=False, include_log_monitor=False, no_monitor=True))
        while (asked := parent.receive(Add, Drain)) is not None:
            if isinstance(asked, Add):
                options = {"resources": asked.resources, "labels": asked.labels}
                parent.send(start(num_cpus=asked.cpus, env_vars=asked.environment, **options))
            elif isinstance(asked, Drain):
                parent.send(drain(asked))
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
