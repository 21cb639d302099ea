"""A process's memory, kept from every other process of its user and out of files.

Hides how the kernel is told so. Each process that holds a key, an example or a prompt says it once, as it starts: what
a parent said holds for its children only in part.
"""

import ctypes
import os
import resource

from raycloak.metrics.errors import ConfigError

_SET_DUMPABLE = 4
"""``PR_SET_DUMPABLE``, in the kernel's ``prctl.h``."""

NO_GPU_CORE_DUMPS = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0",
    "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION": "0",
    "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "0",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "0",
}
"""Keeps NVIDIA's driver from writing a GPU's memory, with every example in it, to a file: no limit of the kernel's
applies to that. The driver reads it once, so a process starts with it."""


def keep_memory_private() -> None:
    """Close this process's memory to every other process of its user, and have no core file written.

    Guarantee: afterwards the kernel refuses ``ptrace``, ``/proc/PID/mem`` and ``/proc/PID/environ`` to processes of the
    same user, and writes no core file. Root can still read everything. A child that executes another program has to
    call this again. If ``kernel.core_pattern`` names a program, that program is told the limit and has to respect it.

    Raises:
        ConfigError: ``memory_exposed`` if the kernel does not take the setting.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise ConfigError(
            "memory_exposed",
            f"the kernel does not close this process's memory to others: {os.strerror(ctypes.get_errno())}.",
            "Run on Linux, where a seccomp filter, if there is one, allows prctl(PR_SET_DUMPABLE).",
        )
