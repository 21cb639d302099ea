"""Reads and sets what the kernel knows of a process's memory, for tests of `attestation/core/private_memory.py`."""

import ctypes
import resource

_GET_DUMPABLE, _SET_DUMPABLE = 3, 4


def open_memory() -> None:
    """Let other processes of this user read this one's memory, as those of a new program may."""
    assert ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0) == 0


def memory_is_private(_: object = None) -> bool:
    """Return whether this process's memory is closed, and no core file is written; also for ``__ray_call__``."""
    return ctypes.CDLL(None).prctl(_GET_DUMPABLE, 0, 0, 0, 0) == 0 and resource.getrlimit(resource.RLIMIT_CORE)[1] == 0
