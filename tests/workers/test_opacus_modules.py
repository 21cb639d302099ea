"""A process loads what it uses of Opacus, and whoever uses more of it finds all of it."""

import json

LOADED = "import json, sys; from workers.opacus_modules import opacus_module\n"
WATCHED = ["torch", "sympy", "torch._dynamo", "opacus.optimizers"]
REPORT = f"print(json.dumps([name for name in {WATCHED} if name in sys.modules]))"

UPDATE = {
    "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8,
    "schedule": "constant", "warmup_steps": 0,
}  # fmt: skip


def report(run_python, code):
    done = run_python("-c", f"{LOADED}{code}")
    assert done.code == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_worker_loads_neither_optimizers_nor_a_compiler(run_python):
    """A convolution needs more; it finds that by itself, in a process where nobody else imported it."""
    code = (
        "import torch\n"
        "from workers.clipping import PerExampleGradients\n"
        "from workers.models import check_layers, cross_entropy\n"
        "from workers.numerics import pin_numerics\n"
        "pin_numerics()\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())\n"
        "check_layers(model)\n"
        "PerExampleGradients(model, cross_entropy)(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))\n"
        f"loaded = [name for name in {WATCHED} if name in sys.modules]\n"
        "model = torch.nn.Sequential(torch.nn.Conv1d(1, 3, 4), torch.nn.Flatten())\n"
        "PerExampleGradients(model, cross_entropy)(torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int64))\n"
        "print(json.dumps(loaded))"
    )
    assert report(run_python, code) == ["torch"]


def test_an_update_loads_no_compiler(run_python):
    code = (
        "import numpy as np\n"
        "from coordinator.optimizers import Optimizer\n"
        "from workers.manifest import OptimizerSpec, TensorSpec\n"
        "ones = np.ones(3, np.float32)\n"
        "for name in ('sgd', 'adam', 'adamw', 'adafactor'):\n"
        "    rule = Optimizer(OptimizerSpec(**VALUES, name=name), (TensorSpec(name='w', shape=(3,)),), 5)\n"
        "    updated, _ = rule.update(ones, ones, {}, 0)\n"
        "    assert (updated < 1).all()\n"
    ).replace("VALUES", repr(UPDATE))
    assert report(run_python, code + REPORT) == ["torch"]


def test_renyi_accounting_loads_no_torch(run_python):
    code = "from coordinator.accounting import step_rdp\nassert step_rdp(0.01, 1.0)[0] > 0\n"
    assert report(run_python, code + REPORT) == []


USERS_IMPORTS = (
    "import opacus; found = opacus.GradSampleModule",
    "import opacus; found = opacus.grad_sample.GradSampleModule",
    "from opacus import GradSampleModule as found",
    "from opacus import *; found = GradSampleModule",
)


def test_a_users_import_finds_the_same_classes(run_python):
    """Each in a process of its own, forked where torch and what raycloak uses of Opacus are imported."""
    code = (
        "import os, torch\n"
        "ours = opacus_module('opacus.grad_sample').GradSampleModule\n"
        "def same(code):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        names = {}\n"
        "        exec(code, names)\n"
        "        os._exit(0 if names['found'] is ours else 1)\n"
        "    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        f"print(json.dumps([same(code) for code in {USERS_IMPORTS}]))"
    )
    assert report(run_python, code) == [True] * len(USERS_IMPORTS)


def test_a_package_that_somebody_asks_runs_its_init_once(run_python):
    code = (
        "opacus_module('opacus.accountants.analysis.rdp')\n"
        "import opacus.accountants as package\n"
        "assert 'RDPAccountant' not in vars(package)\n"
        "first = package.RDPAccountant\n"
        "again = opacus_module('opacus.accountants').RDPAccountant\n"
        "print(json.dumps([first is again, type(package).__name__, hasattr(package, 'no_such_name')]))"
    )
    assert report(run_python, code) == [True, "module", False]


def test_what_is_imported_already_stays(run_python):
    code = "import opacus\nbefore = vars(opacus).copy()\nopacus_module('opacus.validators')\n"
    assert report(run_python, f"{code}print(json.dumps([type(opacus).__name__, 'PrivacyEngine' in before]))") == [
        "module",
        True,
    ]
