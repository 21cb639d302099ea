"""The sections on kernels, in processes with Triton's interpreter: the CPU's bytes, and wrong ones are found."""

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (the extra gpu)")

WRONG = """
from unittest.mock import patch
import torch
from benchmarks.gpu import kernels, proof
from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import FusedRows
from raycloak.workers.device import launches

place = Place(torch.device("cpu"), interpreted=True)
limits = launches._limits
changes = {
    "half of the clamp and the scale": (launches, "_limits", lambda *given: limits(*given) * 0.5),
    "rows are measured too small": (FusedRows, "squares", lambda part: part.left.double().square().sum((1, 2))),
}
kernels.cases = lambda: []
for name, change in changes.items():
    with patch.object(*change):
        # Of 4 random cases and the count of what is not finite; of 2 precisions.
        print(f"{name}: {len(kernels.kernel_bytes(place).faults)} {len(proof.fused_rows(place).faults)}")
"""


def test_the_kernels_give_the_products_bytes(run_python, tmp_path):
    output = tmp_path / "report.json"
    done = run_python("-m", "benchmarks.gpu", "--interpret", "--budget", "3600", "--output", str(output))
    assert done.code == 0, done.stdout + done.stderr
    report = json.loads(output.read_text(encoding="utf-8"))
    assert list(report["sections"]) == ["machine", "kernel_bytes", "fused_rows"]
    tally = report["sections"]["kernel_bytes"]["figures"]["cases with the product's bytes"]
    assert set(tally) == {"masks", "noise", "encoding", "encoding and noise"}


def test_wrong_words_and_wrong_rows_are_faults(run_python):
    done = run_python("-c", WRONG, environment={"TRITON_INTERPRET": "1"})
    assert done.stdout.splitlines() == [
        "half of the clamp and the scale: 2 0",
        "rows are measured too small: 0 2",
    ], done.stderr
