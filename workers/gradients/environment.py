"""The environment of a process that computes gradients. Imports no torch: it is set before a process does."""

from typing import Final

from raycloak.attestation.core.private_memory import NO_GPU_CORE_DUMPS

# The names of oneDNN and MKL for the instruction sets that ATen calls avx2 and avx512.
_KERNEL_CAPS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "default": {},
}


def worker_environment(cpu_capability: str, threads: int = 1) -> dict[str, str]:
    """Return the environment variables that must be set before a process of the run imports torch.

    They hold every library to one instruction set and one number of threads. A process that starts without them is in
    another numerics class.

    Args:
        cpu_capability: ``avx2``, ``avx512`` or ``default`` (whatever the CPU has).
        threads: of each worker.
    """
    return {
        **_KERNEL_CAPS[cpu_capability],
        # Without a fixed workspace cuBLAS is not deterministic, and torch refuses it.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Where these are true, MKL and OpenMP take fewer threads for one product than for the next, as the machine is
        # busy. A row that is measured on two threads and added on one has other bits, so nothing would bound it.
        "MKL_DYNAMIC": "FALSE",
        "OMP_DYNAMIC": "FALSE",
        # The most that `threads_per_worker` may be. A lower limit of a node cuts threads that the class still states.
        "OMP_THREAD_LIMIT": "1024",
        "MKL_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_DETERMINISTIC": "1",
        **NO_GPU_CORE_DUMPS,
    }


NUMERICS: Final = frozenset(
    name for capability in _KERNEL_CAPS for name in worker_environment(capability) if name not in NO_GPU_CORE_DUMPS
)
"""The names of all variables of `worker_environment` that decide the bits of a computation."""
