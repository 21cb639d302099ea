"""Measures the peak memory of one method beyond model and batch, in a process of its own.

On a CPU it is the growth of resident memory: torch's own statistics would leave out what NumPy and the libraries of
linear algebra take. On CUDA it is what torch's allocator counts. A method runs once beforehand, on a model of its own
that is dropped, so that imports and libraries' workspaces are there already; they are counted for no method.
"""

import ctypes
import gc
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from raycloak.coordinator.bench.gradient_cases import Case
from raycloak.coordinator.bench.gradient_methods import METHODS, Workload, choose_default_kernels
from raycloak.metrics.errors import RunFailedError
from raycloak.workers.gradients.environment import worker_environment
from raycloak.workers.gradients.numerics import pin_numerics

_M_MMAP_THRESHOLD = -3
"""The number of that setting in glibc's malloc.h."""


def peak_extra_bytes(case: Case, method: str, device: torch.device, threads: int) -> int:
    """Measure ``method`` in a new process.

    Raises:
        RunFailedError: ``bench_failed`` if that process dies, as it does if memory runs out.
    """
    # Not forked: memory that this process holds free would hide what the method takes.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measured, case, method, device, threads).result()
        except BrokenProcessPool:
            raise RunFailedError(
                "bench_failed", f"the process that measures the memory of '{method}' died.", "See its output above."
            ) from None


def prepare(device: torch.device, threads: int) -> None:
    """Fix the numerics of this process for the bench: no TF32, ``threads`` threads, torch's default kernels."""
    if device.type == "cuda":
        # As in a worker: cuBLAS reads it when its first product is computed, and is not deterministic without.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = worker_environment("default")["CUBLAS_WORKSPACE_CONFIG"]
    pin_numerics()
    torch.set_num_threads(threads)
    choose_default_kernels()


def _measured(case: Case, method: str, device: torch.device, threads: int) -> int:
    prepare(device, threads)
    # Blocks of 64 KiB and more go back to the system once freed. Left in the heap they would count, or not, by chance.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        METHODS[method](Workload.of(case, device)).run()
        work = Workload.of(case, device)
        gc.collect()
        before = _reset_peak(device)
        METHODS[method](work).run()
    return _peak(device) - before


def _reset_peak(device: torch.device) -> int:
    """Forget the peak so far; return the bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # Memory that the first run freed must go back to the system, or the second would grow into it unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])
