"""The sections of the device check that need no GPU: they run here, and find what they look for."""

import re
from importlib.metadata import distribution

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import engine, proof
from benchmarks.gpu.place import Place
from benchmarks.gpu.step import Shape, step
from raycloak.workers.gradients.parts import GramPart, RowsPart
from tests.layout import ROOT

CPU = Place(torch.device("cpu"))
INSTALLED_THERE = (
    "torch", "triton", "transformers", "peft", "Jinja2", "PyYAML", "absl-py", "attrs", "cloudpickle", "lxml",
    "matplotlib", "msgpack", "nvidia-ml-py", "opt-einsum", "prometheus-client", "pyarrow", "requests", "rich",
    "safetensors", "scikit-learn", "SciPy", "typer", "wrapt",
)  # fmt: skip
"""The packages that docs/gpu.md asks of the machine."""
CARRIED = [
    line
    for line in (ROOT / "benchmarks/gpu/requirements.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


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


TINY = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0},
    "llama-lora": {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "precision", "trained"), [("gpt2", "float32", 4368), ("llama-lora", "bf16", 16 * (16 * 3 + 8))]
)
def test_a_step_of_a_text_model_is_measured_by_phases(model, precision, trained):
    found = step(CPU, Shape(model, precision, 4, 8), {"vocab_size": 50, **TINY[model]}).figures["step"]
    assert found.trained == trained
    phases = found.usage.seconds()
    assert min(seconds for name, seconds in phases.items() if name != "out") > 0
    assert found.step_s == sum(phases.values()) > found.sum_s > 0
    assert found.step_vs_nonprivate == found.plain_s / found.step_s


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


def test_the_machine_needs_no_package_beyond_those_it_has_and_those_it_is_given():
    needed = {
        canonicalize_name(need.name)
        for need in map(Requirement, distribution("raycloak").requires or ())
        if need.marker is None or need.marker.evaluate({"extra": ""})
    }
    assert _with_needs(needed) <= _with_needs(INSTALLED_THERE) | {canonicalize_name(name) for name in CARRIED}
    asked = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert [name for name in INSTALLED_THERE if not re.search(rf"\b{name}\b", asked)] == []
