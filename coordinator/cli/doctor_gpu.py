"""`raycloak doctor`, of GPUs: finds what keeps a worker of this machine from its GPU, or others' eyes on it.

Without a GPU, torch is not imported. Tests give it readings; docs/gpu.md tells what ran on a GPU.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pynvml

from raycloak.coordinator.cli.doctor import Finding, installed_version
from raycloak.metrics.errors import RaycloakError
from raycloak.metrics.gpu_readings import ConfidentialState, GpuSampler, confidential_state, supported
from raycloak.workers.gradients.environment import FIXED

_MPS_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_FOLDER: Final = "/tmp/nvidia-mps"
"""Where NVIDIA's daemon for shared GPUs listens unless its variable says otherwise."""
_NO_TRITON: Final = "Install raycloak[gpu], or set use_gpu: false."
_UNHIDDEN: Final = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Board:
    """One GPU as NVML reads it; None where its driver does not say.

    Attributes:
        memory_free, memory_total: bytes.
        is_split: whether MIG divides it.
        corrects: whether its memory corrects errors.
    """

    name: str
    memory_free: int | None
    memory_total: int | None
    is_split: bool | None
    corrects: bool | None


@dataclass(frozen=True, slots=True)
class Boards:
    """The GPUs of this machine, its driver, and the mode of confidential computing."""

    driver: str
    confidential: ConfidentialState | None
    boards: tuple[Board, ...]


@dataclass(frozen=True, slots=True)
class TorchView:
    """Torch's own view of the GPUs.

    Attributes:
        version: of torch.
        cuda: version that torch was built with; None for a build without CUDA.
        seen: number of GPUs.
        triton: version of the package; None where it is not installed.
        products, words: what is wrong with the products of the GPUs, and with the words of our kernels; empty if
            nothing is.
    """

    version: str
    cuda: str | None
    seen: int
    triton: str | None
    products: str
    words: str


def examine_gpus() -> list[Finding]:
    """Check the GPUs of this machine; one finding if it has none."""
    with closing(GpuSampler("localhost")) as sampler:
        if (reason := sampler.unavailable_reason()) is not None:
            return [Finding("gpu", "ok", f"none: runs use the CPU ({reason})")]
        found = read_boards(pynvml)
    return check_gpus(found, os.environ, read_torch)


def read_boards(nvml: Any) -> Boards:
    """Read the GPUs; ``nvml`` must be initialised."""
    handles = (
        supported(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(supported(nvml.nvmlDeviceGetCount) or 0)
    )
    # A GPU that has fallen off the bus has no handle.
    boards = tuple(_board(nvml, handle) for handle in handles if handle is not None)
    return Boards(supported(nvml.nvmlSystemGetDriverVersion) or "unknown", confidential_state(nvml), boards)


def _board(nvml: Any, handle: Any) -> Board:
    memory = supported(nvml.nvmlDeviceGetMemoryInfo, handle)
    # Each of the two answers is the mode now, and the one after a restart.
    split, ecc = supported(nvml.nvmlDeviceGetMigMode, handle), supported(nvml.nvmlDeviceGetEccMode, handle)
    return Board(
        name=supported(nvml.nvmlDeviceGetName, handle) or "unknown",
        memory_free=None if memory is None else int(memory.free),
        memory_total=None if memory is None else int(memory.total),
        is_split=None if split is None else bool(split[0]),
        corrects=None if ecc is None else bool(ecc[0]),
    )


def read_torch() -> TorchView:
    """Ask torch, in the environment that a worker has."""
    os.environ.update(FIXED)
    # Here, as it takes seconds, and reads these variables once.
    import torch

    from raycloak.workers.device.words import check_kernels
    from raycloak.workers.gradients.products import check_products

    seen, triton = torch.cuda.device_count() if torch.cuda.is_available() else 0, installed_version("triton")

    def try_all(check: Callable[[torch.device], None]) -> str:
        for index in range(seen):
            try:
                with torch.cuda.device(index):
                    check(torch.device("cuda", index))
            # Drivers, Triton and its compiler have errors of their own, and this is the place to show them.
            except Exception as error:  # noqa: BLE001
                told = error.message if isinstance(error, RaycloakError) else f"{type(error).__name__}: {error}"
                return f"GPU {index}: {told.partition(chr(10))[0]}"
        return ""

    products, words = try_all(check_products), try_all(check_kernels) if triton else ""
    return TorchView(str(torch.__version__), torch.version.cuda, seen, triton, products, words)


def check_gpus(found: Boards, environ: Mapping[str, str], ask: Callable[[], TorchView]) -> list[Finding]:
    """Check what NVML reads, and then what torch makes of it.

    Args:
        ask: asks torch; not called if NVML has no GPU.
    """
    state = found.confidential or "unknown"
    if not found.boards:
        return [Finding("gpu", "ok", f"0 GPUs, driver {found.driver}: runs use the CPU")]
    named = "; ".join(map(_described, found.boards))
    count = len(found.boards)
    listed = f"{count} GPUs, driver {found.driver}, confidential computing {state}: {named}"
    view = ask()
    findings = [
        _seen(listed, count, view),
        *_sharing(found.boards, environ),
        *_memory(found.boards),
    ]
    return findings + _computing(view) if view.seen else findings


def _computing(view: TorchView) -> list[Finding]:
    """Check what the GPUs compute: products by NVIDIA's libraries, and words by our kernels."""
    products = Finding("gpu products", "ok", "those of float32 and float64 have all their bits")
    if view.products:
        remedy = "Unset variables of NVIDIA's libraries on this machine, or see the driver's log."
        products = Finding("gpu products", "fail", view.products, remedy)
    words = Finding("gpu words", "ok", "each kernel gives the words of the CPU")
    if view.triton is None:
        words = Finding("gpu words", "fail", "Triton, which compiles the kernels, is not installed", _NO_TRITON)
    elif view.words:
        remedy = "See docs/gpu.md: Triton needs a C compiler, and wrong words may be errors of the GPU's memory."
        words = Finding("gpu words", "fail", view.words, remedy)
    return [products, words]


def _described(board: Board) -> str:
    if board.memory_free is None or board.memory_total is None:
        return board.name
    return f"{board.name} with {board.memory_free / 2**30:.1f} of {board.memory_total / 2**30:.1f} GiB free"


def _seen(listed: str, count: int, view: TorchView) -> Finding:
    if view.cuda is None:
        finding = f"{listed}; torch {view.version} is built without CUDA and sees none"
        return Finding("gpu", "warn", finding, "Install a CUDA build of torch, or leave use_gpu: false.")
    torch_ = f"torch {view.version} with CUDA {view.cuda}"
    if view.seen < count:
        finding = f"{listed}; {torch_} sees {view.seen}"
        return Finding("gpu", "warn", finding, "Take a build for this driver, and look at CUDA_VISIBLE_DEVICES.")
    return Finding("gpu", "ok", f"{listed}; {torch_} sees them, triton {view.triton or 'is not installed'}")


def _sharing(boards: Sequence[Board], environ: Mapping[str, str]) -> list[Finding]:
    """Check what gives a worker a part of a GPU, or one that is another's too."""
    name, found = "gpu sharing", list[Finding]()
    if split := sum(bool(board.is_split) for board in boards):
        finding = f"MIG divides {split} GPUs: Ray counts whole ones, so a worker that gets one of these is refused"
        found.append(Finding(name, "fail", finding, "nvidia-smi -mig 0, and share GPUs by resources_per_worker."))
    if (Path(environ.get(_MPS_VARIABLE, _MPS_FOLDER)) / "control").exists():
        finding = "MPS is on: processes of several users may compute on one GPU at a time, and a fault ends all of them"
        found.append(Finding(name, "warn", finding, "echo quit | nvidia-cuda-mps-control"))
    if environ.get(_UNHIDDEN) not in (None, "", "0"):
        finding = f"{_UNHIDDEN} is set: a Ray that is started here shows every worker every GPU"
        found.append(Finding(name, "fail" if len(boards) > 1 else "warn", finding, f"unset {_UNHIDDEN}"))
    return found or [Finding(name, "ok", "each worker gets whole GPUs, or a share that Ray counts")]


def _memory(boards: Sequence[Board]) -> list[Finding]:
    if off := sum(board.corrects is False for board in boards):
        finding = f"{off} GPUs do not correct errors of their memory: one changes a gradient, and nobody sees it"
        return [Finding("gpu memory", "warn", finding, "nvidia-smi -e 1, and restart.")]
    return []
