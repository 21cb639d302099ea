"""The cluster of the chaos bench: a head and two nodes as processes of this machine, and the victims among them.

It hides how processes are found and ended. It ends only processes below its own raylets, and leaves nothing behind.

Ray names the process of an actor ``ray::Class`` or ``ray::Class.method``; the kernel's process table says whose child
it is. An actor is a relay, whose one child is its vault; both are victims. An aggregator process may be a spare that
takes no part yet. There is at most one, it is the youngest, and it is never named as a victim: with S ranges the S
oldest aggregators are the ones in use.
"""

import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import raycloak
from raycloak.coordinator.cluster.processes import Process, descendants, process_table
from raycloak_lab.bench.chaos.raylets import Node, Raylet, Raylets
from raycloak_lab.bench.chaos.schedule import Role

NODES = 2


class ChaosCluster:
    """A head for ledger, orchestrator and driver, and `NODES` nodes for workers. A context manager.

    Args:
        cpus: CPUs of each node, so that one node can hold all workers when the other is lost.
    """

    def __init__(self, cpus: int) -> None:
        self._cpus = cpus
        self._stack = ExitStack()
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="raycloak-chaos-"))
            token = Path(folder) / "auth_token"
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32), encoding="utf-8")
            raylets = self._stack.enter_context(Raylets(_environment(token)))
            self._raylets = raylets
            self._nodes = [self._add() for _ in range(NODES)]
        except BaseException:
            self._stack.close()
            raise
        self.environment = raylets.environment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def victims(self, aggregators: int) -> dict[Role, list[Process]]:
        """Return the processes of the present run, by role; see `raycloak_lab.bench.chaos.cluster.victims`."""
        raylets = [raylet.pid for raylet in (self._raylets.head, *self._nodes)]
        return victims(descendants(raylets, process_table()), aggregators)

    def expendable(self, workers: int) -> list[Raylet]:
        """Return the nodes that hold at most ``workers`` workers, and at least one."""
        table = process_table()
        hosted = [sum(role(each) == "worker" for each in descendants([raylet.pid], table)) for raylet in self._nodes]
        return [raylet for raylet, count in zip(self._nodes, hosted, strict=True) if 0 < count <= workers]

    def lose(self, raylet: Raylet) -> None:
        """Kill a node's raylet with SIGKILL. The node's other processes end when they notice, or with the cluster."""
        raylet.kill()
        self._nodes.remove(raylet)

    def replace(self) -> None:
        """Start a node in place of a lost one."""
        self._nodes.append(self._add())

    def _add(self) -> Raylet:
        return self._raylets.add(Node(cpus=self._cpus))


def _environment(token: Path) -> dict[str, str]:
    """Return the variables of the cluster and its drivers: this checkout's code, and a token of the cluster's own."""
    root = Path(raycloak.__file__).absolute().parents[1]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


CLASSES: Mapping[str, Role] = {
    "TrainWorkerActor": "worker",
    "MaskedAggregatorActor": "aggregator",
    "LedgerActor": "ledger",
    "OrchestratorActor": "orchestrator",
}
ENDING = frozenset("TtZX")
"""The states of processes that are stopped or dead."""


def role(process: Process) -> Role | None:
    """Return the role of a process in a run; None if it takes no part."""
    name, _, _ = process.title.removeprefix("ray::").partition(".")
    return CLASSES.get(name) if process.title.startswith("ray::") else None


def victims(processes: Iterable[Process], aggregators: int) -> dict[Role, list[Process]]:
    """Return the processes in use, by role, oldest first, each relay before its vault.

    Args:
        processes: the processes below the raylets.
        aggregators: number of the run's ranges.
    """
    processes, found = list(processes), {role: list[Process]() for role in CLASSES.values()}
    for each in sorted(processes, key=lambda process: (process.started, process.pid)):
        played = role(each)
        if played is not None and each.state not in ENDING:
            found[played].append(each)
    found["aggregator"] = found["aggregator"][:aggregators]
    # What a vault starts is not its relay's child.
    vaults = {each.parent: each for each in processes if each.state not in ENDING}
    return {
        role: [each for relay in relays for each in (relay, vaults.get(relay.pid)) if each is not None]
        for role, relays in found.items()
    }
