"""The memory that a server's calls may take, compared with what its process may have.

Guarantee: a server whose limits allow more than its memory does not start.
"""

from pathlib import Path
from typing import Final

from raycloak.metrics.errors import ConfigError

SHARE: Final = 2
"""Calls may take a half of the process's memory where the settings say nothing else. The rest is for its work."""
REMEDY: Final = "Lower limits, such as connections; or give the process more memory, or calls more in memory_bytes."
_UNLIMITED: Final = 2**60  # what a control group says that has no limit, and more than any machine has


def require_memory(most_bytes: int, memory_bytes: int | None, remedy: str = REMEDY, root: Path = Path("/")) -> str:
    """Return, for a reader, the memory that calls take at most, and what they have.

    Args:
        most_bytes: that calls may take under the limits, all together.
        memory_bytes: that the settings give them; half of the process's memory if None.
        remedy: what whoever serves can do if that is too little.
        root: folder that stands for ``/``.

    Raises:
        ConfigError: ``memory`` if the limits allow more.
    """
    given = process_memory(root) // SHARE if memory_bytes is None else memory_bytes
    if most_bytes > given:
        raise ConfigError(
            "memory",
            f"by its limits, calls may take {mebibytes(most_bytes)} of memory, and have {mebibytes(given)}.",
            remedy,
        )
    return f"calls take at most {mebibytes(most_bytes)} of {mebibytes(given)}"


def process_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may have: those of the machine, or of the narrowest of its control groups."""
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min(found)


def mebibytes(count: int) -> str:
    """Return a number of bytes for a reader."""
    return f"{count / 2**20:,.0f} MiB"


def _limits(mount: Path, path: str, name: str) -> list[int]:
    """Return the limits of a control group and of those that it is in, as far as they can be seen."""
    inner = mount / path.lstrip("/")
    found = []
    for folder in (inner, *inner.parents):
        if folder.is_relative_to(mount) and (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8").strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                found.append(int(text))
    return found
