"""The sections on kernels, in processes with Triton's interpreter: the CPU's bytes, and wrong ones are found."""

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (the extra gpu)")

WRONG = """
from unittest.mock import patch
import torch
from benchmarks.gpu import kernels, proof
from benchmarks.gpu.golden import random_cases
from benchmarks.gpu.place import Place
from raycloak.workers.device import launches
from raycloak.workers.device.rows import FusedRows

place = Place(torch.device("cpu"))
masked, limits, hashed = launches.masked, launches._limits, launches.leaf_digests
mixed, SEVENTH, ONE = kernels.mixed_words, torch.tensor([7]), torch.tensor([1])

def one_wrong_byte(*given):
    words = masked(*given)
    words.view(torch.uint8)[-1] += 1
    return words

changes = {
    "one wrong byte of masks": (launches, "masked", one_wrong_byte),
    "one wrong byte of digests": (launches, "leaf_digests", lambda *given: [b"0" + h[1:] for h in hashed(*given)]),
    "one wrong word of each mix": (kernels, "mixed_words", lambda *given: mixed(*given).index_add_(0, SEVENTH, ONE)),
    "half of the clamp and the scale": (launches, "_limits", lambda *given: limits(*given) * 0.5),
    "rows are measured too small": (FusedRows, "squares", lambda part: part._left.double().square().sum((1, 2, 3))),
}
kernels.cases = lambda: []
# A block of noise takes the interpreter seconds.
kernels.random_cases = lambda **_: [case for case in random_cases(0, 1, 500) if "noise" not in case.kind]
# The right kernel is proven once in a process, so it is the section that finds what is wrong from here on.
proof.fused_rows(place)
for name, change in changes.items():
    section = proof.fused_rows if "rows" in name else kernels.kernel_bytes
    with patch.object(*change):
        print(*section(place).faults, sep="\\n")
"""
SEEDED = """
import sys
from benchmarks.gpu import kernels
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.golden import Case
from raycloak.workers.device import chacha

right = chacha._quarter_round

def one_bit_too_far(*words):
    a, b, c, d = right(*words)
    return a, (b << 1) | (b >> 31), c, d

chacha._quarter_round = one_bit_too_far
kernels.cases = lambda: []
kernels.random_cases = lambda **_: [Case("masks", 32, 500, masks=2)]
sys.exit(main(["--only", "kernel_bytes", "--budget", "3600", "--output", "report.json"]))
"""


def test_the_kernels_give_the_products_bytes(run_python, tmp_path):
    output = tmp_path / "report.json"
    kinds = ("machine", "kernel_bytes", "fused_rows")
    done = run_python("-m", "benchmarks.gpu", "--only", *kinds, "--budget", "3600", "--output", str(output))
    assert done.code == 0, done.stdout + done.stderr
    report = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == report | {"seconds": json.loads(done.stdout)["seconds"]}
    assert list(report["sections"]) == list(kinds)
    tally = report["sections"]["kernel_bytes"]["figures"]["cases with the product's bytes"]
    assert set(tally) == {"masks", "noise", "encoding", "encoding and noise"}


def test_wrong_words_and_wrong_rows_are_faults(run_python):
    done = run_python("-c", WRONG, environment={"TRITON_INTERPRET": "1"})
    faults = done.stdout.splitlines()
    begins = [fault.partition(" ")[0] for fault in faults]
    assert begins == ["masks", "the", "the", "the", "encoding", "torch.float32:", "torch.bfloat16:"], done.stderr


def test_a_seeded_wrong_kernel_fails_the_check(run_python):
    """Its quarter rounds turn a word by a bit too many."""
    done = run_python("-c", SEEDED, environment={"TRITON_INTERPRET": "1"})
    assert done.code == 1, done.stdout + done.stderr
    assert len(json.loads(done.stdout)["sections"]["kernel_bytes"]["faults"]) == 1
