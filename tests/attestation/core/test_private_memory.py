"""A process that holds a secret, looked at by another process of the same user."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raycloak.attestation.core.private_memory import NO_GPU_CORE_DUMPS, keep_memory_private
from raycloak.attestation.files.private import read_private
from raycloak.attestation.keys.run_secret import load_secret
from raycloak.metrics.errors import ConfigError
from raycloak.workers.gradients.environment import worker_environment
from tests.private_memory import memory_is_private, open_memory

ROOT = Path(__file__).resolve().parents[3]

DROPPED = """
import os, sys
from tests.private_memory import open_memory
from raycloak.attestation.core.private_memory import keep_memory_private
os.setgroups([]), os.setgid(65534), os.setuid(65534)
"""
HOLDER = """
open_memory()
if sys.argv[1] == "closed":
    keep_memory_private()
print("ready", flush=True)
sys.stdin.read()
"""
READER = """
for name in ("mem", "environ"):
    try:
        open(f"/proc/{sys.argv[1]}/{name}", "rb").close()
        print("read", name)
    except PermissionError:
        print("refused", name)
"""


def _seen_by_another(memory: str) -> list[str]:
    """Return what a process of user nobody may do with another one of that user."""
    python = [sys.executable, "-c"]
    with subprocess.Popen(
        [*python, DROPPED + HOLDER, memory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout.readline() == "ready\n"
        reader = [*python, DROPPED + READER, str(process.pid)]
        seen = subprocess.run(reader, capture_output=True, text=True, check=True, cwd=ROOT)
        process.stdin.close()
    return seen.stdout.splitlines()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to start two processes of another user")
def test_guarantee_another_process_of_the_same_user_reads_neither_memory_nor_environment() -> None:
    assert _seen_by_another("open") == ["read mem", "read environ"]
    assert _seen_by_another("closed") == ["refused mem", "refused environ"]


def test_a_kernel_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def prctl(self, *_: int) -> int:
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    with pytest.raises(ConfigError, match="memory_exposed"):
        keep_memory_private()


@pytest.mark.parametrize("read", [lambda path: read_private(path, "key"), load_secret])
def test_guarantee_a_private_file_is_read_into_closed_memory_alone(read, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("ab" * 32)
    open_memory()
    read(path)
    assert memory_is_private()


def test_a_worker_has_its_gpu_write_no_core_dump() -> None:
    assert NO_GPU_CORE_DUMPS.items() <= worker_environment("avx2").items()
    assert set(NO_GPU_CORE_DUMPS.values()) == {"0"}
