"""The device that the check runs on, and its clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """A device: a GPU, or the CPU, where Triton's interpreter computes the kernels, slowly."""

    device: torch.device

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device.type == "cuda"

    @property
    def card(self) -> str:
        """The name of the GPU, or ``none``."""
        if self.on_gpu:
            return torch.cuda.get_device_name(self.device)
        return "none"

    def wait(self) -> None:
        """Wait for all that was started on the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that ``work`` takes on the clock, until the device is done with it."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def median_s(self, work: Callable[[], object], repeats: int) -> float:
        """Return the median seconds of ``work``, after three turns that compile it and warm the caches."""
        for _ in range(3):
            work()
        return statistics.median(self.seconds(work) for _ in range(repeats))
