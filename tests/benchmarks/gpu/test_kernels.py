"""The candidate kernels in Triton's interpreter, in processes of their own: the product's bytes, and wrong ones found."""

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (pip install triton==3.6.0)")

WRONG = """
import torch
from benchmarks.gpu import kernels, proof, words
from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import FusedRows
place = Place(torch.device("cpu"), interpreted=True)
kernels.cases = lambda: []
{change}
print(len(kernels.kernel_bytes(place, longest=5000).faults), len(proof.fused_rows(place).faults))
"""


def test_the_kernels_give_the_products_bytes(run_python, tmp_path):
    output = tmp_path / "report.json"
    done = run_python("-m", "benchmarks.gpu", "--interpret", "--output", str(output))
    assert done.code == 0, done.stdout + done.stderr
    report = json.loads(output.read_text(encoding="utf-8"))
    assert list(report["sections"]) == ["machine", "kernel_bytes", "fused_rows"]
    tally = report["sections"]["kernel_bytes"]["figures"]["cases with the product's bytes"]
    assert set(tally) == {"masks", "noise", "encoding", "encoding and noise"}


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ("", (0, 0)),
        (
            "right = words._ring; words._ring = lambda numbers, *rest: right([abs(each) for each in numbers], *rest)",
            (1, 0),
        ),
        ("right = words._limits; words._limits = lambda *given: right(*given) * 0.5", (2, 0)),
        ("right = words.derive; words.derive = lambda key, purpose: right(key, words.Purpose.NOISE_INDEX)", (2, 0)),
        ("words._no_faults = lambda device: torch.full((1,), -3, dtype=torch.int32)", (5, 0)),
        ("FusedRows.squares = lambda self: self.left.double().square().sum((1, 2))", (0, 2)),
    ],
)
def test_wrong_words_or_rows_are_a_fault(run_python, change, faults):
    done = run_python("-c", WRONG.format(change=change), environment={"TRITON_INTERPRET": "1"})
    assert done.stdout.split() == [str(number) for number in faults], done.stderr
