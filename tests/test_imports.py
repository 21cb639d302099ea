"""The cost of importing: reporting, appraisal and the command line start without torch, Ray or Opacus."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["opacus", "ray", "torch"]


def _modules(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    dotted = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return [f"raycloak.{name}".removesuffix(".__init__") for name in dotted]


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


CHEAP = [
    "raycloak",
    "raycloak.coordinator.bench.chaos.chaos",
    "raycloak.coordinator.cli.app",
    "raycloak.coordinator.cli.doctor",
    "raycloak.coordinator.config.run",
    "raycloak.coordinator.proof.gather",
    "raycloak.coordinator.record.folder",
]


def test_these_are_cheap_to_import(run_python):
    """In one process: the first that is not names itself."""
    code = (
        "import importlib, json, sys\n"
        "after = {}\n"
        f"for name in {CHEAP!r}:\n"
        "    importlib.import_module(name)\n"
        f"    after[name] = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "print(json.dumps(after))"
    )
    done = run_python("-c", code)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout) == {name: [] for name in CHEAP}


def test_the_check_sees_a_heavy_import(run_python):
    (run_python.folder / "heavy.py").write_text("import ray\n")
    assert _heavy_after(["heavy"], run_python) == ["ray"]
