"""Kernels of `workers/device`, compiled for GPUs that are not here: none needs memory for what registers hold."""

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (the extra gpu)")

REGISTERS = {
    "mask": 112, "encode": 64, "draw": 255, "settle": 80, "leaf": 96, "zero": 64, "rows *fp32 True False": 144,
    "rows *fp32 False True": 208, "rows *bf16 True False": 144, "rows *bf16 False True": 160,
}  # fmt: skip
"""A little above what each took with Triton 3.7.1; of rows, by type of the sides, alignment, and whether a table is
tied. 255 is the most that a thread has."""
STACK = {"rows *fp32 True False": 8}
"""Bytes: for half of a GPU's registers the assembler gives up one number."""
TARGETS = ("80", "90", "100")


def test_kernels_compile_for_three_generations_and_spill_nothing(run_python):
    done = run_python("-m", "tests.workers.device.compiled", *TARGETS)
    assert done.code == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(each["target"], each["kernel"]) for each in found} == {(int(t), k) for t in TARGETS for k in REGISTERS}
    assert sum(each["wide"] for each in found) == 4
    assert [
        each
        for each in found
        if each["stack"] > STACK.get(each["kernel"], 0) or each["registers"] > REGISTERS[each["kernel"]]
    ] == []
