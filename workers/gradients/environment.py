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

WHOLE_PRODUCTS: Final = {
    # oneDNN would multiply float32 in bfloat16 where the CPU can, whatever torch asks for.
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
    "CUBLAS_EMULATE_SINGLE_PRECISION": "0",
    "CUBLAS_EMULATE_DOUBLE_PRECISION": "0",
    # Has no effect while nothing is emulated. "eager" would emulate every product.
    "CUBLAS_EMULATION_STRATEGY": "performant",
}
"""Keeps libraries from shorter products than a program asks for: past torch, they obey a node's variables. Products of
ten bits, or of digits relative to the widest number of a row, have none of the proofs."""

FIXED: Final = {
    **NO_GPU_CORE_DUMPS,
    **WHOLE_PRODUCTS,
    # Without a fixed workspace cuBLAS is not deterministic, and torch refuses it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # By default CUDA counts the fastest GPU first, so its first may be another than the one that gives evidence.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # Where these are true, MKL and OpenMP take fewer threads for one product than for the next, as the machine is
    # busy. A row that is measured on two threads and added on one has other bits, so nothing would bound it.
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
    # The most that `threads_per_worker` may be. A lower limit of a node cuts threads that the class still states.
    "OMP_THREAD_LIMIT": "1024",
    # Hints choose other kernels on the same CPU.
    "ONEDNN_CPU_ISA_HINTS": "NO_HINTS",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}
"""The variables of every process that computes, whatever the run: it sets them itself and takes no others."""


def worker_environment(cpu_capability: str, threads: int = 1) -> dict[str, str]:
    """Return the environment variables that must be set before a process of the run imports torch.

    They hold every library to one instruction set and one number of threads. A process that starts without them is in
    another numerics class.

    Args:
        cpu_capability: ``avx2``, ``avx512`` or ``default`` (whatever the CPU has).
        threads: of each worker.
    """
    return {
        **FIXED,
        **_KERNEL_CAPS[cpu_capability],
        "MKL_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }


CHOSEN: Final = frozenset(name for capability in _KERNEL_CAPS for name in worker_environment(capability)) - FIXED.keys()
"""The names of the variables of `worker_environment` that a run chooses."""
