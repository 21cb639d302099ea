"""Reads the kernel's process table: processes, their parents, sessions, states and processor time."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

PROCESS_TABLE = Path("/proc")


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
