"""The GPUs that a worker computes on: that they are those it was given, and their class.

Tests give its parts what CUDA would say; docs/gpu.md tells what ran on a GPU.
"""

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from raycloak.metrics.errors import ConfigError
from raycloak.workers.device.words import kernel_digest
from raycloak.workers.gradients.environment import WHOLE_PRODUCTS
from raycloak.workers.terms.manifest import GpuClass

# These choose kernels on a GPU, or round in them.
_VARIABLES: Final = (*WHOLE_PRODUCTS, "CUBLAS_WORKSPACE_CONFIG")

_LEAST_SPARED: Final = 2**30
"""Bytes that each GPU has beside its layers of a model over several: so much is left where a model fits at all."""

_CUBLAS: Final = re.compile(r"/libcublas\.so[.\d]*$")
# MAJOR_VERSION, MINOR_VERSION and PATCH_LEVEL of `libraryPropertyType`, in CUDA's library_types.h.
_VERSION: Final = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """One GPU, as CUDA names it to this process."""

    name: str
    uuid: str


def take_gpus(given: float) -> tuple[torch.device, ...]:
    """Take the GPUs that the scheduler gave to this process, and of one that is shared no more memory than its share.

    Args:
        given: number of GPUs, above 0; below 1 it is the share of one.

    Raises:
        ConfigError: ``no_cuda`` if torch sees none, or as :func:`check_visible`.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "no_cuda",
            "this worker was given a GPU, but torch sees none.",
            "Install a CUDA build of torch on the nodes, or set use_gpu: false.",
        )
    check_visible(_visible(), given)
    if given < 1:
        torch.cuda.set_per_process_memory_fraction(given)
    return tuple(torch.device("cuda", index) for index in range(max(1, round(given))))


def check_visible(seen: Sequence[VisibleGpu], given: float) -> None:
    """Require that a process sees the GPUs that it was given, whole and no others.

    Raises:
        ConfigError: ``gpu_visible``, ``gpu_mig``, or ``numerics`` for GPUs of several models.
    """
    wanted = max(1, round(given))
    if len(seen) != wanted:
        raise ConfigError(
            "gpu_visible",
            f"this worker was given {wanted} of its node's GPUs, and CUDA shows it {len(seen)}: it may compute on "
            "another worker's.",
            "Start Ray's nodes without RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, and vaults with one of their "
            "devices each.",
        )
    if parts := [each.name for each in seen if " MIG " in f"{each.name} " or each.uuid.startswith("MIG-")]:
        raise ConfigError(
            "gpu_mig",
            f"this worker was given a part of a GPU, {parts[0]}: Ray counts whole ones, so all workers of its node "
            "would share that part.",
            "Turn MIG off (nvidia-smi -mig 0), and share a GPU by placement.resources_per_worker: {GPU: 0.5}.",
        )
    if len(models := dict.fromkeys(each.name for each in seen)) > 1:
        raise ConfigError(
            "numerics",
            f"this worker was given GPUs of several models, {' and '.join(models)}, whose kernels differ.",
            "Give it GPUs of one model, by placement.accelerator_type or placement.labels.",
        )


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on a GPU, or this process's share of it if that is less; None for the host's."""
    if device.type != "cuda":
        return None
    free, memory = torch.cuda.mem_get_info(device)
    return min(free, int(memory * torch.cuda.get_per_process_memory_fraction(device)))


def spare_bytes(given: float, held: int) -> int:
    """Return half of what a model leaves of a worker's share of a GPU, in bytes; the rest is for sums and words.

    Guarantee: a function of the kind of GPU, the share and the model. What else lies in the GPU's memory does not enter
    it, so two workers on one GPU agree, and so does a resume. Nor does the number of GPUs, which members may differ in:
    a model that one would not hold gets 1 GiB.

    Args:
        given: as :func:`take_gpus`.
        held: bytes of the model.
    """
    memory: int = torch.cuda.get_device_properties(0).total_memory
    least = _LEAST_SPARED if given >= 1 else 1
    return max(least, (int(memory * min(given, 1)) - held) // 2)


def used_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process may compute on, as NVML writes them; none without CUDA in use."""
    cuda: Any = torch.cuda
    return tuple(f"GPU-{each.uuid}" for each in _visible()) if cuda.is_initialized() else ()


def _visible() -> list[VisibleGpu]:
    found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [VisibleGpu(each.name, str(each.uuid)) for each in found]


def gpu_class(device: torch.device) -> GpuClass:
    """Return what chooses the kernels of a CUDA device besides its model; ConfigError ``numerics`` if unknown."""
    properties = torch.cuda.get_device_properties(device)
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    return GpuClass(
        compute_capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        cublas=cublas_version(Path("/proc/self/maps").read_text(encoding="utf-8")),
        cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        triton=triton,
        kernels=kernel_digest(),
        variables=tuple(sorted(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)),
    )


def cublas_version(mapped: str) -> str:
    """Return the version of the cuBLAS that a process has loaded, for example ``12.8.4``.

    Args:
        mapped: the text of ``/proc/self/maps``.

    Raises:
        ConfigError: ``numerics`` if there is not exactly one, or it does not tell.
    """
    paths = {line.split(maxsplit=5)[-1] for line in mapped.splitlines() if _CUBLAS.search(line)}
    if len(paths) != 1:
        raise _unknown_cublas(f"{len(paths)} libraries of that name are loaded")
    library, value = ctypes.CDLL(paths.pop()), ctypes.c_int()
    told = []
    for part in _VERSION:
        if library.cublasGetProperty(part, ctypes.byref(value)) != 0:
            raise _unknown_cublas("the one that is loaded does not tell")
        told.append(str(value.value))
    return ".".join(told)


def _unknown_cublas(why: str) -> ConfigError:
    return ConfigError(
        "numerics",
        f"nobody knows which cuBLAS this process computes with: {why}.",
        "Install a build of torch that loads the package nvidia-cublas, as those of its own index do.",
    )
