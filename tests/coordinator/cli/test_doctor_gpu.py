"""The doctor sees what keeps a worker from its GPU; it is given what NVML and torch would say."""

import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
import torch

from raycloak.coordinator.cli import doctor_gpu
from raycloak.coordinator.cli.doctor_gpu import (
    Board,
    Boards,
    TorchView,
    check_gpus,
    examine_gpus,
    read_boards,
    read_torch,
)
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.device import words
from raycloak.workers.gradients import products
from raycloak.workers.gradients.environment import FIXED

GIB = 2**30
H100 = Board("NVIDIA H100", 79 * GIB, 80 * GIB, False, True)
TWO = Boards("570.124", "on", (H100, H100))
VIEW = TorchView("2.13.0", "12.8", 2, "3.6.0", "", "")


def found(boards=TWO, view=VIEW, environ=None, folder="/nonexistent"):
    checks = check_gpus(boards, {"CUDA_MPS_PIPE_DIRECTORY": str(folder), **(environ or {})}, lambda: view)
    assert all(check.remedy for check in checks if check.status != "ok")
    return {check.name: check for check in checks}


def test_a_machine_whose_gpus_are_well_is_told_of_each():
    checks = found()
    assert {check.status for check in checks.values()} == {"ok"}
    assert "2 GPUs, driver 570.124, confidential computing on" in checks["gpu"].finding
    assert "NVIDIA H100 with 79.0 of 80.0 GiB free" in checks["gpu"].finding
    assert "CUDA 12.8 sees them, triton 3.6.0" in checks["gpu"].finding


@pytest.mark.parametrize(
    ("view", "says"),
    [
        (TorchView("2.13.0+cpu", None, 0, None, "", ""), "built without CUDA"),
        (TorchView("2.13.0", "12.8", 1, None, "", ""), "with CUDA 12.8 sees 1"),
        (TorchView("2.13.0", "12.8", 0, None, "", ""), "with CUDA 12.8 sees 0"),
    ],
)
def test_gpus_that_torch_does_not_see_are_a_warning(view, says):
    checks = found(view=view)
    assert checks["gpu"].status == "warn"
    assert says in checks["gpu"].finding


def test_parts_of_gpus_neighbours_and_flipped_bits_are_named(tmp_path):
    split, bare = Board("A", None, None, True, None), Board("B", GIB, GIB, None, False)
    assert found(Boards("570", None, (split, H100)))["gpu sharing"].status == "fail"
    assert found(Boards("570", None, (bare, bare)))["gpu memory"].status == "warn"
    (tmp_path / "control").touch()
    assert found(folder=tmp_path)["gpu sharing"].status == "warn"
    unhidden = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert found(environ=unhidden)["gpu sharing"].status == "fail"
    assert found(Boards("570", None, (H100,)), environ=unhidden)["gpu sharing"].status == "warn"


def test_products_without_all_their_bits_fail():
    check = found(view=replace(VIEW, products="float32 products lack bits"))["gpu products"]
    assert (check.status, check.finding) == ("fail", "float32 products lack bits")


def test_kernels_that_are_wrong_do_not_compile_or_cannot_be_compiled_fail():
    check = found(view=replace(VIEW, words="GPU 1: RuntimeError: Failed to find C compiler."))["gpu words"]
    assert (check.status, check.finding) == ("fail", "GPU 1: RuntimeError: Failed to find C compiler.")
    assert "C compiler" in check.remedy
    check = found(view=replace(VIEW, triton=None))["gpu words"]
    assert (check.status, check.remedy) == ("fail", "Install raycloak[gpu], or set use_gpu: false.")
    assert "gpu words" not in found(view=replace(VIEW, seen=0, triton=None)), "there is no GPU to compute on"


def test_what_fails_on_a_gpu_is_told_with_its_number(monkeypatch):
    """Two GPUs, of which the second computes other words, and no product at all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(doctor_gpu, "installed_version", lambda name: "3.7.1")

    def fail_on_second(error):
        def check(device):
            if device.index == 1:
                raise error

        return check

    unequal = ProtocolError("not_reproducible", "this worker's GPU computes other words than its CPU")
    monkeypatch.setattr(words, "check_kernels", fail_on_second(unequal))
    monkeypatch.setattr(products, "check_products", fail_on_second(RuntimeError("CUDA error: unknown\nmore")))
    view = read_torch()
    assert view.words == "GPU 1: this worker's GPU computes other words than its CPU"
    assert view.products == "GPU 1: RuntimeError: CUDA error: unknown"


def test_without_a_gpu_torch_is_not_asked():
    (check,) = check_gpus(Boards("570", None, ()), {}, lambda: pytest.fail("asked"))
    assert check.status == "ok"


class Nvml:
    """A driver of two GPUs, of which one has fallen off the bus and the other says little."""

    def nvmlDeviceGetCount(self):  # noqa: N802 - the binding's name
        return 2

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "570.124"

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetName(self, _):  # noqa: N802
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, _):  # noqa: N802
        return SimpleNamespace(free=79 * GIB, total=80 * GIB)

    def nvmlDeviceGetMigMode(self, _):  # noqa: N802
        return [1, 0]

    def refuse(self, *_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    nvmlDeviceGetEccMode = refuse  # noqa: N815
    nvmlSystemGetConfComputeSettings = refuse  # noqa: N815
    nvmlSystemGetConfComputeState = refuse  # noqa: N815


def test_the_driver_is_read_as_far_as_it_answers():
    assert read_boards(Nvml()) == Boards(
        "570.124", None, (Board("NVIDIA H100", 79 * GIB, 80 * GIB, is_split=True, corrects=None),)
    )


def test_torch_is_asked_in_the_environment_of_a_worker(monkeypatch):
    for name in FIXED:
        monkeypatch.setenv(name, "1")
    view = read_torch()
    assert {name: os.environ[name] for name in FIXED} == FIXED
    assert view.version


def test_this_machine_is_examined():
    assert examine_gpus()[0].name == "gpu"
