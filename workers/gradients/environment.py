"""The environment of a process that computes gradients. Imports no torch: it is set before a process does."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from raycloak.attestation.core.private_memory import NO_GPU_CORE_DUMPS
from raycloak.metrics.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Set:
    """An instruction set: its names in ATen, oneDNN and MKL, and the flags by which Linux names it."""

    aten: str
    onednn: str
    mkl: str
    flags: frozenset[str]

    @property
    def caps(self) -> dict[str, str]:
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }


_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_AMX = _BF16 | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
# From the narrowest to the widest. ATen and MKL have no own products of bfloat16, so they stay at avx512.
_SETS = {
    "avx2": _Set("avx2", "AVX2", "AVX2", _AVX2),
    "avx512": _Set("avx512", "AVX512_CORE", "AVX512", _AVX512),
    "avx512_bf16": _Set("avx512", "AVX512_CORE_BF16", "AVX512", _BF16),
    "amx": _Set("avx512", "AVX512_CORE_AMX", "AVX512", _AMX),
}
_KERNEL_CAPS = {**{name: each.caps for name, each in _SETS.items()}, "default": {}}

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
        cpu_capability: ``avx2``, ``avx512``, ``avx512_bf16``, ``amx``, or ``default`` (whatever the CPU has).
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


@cache
def own_cpu() -> Mapping[str, str]:
    """Return the fields of ``/proc/cpuinfo`` for this machine's first CPU; none where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # Of several CPUs, the first one's lines stay.
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


def own_flags() -> list[str]:
    """Return the flags by which Linux names the instructions of this machine's first CPU, sorted; none on others."""
    return sorted(own_cpu().get("flags", "").split())


def widest_shared(flags: Iterable[Collection[str]]) -> str:
    """Return the widest named instruction set that every CPU has; ``default`` if they share none.

    Args:
        flags: of each CPU, as :func:`own_flags`; of at least one.
    """
    shared = frozenset.intersection(*map(frozenset, flags))
    return next((name for name, each in reversed(_SETS.items()) if each.flags <= shared), "default")


def stated_capability(cpu_capability: str) -> str:
    """Return the instruction set that a numerics class was held to, by the ``cpu_capability`` that it states."""
    words = cpu_capability.split()
    return next((name for name, each in _SETS.items() if f"ONEDNN_MAX_CPU_ISA={each.onednn}" in words), "default")


def require_instructions(environment: Mapping[str, str], flags: Collection[str]) -> None:
    """Require the instructions that a process is held to, before it loads kernels that would end it without a word.

    Args:
        environment: of the process; without the variables of an instruction set, nothing is required.
        flags: of its CPU, as :func:`own_flags`.

    Raises:
        ConfigError: ``cpu_capability``, with the set and one flag that the CPU lacks.
    """
    for name, each in _SETS.items():
        held = each.caps.items() <= environment.items()
        if held and (missing := sorted(each.flags.difference(flags))):
            raise ConfigError(
                "cpu_capability",
                f"the run is held to the instruction set {name}, and the CPU of this machine has no {missing[0]}.",
                "Keep the run to machines like those that it began on, or begin another one with such a machine.",
            )
