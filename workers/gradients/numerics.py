"""The numerics class: all that the last bits of a gradient depend on besides code and data.

The last bits of a result differ between AVX2 and AVX-512, between one thread and two, and between library versions. Two
values under one noise leak their difference, so a run admits one class only.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from raycloak.metrics.errors import ConfigError
from raycloak.metrics.proof_bounds import require_assertions
from raycloak.workers.gradients.environment import own_cpu
from raycloak.workers.gradients.gpus import gpu_class
from raycloak.workers.gradients.settings import held_settings, pin_settings
from raycloak.workers.terms.manifest import NumericsClass

_C: Any = torch._C

# Each of these chooses kernels, so processes that differ in one of them are of different classes.
_DISPATCH_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG")


ENGINE = "book-keeping/4"
"""The way gradients are computed and added up (docs/proofs/006-clipped-gradients.md): changing it changes last bits."""

GPU_ENGINE = "book-keeping/fused/1"
"""The same on a GPU, where a kernel of `workers/device` forms rows and all rows are added in float64."""


def slow_products(module: nn.Module, device: str, cpu_capability: str) -> tuple[str, ...]:
    """Return a sentence for the reader if the kernels that a run is held to have no fast product with its weights.

    Measured for 160 tokens and a matrix of 8192 x 2048, on one thread: float32 takes 0.07 s each way; bfloat16 under
    avx2 takes 0.2 s forward and 20 s backward.

    Args:
        cpu_capability: as in `raycloak.workers.gradients.environment.worker_environment`, in any case of letters.
    """
    matrices = (tensor.dtype for tensor in module.parameters() if tensor.ndim > 1)
    if device != "cpu" or cpu_capability.lower() != "avx2" or torch.bfloat16 not in matrices:
        return ()
    return (
        "it has bfloat16 weights, and under cpu_capability avx2 a backward pass through them takes up to 300 times as "
        "long as in float32: take machines whose CPUs multiply bfloat16, with cpu_capability auto, or a GPU.",
    )


def choose_kernels(deterministic: bool) -> None:
    """Choose deterministic kernels from now on; False lets an operation without one run, with a warning by torch.

    This is ``torch.use_deterministic_algorithms`` without its settings for the compiler, whose import takes more than a
    second and which nothing here uses. A model that compiles itself finds them in the environment of a worker.
    """
    torch.set_deterministic_debug_mode("error" if deterministic else "warn")


def pin_numerics(deterministic: bool = True, threads: int = 1) -> None:
    """Fix this process's settings that change bits: threads, deterministic kernels, no TF32, denormals kept.

    May be called any number of times; the last bits of a computation before the first call are not promised. User code
    that is imported afterwards may change them, and no sum is computed under what it left (:func:`exact_sums`).

    Args:
        deterministic: False lets an operation without a deterministic kernel run; the others keep theirs.
        threads: within one operation.

    Raises:
        ConfigError: ``numerics`` if the process already runs inter-op work on several threads, or ``assertions_off``.
    """
    require_assertions()
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:
            raise ConfigError(
                "numerics",
                "torch already computes on several inter-op threads in this process.",
                "Start in a new process.",
            ) from None
    choose_kernels(deterministic)
    pin_settings(threads)


@contextmanager
def exact_sums() -> Iterator[None]:
    """Compute in the types that the proof names: a model may run in others, its gradients are summed in none but these.

    Guarantee: whatever was set before, this block runs under the settings of `workers/gradients/settings.py`.
    Memory is not filled before it is written, as deterministic algorithms else do: nothing here reads it earlier.

    Raises:
        ModelError: ``changed_setting`` if one changed in the meantime.
    """
    with held_settings(), torch.no_grad():
        filled = _C._get_deterministic_fill_uninitialized_memory()
        _C._set_deterministic_fill_uninitialized_memory(False)
        try:
            yield
        finally:
            _C._set_deterministic_fill_uninitialized_memory(filled)


def current_numerics(device: str | torch.device) -> NumericsClass:
    """Return the class that this process computes in on ``device``, as it is set now.

    Raises:
        ConfigError: ``numerics`` if a GPU's libraries do not say which they are.
    """
    place = torch.device(device)
    is_gpu = place.type == "cuda"
    limits = [f"{name}={os.environ[name]}" for name in _DISPATCH_VARIABLES if name in os.environ]
    return NumericsClass(
        # The CPU's model chooses no kernel of a GPU.
        device=f"cuda:{torch.cuda.get_device_properties(place).name}" if is_gpu else f"cpu:{_cpu_model()}",
        gpu=gpu_class(place) if is_gpu else None,
        # ATen's instruction set and the limits of other libraries, for example ``AVX2 ONEDNN_MAX_CPU_ISA=AVX2``.
        cpu_capability=" ".join([torch.backends.cpu.get_cpu_capability(), *limits]),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        numpy=np.__version__,
        engine=GPU_ENGINE if is_gpu else ENGINE,
        python=platform.python_version(),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _cpu_model() -> str:
    """Return vendor, family and model of the first CPU, or the architecture's name where the kernel does not tell."""
    fields = [own_cpu().get(name, "") for name in ("vendor_id", "cpu family", "model")]
    return " ".join(fields) if all(fields) else platform.machine()
