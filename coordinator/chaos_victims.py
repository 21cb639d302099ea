"""Which processes of a Ray cluster on this machine play which role in a run.

Ray names the process of an actor ``ray::Class`` or ``ray::Class.method``; the kernel's process table says whose child
it is. Only processes below the given raylets are ever named, so nobody else's are.

An aggregator process may be a spare that takes no part yet. There is at most one, it is the youngest, and it is never
named: with S ranges the S oldest aggregators are the ones in use.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.chaos_schedule import Role

CLASSES: Mapping[str, Role] = {
    "TrainWorkerActor": "worker",
    "MaskedAggregatorActor": "aggregator",
    "LedgerActor": "ledger",
    "OrchestratorActor": "orchestrator",
}
ENDING = frozenset("TtZX")
"""States of processes that are stopped or dead."""

PROCESS_TABLE = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """An entry of the process table.

    Attributes:
        state: the kernel's letter for it.
        started: clock ticks since boot; with the pid, it names a process for good.
        title: command line, or what the process calls itself.
    """

    pid: int
    parent: int
    state: str
    started: int
    title: str

    @property
    def role(self) -> Role | None:
        """What it does in a run; None for a process that takes no part."""
        name, _, _ = self.title.removeprefix("ray::").partition(".")
        return CLASSES.get(name) if self.title.startswith("ray::") else None


def process_table(root: Path = PROCESS_TABLE) -> tuple[Process, ...]:
    """Every process that can be seen; those that end meanwhile are left out."""
    return tuple(found for folder in root.iterdir() if folder.name.isdecimal() and (found := _read(folder)))


def _read(folder: Path) -> Process | None:
    try:
        # The name in parentheses may hold spaces and parentheses of its own.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, ValueError):
        return None
    return Process(int(folder.name), int(fields[1]), fields[0], int(fields[19]), title)


def descendants(ancestors: Collection[int], table: Iterable[Process]) -> list[Process]:
    """Every process below ``ancestors``, themselves not included."""
    table = list(table)
    found: list[Process] = []
    parents = set(ancestors)
    while parents:
        children = [each for each in table if each.parent in parents]
        found += children
        parents = {each.pid for each in children}
    return found


def victims(processes: Iterable[Process], aggregators: int) -> dict[Role, list[Process]]:
    """The processes in use, by role, oldest first.

    Args:
        processes: what runs below the raylets.
        aggregators: ranges of the run.
    """
    found: dict[Role, list[Process]] = {role: [] for role in CLASSES.values()}
    for each in sorted(processes, key=lambda process: (process.started, process.pid)):
        if each.role is not None and each.state not in ENDING:
            found[each.role].append(each)
    found["aggregator"] = found["aggregator"][:aggregators]
    return found
