"""Measures the peak memory of one method beyond model and batch, in a process of its own.

On a CPU it is the growth of resident memory: torch's own statistics would leave out what NumPy and the libraries of
linear algebra take. On CUDA it is what torch's allocator counts. A method runs once beforehand, on a model of its own
that is dropped, so that imports and libraries' workspaces are there already; they are counted for no method.
"""

import gc
import os
import warnings
from typing import ClassVar, Final

import torch

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.workers.gradients.environment import worker_environment
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak_lab.bench.gradient_cases import BenchCase
from raycloak_lab.bench.gradient_methods import METHODS, BenchWorkload, choose_default_kernels
from raycloak_lab.bench.resident_memory import growth, return_freed_blocks

_DEADLINE_S: Final = 3600.0
"""Bounds one measurement, of which the largest take minutes on a small machine."""


class Measure(Message):
    """A request to measure one method on one case."""

    DOMAIN: ClassVar[str] = "raycloak/bench/measure/v1"
    case: BenchCase
    method: str
    device: str
    threads: int


class Peak(Message):
    """The peak memory beyond model and batch, in bytes."""

    DOMAIN: ClassVar[str] = "raycloak/bench/peak/v1"
    extra_bytes: int


def peak_extra_bytes(case: BenchCase, method: str, device: torch.device, threads: int) -> int:
    """Measure ``method`` in a new process.

    Raises:
        RunFailedError: ``out_of_memory`` or ``child_ended`` if that process dies; ``child_overdue``.
    """
    request = Measure(case=case, method=method, device=str(device), threads=threads)
    with Child("raycloak_lab.bench.gradient_memory:answer") as child:
        return child.call(request, Peak, by=Deadline(_DEADLINE_S)).extra_bytes


def answer(parent: Channel) -> None:
    """Be that process."""
    asked = parent.receive(Measure)
    if asked is not None:
        device = torch.device(asked.device)
        parent.send(Peak(extra_bytes=_measured(asked.case, asked.method, device, asked.threads)))


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
