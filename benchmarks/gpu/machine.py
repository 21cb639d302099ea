"""Section on the machine: versions, and the rates that all other figures are shares of."""

import ctypes
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found

PACKAGES = ("torch", "triton", "numpy", "transformers", "peft", "opacus", "ray", "cryptography")


# Of 32-bit integers, a clock and multiprocessor: NVIDIA's table of throughputs for capabilities 8.0 and 9.0.
_INTEGER_OPERATIONS = 64
# ChaCha20's, of a block of 64 bytes: 80 quarter rounds of 12, and 16 sums at the end.
_BLOCK_OPERATIONS = 80 * 12 + 16


@dataclass(frozen=True, slots=True)
class Rates:
    """What the card reaches, in 10^9 bytes a second, 10^12 operations a second, and seconds."""

    copy_gb_s: float
    to_device_pageable_gb_s: float
    to_device_pinned_gb_s: float
    to_host_pageable_gb_s: float
    to_host_pinned_gb_s: float
    float32_tflop_s: float
    float64_tflop_s: float
    bfloat16_tflop_s: float
    launch_s: float
    synchronisation_s: float


def machine(place: Place) -> Found:
    """Read the versions, and measure the rates of a GPU."""
    figures: dict[str, object] = {"python": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}
    figures |= {name: _version(name) for name in PACKAGES}
    if place.on_gpu:
        found = torch.cuda.get_device_properties(place.device)
        figures |= {
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory_bytes": found.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cublas": _cublas(),
            "driver, clocks and modes": _driver(
                "driver_version,clocks.sm,clocks.mem,ecc.mode.current,mig.mode.current"
            ),
            "rates": _rates(place),
        }
    return Found(figures)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _cublas() -> int | None:
    """Return the version of cuBLAS that is loaded, which need not be the one that torch was built with."""
    for name in ("libcublas.so.13", "libcublas.so.12"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        handle, found = ctypes.c_void_p(), ctypes.c_int()
        library.cublasCreate_v2(ctypes.byref(handle))
        library.cublasGetVersion_v2(handle, ctypes.byref(found))
        library.cublasDestroy_v2(handle)
        return found.value
    return None


def keystream_gb_s(place: Place) -> float:
    """Return the most that a GPU can draw of ChaCha20's keystream by arithmetic, 10^9 bytes a second.

    Raises:
        OSError, CalledProcessError, ValueError: nvidia-smi does not tell the highest clock.
    """
    clock = 1e6 * float(_driver("clocks.max.sm"))
    lanes = _INTEGER_OPERATIONS * torch.cuda.get_device_properties(place.device).multi_processor_count
    return 64 * lanes * clock / _BLOCK_OPERATIONS / 1e9


def _driver(fields: str) -> str:
    """Return the driver's fields of the first GPU, separated by commas."""
    done = subprocess.run(
        ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True, encoding="utf-8", timeout=20, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def _rates(place: Place) -> Rates:
    size, side = 2**28, 8192
    on_device, other = (torch.empty(size, dtype=torch.uint8, device=place.device) for _ in range(2))
    pageable = torch.empty(size, dtype=torch.uint8)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    matrix = torch.randn(side, side, device=place.device)
    small = torch.zeros(1, device=place.device)

    def copied(target: torch.Tensor, source: torch.Tensor) -> float:
        return size / place.median_s(lambda: target.copy_(source), 5) / 1e9

    def multiplied(factor: torch.Tensor) -> float:
        return 2 * len(factor) ** 3 / place.median_s(lambda: factor @ factor, 5) / 1e12

    def launched() -> None:
        for _ in range(1000):
            small.add_(1)

    def synchronised() -> None:
        for _ in range(200):
            small.item()

    return Rates(
        copy_gb_s=2 * copied(other, on_device),
        to_device_pageable_gb_s=copied(on_device, pageable),
        to_device_pinned_gb_s=copied(on_device, pinned),
        to_host_pageable_gb_s=copied(pageable, on_device),
        to_host_pinned_gb_s=copied(pinned, on_device),
        float32_tflop_s=multiplied(matrix),
        float64_tflop_s=multiplied(matrix[: side // 2, : side // 2].double()),
        bfloat16_tflop_s=multiplied(matrix.bfloat16()),
        launch_s=place.median_s(launched, 5) / 1000,
        synchronisation_s=place.median_s(synchronised, 5) / 200,
    )
