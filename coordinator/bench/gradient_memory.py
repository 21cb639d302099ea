"""Measures the peak memory of one method beyond model and batch, in a process of its own.

On a CPU it is the growth of resident memory: torch's own statistics would leave out what NumPy and the libraries of
linear algebra take. On CUDA it is what torch's allocator counts. A method runs once beforehand, on a model of its own
that is dropped, so that imports and libraries' workspaces are there already; they are counted for no method.
"""

import gc
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from raycloak.coordinator.bench.gradient_cases import BenchCase
from raycloak.coordinator.bench.gradient_methods import METHODS, BenchWorkload, choose_default_kernels
from raycloak.coordinator.bench.resident_memory import growth, return_freed_blocks
from raycloak.metrics.errors import RunFailedError
from raycloak.workers.gradients.environment import worker_environment
from raycloak.workers.gradients.numerics import pin_numerics


def peak_extra_bytes(case: BenchCase, method: str, device: torch.device, threads: int) -> int:
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


def _measured(case: BenchCase, method: str, device: torch.device, threads: int) -> int:
    prepare(device, threads)
    return_freed_blocks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        METHODS[method](BenchWorkload.of(case, device)).run()
        work = BenchWorkload.of(case, device)
        if device.type != "cuda":
            return growth(lambda: METHODS[method](work).run())
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        METHODS[method](work).run()
        return torch.cuda.max_memory_allocated(device) - before
