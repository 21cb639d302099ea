"""The device of a bench, and what a call asks of a GPU, by torch's profiler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from raycloak.metrics.errors import ConfigError

_LAUNCHES: Final = frozenset({"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"})
_OWN_WAIT: Final = "cudaDeviceSynchronize"
"""The profiler and its caller wait so for the end of the call; what is measured waits for a stream or an event."""
_LONGEST: Final = 12


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The work of one call on a GPU.

    Attributes:
        launches: of kernels. synchronisations: times that the host waited for the device.
        busy_seconds: of all kernels, copies and fills, one after another.
        longest: those that take most, with seconds and how often each ran.
    """

    launches: int
    synchronisations: int
    busy_seconds: float
    longest: tuple[tuple[str, float, int], ...]

    @classmethod
    def of(cls, events: Iterable[Any]) -> Self:
        """Return the use that these averages of a profile show."""
        events = list(events)
        # An operation's own row has the time of its kernels once more.
        on_device = [each for each in events if each.device_type.name == "CUDA" and not each.is_user_annotation]
        longest = sorted(on_device, key=lambda each: -each.self_device_time_total)[:_LONGEST]
        return cls(
            launches=sum(each.count for each in events if each.key in _LAUNCHES),
            synchronisations=sum(each.count for each in events if "Synchronize" in each.key and each.key != _OWN_WAIT),
            # In microseconds.
            busy_seconds=sum(each.self_device_time_total for each in on_device) / 1e6,
            longest=tuple((each.key[:60], each.self_device_time_total / 1e6, each.count) for each in longest),
        )


def gpu_use(work: Callable[[], object], device: torch.device) -> GpuUse | None:
    """Return what one call of ``work`` asks of ``device``; None on a CPU. The profiler makes it slower."""
    if device.type == "cpu":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize(device)
    return GpuUse.of(profile.key_averages())


def bench_device(name: str) -> torch.device:
    """Return the device of that name; ConfigError ``bench_input`` or ``no_cuda`` if a bench cannot run on it."""
    if name not in ("cpu", "cuda"):
        raise ConfigError("bench_input", f"'{name}' is no device of the bench.", "Name cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no_cuda", "torch finds no CUDA device here.", "Measure on the CPU, or install its driver.")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Return the model of a GPU; ``cpu`` of a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
