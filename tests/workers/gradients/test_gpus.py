"""A worker computes on the GPU that it was given, and the class says what chooses kernels there."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raycloak.metrics.errors import ConfigError
from raycloak.workers.device.words import kernel_digest
from raycloak.workers.gradients import gpus
from raycloak.workers.gradients.environment import worker_environment
from raycloak.workers.gradients.gpus import (
    VisibleGpu,
    check_visible,
    cublas_version,
    free_bytes,
    spare_bytes,
    take_gpus,
    used_gpus,
)
from raycloak.workers.gradients.numerics import current_numerics, pin_numerics
from raycloak.workers.terms.manifest import NumericsClass

H100 = VisibleGpu("NVIDIA H100 80GB HBM3", "5e09d8b2-0000-0000-0000-000000000000")
PART = VisibleGpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "5e09d8b2-0000-0000-0000-000000000001")
MEMORY = 80 * 2**30
LIBRARY = "int cublasGetProperty(int part, int *value) { *value = 10 * (part + 1); return %d; }"


class Cuda:
    """A machine's GPUs, as torch shows them."""

    def __init__(self, *seen: VisibleGpu) -> None:
        self.seen, self.share, self.began = seen, 1.0, True

    def put(self, monkeypatch: pytest.MonkeyPatch) -> "Cuda":
        for name in (
            "is_available",
            "is_initialized",
            "device_count",
            "get_device_properties",
            "set_per_process_memory_fraction",
            "mem_get_info",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        return self

    def is_available(self) -> bool:
        return bool(self.seen)

    def is_initialized(self) -> bool:
        return self.began

    def device_count(self) -> int:
        return len(self.seen)

    def get_device_properties(self, device: Any) -> SimpleNamespace:
        found = self.seen[0 if isinstance(device, torch.device) else device]
        return SimpleNamespace(
            name=found.name, uuid=found.uuid, major=9, minor=0, multi_processor_count=132, total_memory=MEMORY
        )

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        raise AssertionError("what is free depends on who else is there")

    def set_per_process_memory_fraction(self, share: float) -> None:
        self.share = share


@pytest.mark.parametrize(
    ("seen", "given", "code"),
    [
        ((H100,), 1.0, None),
        ((H100,), 0.25, None),
        ((H100, H100), 2.0, None),
        # Ray was told to hide none, so every worker would take the first.
        ((H100, H100), 1.0, "gpu_visible"),
        ((H100, H100), 0.5, "gpu_visible"),
        ((H100,), 2.0, "gpu_visible"),
        ((PART,), 1.0, "gpu_mig"),
        ((PART,), 0.5, "gpu_mig"),
        ((VisibleGpu("NVIDIA H100", "MIG-5e09"),), 1.0, "gpu_mig"),
        ((), 1.0, "no_cuda"),
    ],
)
def test_a_worker_sees_the_gpu_that_it_was_given_whole_and_no_other(
    monkeypatch: pytest.MonkeyPatch, seen: tuple[VisibleGpu, ...], given: float, code: str | None
) -> None:
    cuda = Cuda(*seen).put(monkeypatch)
    if code is None:
        take_gpus(given)
        assert cuda.share == min(given, 1.0), "of a shared GPU's memory it takes its share"
        return
    with pytest.raises(ConfigError) as refused:
        take_gpus(given)
    assert (refused.value.code, bool(refused.value.remedy)) == (code, True)
    assert cuda.share == 1.0


def test_guarantee_workers_on_one_gpu_spare_the_same_memory_whatever_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(H100).put(monkeypatch)
    assert spare_bytes(0.5, 16 * 2**30) == spare_bytes(0.5, 16 * 2**30) == 12 * 2**30
    assert spare_bytes(1.0, 16 * 2**30) == 32 * 2**30
    # Further GPUs hold other parts of a model.
    assert spare_bytes(2.0, 0) == spare_bytes(1.0, 0)
    # A model that does not fit is found by its checks.
    assert spare_bytes(0.1, 16 * 2**30) == 1
    # Over several, each has its sums and words beside its layers.
    assert spare_bytes(1.0, 100 * 2**30) == spare_bytes(4.0, 100 * 2**30) == 2**30


def test_a_worker_on_a_share_of_a_gpu_has_no_more_free_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 2**30, MEMORY))
    for share, free in ((1.0, 70), (0.5, 40)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, share=share: share)
        assert free_bytes(torch.device("cuda", 0)) == free * 2**30
    assert free_bytes(torch.device("cpu")) is None


def test_the_variable_that_shows_a_worker_every_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        check_visible([H100, H100], 1.0)


def test_gpus_are_named_as_nvml_names_them_once_they_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(H100).put(monkeypatch)
    assert used_gpus() == (f"GPU-{H100.uuid}",)
    cuda.began = False
    assert used_gpus() == ()


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (apt-get install gcc)")


def built(folder: Path, status: int = 0) -> Path:
    """Return a library that says its version, 10.20.30, or fails to."""
    source, made = folder / "cublas.c", folder / f"libcublas.so.{status}"
    source.write_text(LIBRARY % status, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True, timeout=60)
    return made


def mapped(*libraries: Path) -> str:
    """Return a process's map in which each library has two ranges, beside others."""
    ranges = [f"7f00-7f01 r-xp 00000000 08:01 12 {each}" for each in libraries for _ in range(2)]
    return "\n".join([*ranges, "7f02-7f03 rw-p 00000000 00:00 0", "7f04-7f05 r--p 0 08:01 1 /usr/libcublasLt.so.12"])


@needs_compiler
def test_the_cublas_that_is_loaded_says_which_it_is(tmp_path: Path) -> None:
    assert cublas_version(mapped(built(tmp_path))) == "10.20.30"


@needs_compiler
def test_a_class_whose_cublas_nobody_knows_is_refused(tmp_path: Path) -> None:
    for text in (mapped(), mapped(built(tmp_path), tmp_path / "libcublas.so.13"), mapped(built(tmp_path, 1))):
        with pytest.raises(ConfigError, match="numerics: nobody knows which cuBLAS"):
            cublas_version(text)


def class_of(monkeypatch: pytest.MonkeyPatch, seen: VisibleGpu = H100, cublas: str = "12.8.4") -> NumericsClass:
    Cuda(seen).put(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(gpus, "cublas_version", lambda mapped: cublas)
    return current_numerics("cuda")


def test_a_gpus_class_has_what_chooses_its_kernels_and_not_the_cpus_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_numerics()
    for name, value in worker_environment("avx2").items():
        monkeypatch.setenv(name, value)
    found = class_of(monkeypatch)
    assert (found.device, found.engine) == (f"cuda:{H100.name}", "book-keeping/fused/1")
    assert found.gpu is not None
    assert (found.gpu.compute_capability, found.gpu.multiprocessors) == ("9.0", 132)
    assert (found.gpu.cublas, found.gpu.cudnn) == ("12.8.4", 91002)
    assert {"NVIDIA_TF32_OVERRIDE=0", "CUBLAS_EMULATE_DOUBLE_PRECISION=0"} <= set(found.gpu.variables)
    assert NumericsClass.model_validate_json(found.encode()) == found
    assert class_of(monkeypatch, cublas="12.9.0") != found
    assert found.gpu.kernels == kernel_digest()
    with monkeypatch.context() as changed:
        changed.setattr(gpus, "kernel_digest", lambda: bytes(32))
        assert class_of(changed) != found
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert class_of(monkeypatch) != found


def test_a_cpus_class_keeps_its_bytes_whatever_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_numerics()
    before = current_numerics("cpu").encode()
    assert b"gpu" not in before
    for name in set(worker_environment("avx2")) - set(os.environ):
        if name.startswith(("NVIDIA", "CUBLAS_E", "CUDA", "TORCH_")):
            monkeypatch.setenv(name, "0")
    assert current_numerics("cpu").encode() == before
