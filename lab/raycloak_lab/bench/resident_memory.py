"""The growth of this process's resident memory, read from the kernel: what NumPy and libraries take is in it too."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_M_MMAP_THRESHOLD = -3
"""The number of that setting in glibc's malloc.h."""


def return_freed_blocks() -> None:
    """Give blocks of 64 KiB and more back to the system once freed; in the heap they would count, or not, by chance."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def growth(act: Callable[[], object]) -> int:
    """Return by how many bytes resident memory grew at its peak while ``act`` ran."""
    gc.collect()
    # Memory that was freed must go back to the system, or growth into it would not be seen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])
