"""What importing costs: reporting, appraisal and the command line start without torch, Ray or Opacus."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["opacus", "ray", "torch"]


def _modules(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def _heavy_after(modules, run_python):
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = run_python("-c", code)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("package", ["attestation", "metrics"])
def test_every_module_of_the_package_imports_without_torch_and_ray(package, run_python):
    assert _heavy_after(_modules(package), run_python) == []


@pytest.mark.parametrize("module", ["coordinator.cli", "coordinator.config", "coordinator.doctor", "raycloak"])
def test_it_is_cheap_to_import(module, run_python):
    assert _heavy_after([module], run_python) == []


def test_the_check_sees_a_heavy_import(run_python):
    (run_python.folder / "heavy.py").write_text("import ray\n")
    assert _heavy_after(["heavy"], run_python) == ["ray"]
