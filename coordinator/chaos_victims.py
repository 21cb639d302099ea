"""Finds the processes of a Ray cluster on this machine, and their roles in a run.

Ray names the process of an actor ``ray::Class`` or ``ray::Class.method``. The kernel's process table says whose child
it is. Only processes below the given raylets are ever returned, never another program's.

An aggregator process may be a spare that takes no part yet. There is at most one, it is the youngest, and it is never
returned: with S ranges the S oldest aggregators are in use.
"""

from collections.abc import Iterable, Mapping

from coordinator.chaos_schedule import Role
from coordinator.process_table import Process

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
    """Return the processes in use, by role, oldest first.

    Args:
        processes: the processes below the raylets.
        aggregators: number of the run's ranges.
    """
    found: dict[Role, list[Process]] = {role: [] for role in CLASSES.values()}
    for each in sorted(processes, key=lambda process: (process.started, process.pid)):
        played = role(each)
        if played is not None and each.state not in ENDING:
            found[played].append(each)
    found["aggregator"] = found["aggregator"][:aggregators]
    return found
