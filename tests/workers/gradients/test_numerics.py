"""Whatever changes last bits changes the numerics class."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from raycloak.workers.gradients.environment import worker_environment
from raycloak.workers.gradients.numerics import current_numerics, pin_numerics, slow_products
from raycloak.workers.terms.manifest import NumericsClass

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import ctypes, hashlib, os, numpy as np, torch
from raycloak.workers.gradients.numerics import current_numerics, pin_numerics
from raycloak.workers.gradients.parts import Products, RowsPart
pin_numerics(threads=int(os.environ["OMP_NUM_THREADS"]))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 16, 8, 2, padding=3), torch.nn.Tanh(), torch.nn.Flatten(),
                          torch.nn.Linear(3136, 32), torch.nn.Tanh())
x = torch.from_numpy(np.random.default_rng(0).random((64, 1, 28, 28), dtype=np.float32))
net(x).square().sum().backward()
bits = b"".join(tensor.grad.numpy().tobytes() for tensor in net.parameters())
torch.manual_seed(1)
part = RowsPart([Products(torch.randn(4, 1, 300, 500), torch.randn(4, 1, 300, 400))], [])
twice = torch.equal(part.rows(), part.rows())
openmp = ctypes.CDLL(None)
print(current_numerics("cpu").digest().hex(), hashlib.sha256(bits).hexdigest(), torch.get_num_threads(), twice,
      openmp.omp_get_dynamic(), openmp.omp_get_thread_limit())
"""


def child(capability: str, threads: int = 1, **inherited: str) -> list[str]:
    """Class digest, digest of some gradients, and thread count of a new process with a worker's environment.

    Then whether rows that are formed twice have the same bits, and OpenMP's own settings of its threads.
    """
    machine = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **inherited}
    environment = {**machine, **worker_environment(capability, threads)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return done.stdout.split()


@cache
def one_of(capability: str) -> list[str]:
    """The answer of one such process, asked once."""
    return child(capability)


def cpu_has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def test_two_processes_with_one_environment_are_in_one_class_and_give_one_gradient() -> None:
    first, second = one_of("avx2"), child("avx2")
    assert first == second
    assert first[2] == "1"


def test_the_threads_of_a_worker_do_not_change_as_it_runs_whatever_its_node_has_set() -> None:
    """Theorem A needs it: a row is measured and added, each time formed anew."""
    inherited = {"OMP_DYNAMIC": "TRUE", "MKL_DYNAMIC": "TRUE", "OMP_THREAD_LIMIT": "1"}
    *_, threads, twice, dynamic, limit = child("avx2", 2, **inherited)
    assert (threads, twice, dynamic) == ("2", "True", "0")
    assert int(limit) >= 2


@pytest.mark.skipif(not cpu_has_avx512(), reason="this CPU has no AVX-512")
def test_another_instruction_set_is_another_class() -> None:
    avx2, avx512 = one_of("avx2"), child("avx512")
    assert avx2[0] != avx512[0]
    assert avx2[1] != avx512[1], "the instruction set is in the class because it changes bits"


def test_a_limit_on_one_library_alone_is_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_numerics()
    classes = set()
    for limit in ("AVX2", "SSE41"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        classes.add(current_numerics("cpu").digest())
    assert len(classes) == 2


def test_pinning_may_be_repeated_and_fixes_what_changes_bits() -> None:
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(False)
    pin_numerics()
    pin_numerics()
    assert torch.get_num_threads() == 1
    assert torch.get_num_interop_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.benchmark


def test_the_class_names_the_machine_and_the_libraries() -> None:
    pin_numerics()
    numerics = current_numerics("cpu")
    assert numerics.device.startswith("cpu:")
    assert len(numerics.device) > len("cpu:")
    assert numerics.torch == torch.__version__
    assert numerics.threads == 1
    assert NumericsClass.model_validate_json(numerics.encode()) == numerics


def test_what_is_allowed_without_a_deterministic_kernel_is_in_the_class() -> None:
    pin_numerics()
    strict = current_numerics("cpu")
    pin_numerics(deterministic=False)
    try:
        loose = current_numerics("cpu")
    finally:
        pin_numerics()
    assert (strict.deterministic, loose.deterministic) == (True, False)
    assert loose.model_copy(update={"deterministic": True}) == strict
    torch.use_deterministic_algorithms(False)
    assert not current_numerics("cpu").deterministic
    pin_numerics()


@pytest.mark.parametrize(
    ("field", "value", "alike"),
    [
        ("device", "cuda:X", True),
        ("deterministic", False, True),
        ("cpu_capability", "ANOTHER", False),
        ("threads", 2, True),
        ("precision", "bf16", True),
        ("gradient_checkpointing", True, True),
        ("engine", "another", True),
        ("torch", "1.0", False),
        ("numpy", "1.0", False),
    ],
)
def test_an_update_rule_needs_the_same_cpu_kernels_but_no_gpu(field: str, value: object, alike: bool) -> None:
    pin_numerics()
    numerics = current_numerics("cpu")
    assert numerics.computes_like(numerics.model_copy(update={field: value})) == alike


def test_the_thread_count_is_in_the_class() -> None:
    pin_numerics()
    single = current_numerics("cpu")
    torch.set_num_threads(2)
    try:
        assert current_numerics("cpu") != single
    finally:
        pin_numerics()


def test_several_threads_are_allowed_and_are_another_class() -> None:
    pin_numerics()
    single = current_numerics("cpu")
    pin_numerics(threads=2)
    try:
        assert current_numerics("cpu") == single.model_copy(update={"threads": 2})
    finally:
        pin_numerics()
    environment = worker_environment("avx2", 2)
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("2", "2")


@pytest.mark.parametrize(
    ("dtype", "device", "capability", "said"),
    [
        (torch.bfloat16, "cpu", "avx2", True),
        (torch.bfloat16, "cpu", "AVX2", True),
        (torch.bfloat16, "cpu", "avx512", False),
        (torch.bfloat16, "cpu", "default", False),
        (torch.bfloat16, "cuda", "avx2", False),
        (torch.float32, "cpu", "avx2", False),
    ],
)
def test_a_reader_is_told_of_weights_without_a_fast_product(dtype, device, capability, said):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    module[0].to(dtype)
    notes = slow_products(module, device, capability)
    assert bool(notes) == said
    assert all("cpu_capability" in note for note in notes)
