"""The clock of a step: seconds by phase on the device that works, and the most memory of a GPU that the step took.

Both are of fixed shapes and a fixed number of rows, and still measured on a machine that computes on examples: metrics
declare them physical.
"""

import time
from collections import deque
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import Field

StepPhase = Literal["copy", "model", "sums", "words", "masks", "out"]

_KEPT: Final = 256
"""Marks whose time is not read yet. A GPU is done with the oldest by then, so nobody waits for it, and memory does not
grow with the rows of a step."""


@dataclass(frozen=True, slots=True)
class StepUsage:
    """A worker's time for one answer, by phase, and its memory on a GPU.

    Attributes:
        copy_seconds: for parameters and examples, from their arrival until they are on the device, checks included.
        model_seconds: for forward and backward passes.
        sums_seconds: for norms and weighted sums of gradients.
        words_seconds: for encoding, noise and the tag.
        masks_seconds: for masks.
        out_seconds: for the way to the host, and for tags and signature of what leaves.
        gpu_memory_peak_bytes: the most that tensors took of one GPU; None on a CPU.
    """

    copy_seconds: float = 0.0
    model_seconds: float = 0.0
    sums_seconds: float = 0.0
    words_seconds: float = 0.0
    masks_seconds: float = 0.0
    out_seconds: float = 0.0
    gpu_memory_peak_bytes: Annotated[int, Field(ge=0, lt=2**53)] | None = None

    def seconds(self) -> dict[str, float]:
        """Return the seconds by name of the phase, in the order of a step."""
        return {
            field.name.removesuffix("_seconds"): getattr(self, field.name)
            for field in fields(self)
            if field.name.endswith("_seconds")
        }


class StepClock:
    """Adds up a step's time by phase; it is always in one of them.

    A GPU writes down the time of each mark as it gets there, so nothing waits for a measurement before :meth:`stop`.

    Args:
        devices: that work, at least one. Times are those of the first, where each pass begins and ends.
    """

    def __init__(self, *devices: torch.device) -> None:
        self._devices, self._is_gpu = devices, devices[0].type == "cuda"
        self._marks: deque[tuple[StepPhase, Any]] = deque()
        self._seconds: dict[StepPhase, float] = {}

    def start(self) -> None:
        """Forget what was measured, and begin with ``copy``."""
        self._marks.clear()
        self._seconds.clear()
        if self._is_gpu:
            for device in self._devices:
                torch.cuda.reset_peak_memory_stats(device)
        self.begin("copy")

    def begin(self, phase: StepPhase) -> None:
        """Count the time from now on for ``phase``."""
        self._marks.append((phase, self._now()))
        if len(self._marks) > _KEPT:
            self._add_oldest()

    def stop(self) -> StepUsage:
        """Return what was measured since :meth:`start`; waits until the device is done."""
        self.begin("out")
        while len(self._marks) > 1:
            self._add_oldest()
        peak = max(map(torch.cuda.max_memory_allocated, self._devices)) if self._is_gpu else None
        return StepUsage(
            **{f"{phase}_seconds": seconds for phase, seconds in self._seconds.items()}, gpu_memory_peak_bytes=peak
        )

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._devices[0]))
        return event

    def _add_oldest(self) -> None:
        phase, began = self._marks.popleft()
        ended = self._marks[0][1]
        if self._is_gpu:
            ended.synchronize()
            # In milliseconds.
            seconds = began.elapsed_time(ended) / 1e3
        else:
            seconds = ended - began
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
