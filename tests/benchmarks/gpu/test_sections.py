"""The sections of the device check that need no GPU: they run here, and find what they look for."""

import json
from importlib.metadata import distribution, packages_distributions

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import engine, proof
from benchmarks.gpu.large_step import Shape, large_step
from benchmarks.gpu.place import Place
from raycloak.workers.gradients.parts import GramPart, RowsPart
from tests.layout import ROOT

CPU = Place(torch.device("cpu"))
INSTALLED_THERE = ("torch", "transformers", "peft", "PyYAML", "cloudpickle", "scipy")
"""The packages that CONTRIBUTING.md asks of the machine, without triton, which these sections do without."""
CARRIED = [
    line
    for line in (ROOT / "benchmarks/gpu/requirements.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
BARE = """
import runpy, sys
sys.modules.update(dict.fromkeys({absent!r}))
import benchmarks.gpu.hazards, benchmarks.gpu.large_step
import raycloak_lab.bench.gradient
from raycloak.coordinator.accounting.opacus_modules import opacus_module
for name in ("grad_sample", "optimizers", "utils.fast_gradient_clipping_utils"):
    opacus_module("opacus." + name)
sys.argv[1:] = ["--device", "cpu", "--only", "machine", "repeats mlp", "--budget", "3600", "--output", {output!r}]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def test_rows_keep_the_bound_of_the_proof():
    assert not proof.proof_property(CPU).faults


@pytest.mark.parametrize(("part", "factor", "name"), [(GramPart, 0.99, "gram"), (RowsPart, 1 - 1e-5, "rows")])
def test_a_part_that_measures_too_little_is_a_fault(monkeypatch, part, factor, name):
    measured = part.squares
    monkeypatch.setattr(part, "squares", lambda self: measured(self) * factor)
    assert any(fault.startswith(name) for fault in proof.proof_property(CPU).faults)


def test_layers_that_are_computed_again_give_the_same_bytes():
    assert not engine.checkpointing(CPU).faults


def test_another_process_with_other_bytes_is_a_fault(monkeypatch):
    monkeypatch.setattr(engine, "_elsewhere", lambda model, place: "0" * 64)
    assert engine.repeats(CPU, engine.Model("cnn")).faults == ["other_process: the sum has other bytes"]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_step_of_a_text_model_is_measured(precision):
    tiny = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    step = large_step(CPU, Shape(precision, 4, 8), {**tiny, "bos_token_id": 0, "eos_token_id": 0}).figures["step"]
    assert min(step.first_s, step.second_s, step.load_s, step.encode_s, step.plain_s) > 0


def test_the_wheels_that_the_machine_gets_have_a_version():
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert set(CARRIED) <= {line.split("==")[0] for line in pinned}


def _with_needs(names):
    """Return these packages and all that they need, by canonical name."""
    found, waiting = set(), [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            needs = [Requirement(each) for each in distribution(name).requires or ()]
            waiting += [
                canonicalize_name(each.name)
                for each in needs
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


def test_the_check_runs_on_a_machine_that_has_no_other_packages(run_python, tmp_path):
    """What raycloak depends on and the machine lacks is hidden from the process."""
    there = _with_needs((*INSTALLED_THERE, *CARRIED))
    lacking = {
        canonicalize_name(need.name)
        for need in map(Requirement, distribution("raycloak").requires or ())
        if need.marker is None or need.marker.evaluate({"extra": ""})
    } - there
    absent = sorted(
        module for module, names in packages_distributions().items() if {canonicalize_name(n) for n in names} <= lacking
    )
    assert {"ray", "sqlalchemy", "grpc"} <= set(absent)
    output = tmp_path / "report.json"
    done = run_python("-c", BARE.format(absent=absent, output=str(output)))
    assert done.code == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(output.read_text(encoding="utf-8")) | {"seconds": report["seconds"]}
    assert list(report["sections"]) == ["machine", "repeats mlp float32"]
    assert (report["card"], report["passed"]) == ("none: CPU", True)
