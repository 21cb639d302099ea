"""Processes and the machine that they are on: the kernel's table, and questions that an actor's own process answers.

Ray is imported late, as the chaos bench labels its nodes and reads the table before it needs Ray.
"""

import os
import signal
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

PROCESS_TABLE = Path("/proc")
MACHINE_LABEL: Final = "raycloak.io/machine"
"""The label by which an operator names the machine of a Ray node; it matters to simulated evidence alone."""
if TYPE_CHECKING:
    from raycloak.coordinator.cluster.relays import Relay


@dataclass(frozen=True, slots=True)
class Process:
    """An entry of the process table.

    Attributes:
        session: pid of the process that began its session.
        state: the kernel's letter for its state.
        started: clock ticks since boot. With the pid, it names a process for good.
        title: command line, or the title that the process gave itself.
        processor_s: processor seconds that it and its ended children have used.
    """

    pid: int
    parent: int
    session: int
    state: str
    started: int
    title: str
    processor_s: float

    def is_alive(self) -> bool:
        """Return whether it is running or stopped."""
        now = _read(PROCESS_TABLE / str(self.pid))
        # The id may belong to another process by now. Of Z and X, only the entries are left.
        return now is not None and now.started == self.started and now.state not in "ZX"

    def kill(self) -> None:
        """End it at once, even if it is stopped."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def process_table(root: Path = PROCESS_TABLE) -> tuple[Process, ...]:
    """Return every visible process. Processes that end meanwhile are left out."""
    return tuple(found for folder in root.iterdir() if folder.name.isdecimal() and (found := _read(folder)))


def _read(folder: Path) -> Process | None:
    try:
        # The name in parentheses may itself hold spaces and parentheses.
        fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, ValueError):
        return None
    processor_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return Process(int(folder.name), int(fields[1]), int(fields[3]), fields[0], int(fields[19]), title, processor_s)


def descendants(ancestors: Collection[int], table: Sequence[Process]) -> list[Process]:
    """Return every process below ``ancestors``, which are not included."""
    found: list[Process] = []
    parents = set(ancestors)
    while parents:
        children = [each for each in table if each.parent in parents]
        found += children
        parents = {each.pid for each in children}
    return found


def own_processes(relay: "Relay") -> list[Process]:
    """Return the processes of the relay that is asked: its own, and its vault's if that is a child."""
    found = (_read(PROCESS_TABLE / str(pid)) for pid in (os.getpid(), relay.vault.pid) if pid is not None)
    return [each for each in found if each is not None]


def own_node(_: Any) -> str:
    """Return the id of the node of the actor that is asked."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def cpu_flags(_: Any) -> list[str]:
    """Return the flags of the CPU of the node of the actor that is asked."""
    from raycloak.workers.gradients.environment import own_flags  # late, as above

    return own_flags()


def nvml_missing(_: Any, node: str) -> str | None:
    """Return why the node of the asked actor, called ``node``, has no GPU readings; None if it has NVML."""
    from raycloak.metrics.gpu_readings import GpuSampler  # late: most actors are never asked this

    with closing(GpuSampler(node)) as sampler:
        return sampler.unavailable_reason()
