"""A worker lets only a code out of a failure, and nothing that could hold an example."""

import mmap
import os
import pickle
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

from raycloak.coordinator.vaults.worker_vault import WorkerVault
from raycloak.metrics.errors import ConfigError, ProtocolError, RaycloakError, RunFailedError
from raycloak.workers.answer_codes import answer_code, gpu_failed, guarded

PRIVATE = "patient 4711"


class OutOfMemoryError(RuntimeError):
    """An error named as torch names its own."""


@guarded
def work(outcome):
    """Talk, as Python and as native code do, then return or raise ``outcome``."""
    print(PRIVATE)
    print(PRIVATE, file=sys.stderr)
    for descriptor in (1, 2):
        os.write(descriptor, PRIVATE.encode())
    if isinstance(outcome, BaseException):
        try:
            raise LookupError(PRIVATE)
        except LookupError as cause:
            raise outcome from cause
    return outcome


def failure(error: BaseException) -> RaycloakError:
    with pytest.raises(RaycloakError) as caught:
        work(error)
    return caught.value


def test_guarantee_a_vault_whose_gpu_failed_ends_after_its_answer():
    vault = WorkerVault.__new__(WorkerVault)
    try:
        for error, is_over in (
            (torch.OutOfMemoryError("CUDA out of memory"), False),
            (RuntimeError("CUDA error"), False),
            (torch.AcceleratorError(f"CUDA error: device-side assert, block {PRIVATE}"), True),
        ):
            assert PRIVATE not in str(failure(error))
            assert vault.is_over() is is_over
    finally:
        gpu_failed.clear()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(PRIVATE), "worker_error"),
        (AssertionError(PRIVATE), "worker_error"),
        (SystemExit(PRIVATE), "worker_error"),
        (GeneratorExit(PRIVATE), "worker_error"),
        (MemoryError(PRIVATE), "out_of_memory"),
        (OutOfMemoryError(PRIVATE), "out_of_memory"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_no_text_cause_or_frame_of_a_foreign_error_leaves(error, code):
    left = failure(error)
    assert (type(left), left.code) == (RunFailedError, code)
    assert left.__cause__ is None
    assert left.__context__ is None
    told = "".join(traceback.format_exception(left)) + repr(left) + repr(pickle.loads(pickle.dumps(left)))
    assert PRIVATE not in told
    assert "LookupError" not in told
    frames = [frame.name for frame in traceback.extract_tb(left.__traceback__)]
    assert frames == ["failure", "call"]


def test_our_own_errors_pass_as_they_are_without_what_caused_them():
    left = failure(ProtocolError("step_fenced", "the step is over", "Ask again."))
    assert (type(left), left.code, left.message, left.remedy) == (
        ProtocolError, "step_fenced", "the step is over", "Ask again.",
    )  # fmt: skip
    assert left.__cause__ is None
    assert left.__context__ is None
    assert PRIVATE not in "".join(traceback.format_exception(left))
    assert [frame.name for frame in traceback.extract_tb(left.__traceback__)] == ["failure", "call"]


BEYOND = 2**60
"""Bytes that no machine has, so that every allocator fails at once."""
ALLOCATORS = {
    "python": lambda: bytearray(BEYOND),
    "numpy": lambda: np.empty(BEYOND, np.uint8),
    "torch": lambda: torch.empty(BEYOND, dtype=torch.uint8),
    "kernel": lambda: mmap.mmap(-1, BEYOND),
}


@pytest.mark.parametrize("name", ALLOCATORS)
def test_memory_that_cannot_be_had_has_a_code_of_its_own_whoever_asked_for_it(name):
    with pytest.raises((MemoryError, RuntimeError, OSError)) as real:
        ALLOCATORS[name]()
    left = failure(real.value)
    assert left.code == "out_of_memory"
    assert "micro_batch_size" in left.remedy
    assert "virtual_workers" in left.remedy


def test_what_user_code_prints_goes_nowhere(capfd):
    work("done")
    failure(ValueError(PRIVATE))
    assert "".join(capfd.readouterr()) == ""
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_the_operators_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        work(KeyboardInterrupt())


def test_a_result_comes_through_and_the_method_keeps_its_name():
    assert work([1, 2]) == [1, 2]
    assert work.__name__ == "work"


def test_no_descriptor_stays_open():
    before = {each.name for each in Path("/proc/self/fd").iterdir()}
    for _ in range(20):
        work(None)
        failure(ValueError())
    # Fewer, if a garbage collection meanwhile closed what an earlier test had left.
    assert {each.name for each in Path("/proc/self/fd").iterdir()} <= before


def test_a_code_stands_for_every_error():
    assert answer_code(ConfigError("config", "no")) == "config"
    assert answer_code(MemoryError()) == "out_of_memory"
    assert answer_code(KeyError(PRIVATE)) == "worker_error"
