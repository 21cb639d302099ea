"""An actor's own process: answers questions asked by ``__ray_call__``."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """An actor's process. ``started`` is its start in kernel ticks, so that a reused id is another process."""

    pid: int
    started: str

    @classmethod
    def find(cls, pid: int) -> "ActorProcess | None":
        """Return the process with that id, if it is running or stopped."""
        try:
            # Its name, in parentheses, is any bytes.
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        state, *fields = stat.rpartition(")")[2].split()
        # Z and X have ended; only their entries are left.
        return None if state in "ZX" else cls(pid, fields[18])

    def is_alive(self) -> bool:
        """Return whether it is running or stopped."""
        # The id may belong to another process by now.
        return ActorProcess.find(self.pid) == self

    def kill(self) -> None:
        """End it at once, even if it is stopped."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def own_process(_: Any) -> ActorProcess | None:
    """Return the process of the actor that is asked."""
    return ActorProcess.find(os.getpid())


def nvml_missing(_: Any, node: str) -> str | None:
    """Return why the node of the asked actor, called ``node``, has no GPU readings; None if it has NVML."""
    from raycloak.metrics.gpu_readings import GpuSampler  # late: most actors are never asked this

    sampler = GpuSampler(node)
    try:
        return sampler.unavailable_reason()
    finally:
        sampler.close()


def own_node(_: Any) -> str:
    """Return the id of the node of the actor that is asked."""
    return str(ray.get_runtime_context().get_node_id())
