"""The cost of importing: reporting, appraisal and the command line start without torch, Ray or Opacus.

Each process of a run imports what it needs and no more.
"""

import json
from pathlib import Path

import pytest

from raycloak_lab.bench.start import LIBRARIES

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
    "raycloak_lab.bench.chaos.chaos",
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


LARGE = [
    "dcap_qvl", "dp_accounting", "grpc", "matplotlib", "opacus", "pandas", "prometheus_client", "rich", "scipy",
    "signxml", "sqlalchemy", "sympy", "torch", "transformers", "typer",
]  # fmt: skip
# In this order: what a process imports beside torch is seen after the others.
PROCESSES = {
    "NodePlatform": ("raycloak.coordinator.cluster.platform_actor", []),
    "relays": ("raycloak.coordinator.cluster.relays", []),
    "LedgerActor": ("raycloak.coordinator.vaults.ledger_vault", ["sqlalchemy"]),
    "OrchestratorActor": (
        "raycloak.coordinator.vaults.orchestrator_vault",
        ["dcap_qvl", "grpc", "prometheus_client", "signxml"],
    ),
    "driver before Ray": (
        "raycloak.coordinator.runs.ray_start",
        ["rich", "signxml"],
    ),
    "TrainWorkerActor": ("raycloak.coordinator.vaults.worker_vault", ["dcap_qvl", "signxml", "torch"]),
    "MaskedAggregatorActor": ("raycloak.coordinator.vaults.aggregator_vault", ["signxml", "torch"]),
}
"""The module by which each process of a run begins, and the large libraries that it may import; actors' are vaults."""
LATER = {"dp_accounting"}
"""Libraries that a process imports while others start."""


def test_each_process_of_a_run_imports_what_it_needs_and_no_more(run_python):
    """Forked from one process, which pays for Ray and torch once."""
    names = sorted({name.partition(".")[0] for libraries in LIBRARIES.values() for name in libraries} | set(LARGE))
    code = (
        "import importlib, json, os, sys, ray\n"
        f"for role, (module, may) in {PROCESSES!r}.items():\n"
        "    if 'torch' in may: import torch\n"
        "    if os.fork() == 0:\n"
        "        importlib.import_module(module)\n"
        f"        print(json.dumps([role, [name for name in {names!r} if name in sys.modules]]), flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0\n"
    )
    done = run_python("-c", code)
    assert done.code == 0, done.stderr
    imported = dict(json.loads(line) for line in done.stdout.splitlines())
    assert {role: [name for name in found if name in LARGE] for role, found in imported.items()} == {
        role: may for role, (_, may) in PROCESSES.items()
    }
    # The floor of `bench start` holds nothing that the run does without.
    for role in LIBRARIES.keys() & imported.keys():
        needed = {name.partition(".")[0] for name in LIBRARIES[role]} - LATER
        assert needed <= {*imported[role]}, role
