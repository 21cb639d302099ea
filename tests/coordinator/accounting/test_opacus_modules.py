"""A process loads only the parts of Opacus that it uses, and code that uses more finds all of it."""

import json

import pytest

LOADED = "import json, sys; from raycloak.coordinator.accounting.opacus_modules import opacus_module\n"
WATCHED = f"[name for name in {['torch', 'sympy', 'torch._dynamo', 'opacus.optimizers']} if name in sys.modules]"

UPDATE = {
    "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8,
    "schedule": "constant", "warmup_steps": 0,
}  # fmt: skip


def report(run_python, code):
    done = run_python("-c", f"{LOADED}{code}")
    assert done.code == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


RENYI = f"""
from raycloak.coordinator.ledger.ledger import PrivacyLedger
PrivacyLedger('sqlite:///{{folder}}/ledger.sqlite').load_accountant('rdp')
print(json.dumps({WATCHED} + [name for name in ['dp_accounting', 'scipy.stats'] if name in sys.modules]))
from raycloak.coordinator.accounting.renyi import step_rdp
assert step_rdp(0.01, 1.0)[0] > 0
print(json.dumps({WATCHED}))
"""


def test_a_ledger_with_renyi_accounting_loads_neither_torch_nor_the_other_accountant(run_python):
    code = RENYI.replace("{folder}", str(run_python.folder))
    done = run_python("-c", f"{LOADED}{code}")
    assert done.code == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]"]


STEP = f"""
import sys, torch
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.row_memory import largest_rows
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.gradients.numerics import pin_numerics
pin_numerics()
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
form = DatasetForm(
    num_examples=9, feature_shape=(4,), feature_dtype="float32", label_shape=(), label_dtype="int64"
)
check_trainable(model, form, cross_entropy)
largest_rows(model, form, cross_entropy)
GradientParts(model, cross_entropy).rows(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
found = {WATCHED} + [name for name in sys.modules if name.startswith('opacus.')]
"""
CROSS_CHECK = f"""
import sys, torch
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.planning.cross_check import cross_check
assert cross_check((Release(0.1, 1.0, 10),), 1e-5).epsilon['opacus_prv'] > 0
found = {WATCHED}
"""
UPDATES = f"""
import sys, numpy as np
from raycloak.coordinator.aggregation.update_rules import Optimizer
from raycloak.workers.terms.manifest import OptimizerSpec, TensorSpec
ones = np.ones(3, np.float32)
for name in ('sgd', 'adam', 'adamw', 'adafactor'):
    rule = Optimizer(OptimizerSpec(**{UPDATE}, name=name), (TensorSpec(name='w', shape=(3,)),), 5)
    updated, _ = rule.update(ones, ones, {{}}, 0)
    assert (updated < 1).all()
found = {WATCHED}
"""


USERS_IMPORTS = {
    "attribute": "import opacus; found = opacus.GradSampleModule",
    "submodule": "import opacus; found = opacus.grad_sample.GradSampleModule",
    "from": "from opacus import GradSampleModule as found",
    "star": "from opacus import *; found = GradSampleModule",
}
"""How a user may come to a class that raycloak has imported already."""

BEFORE = "ours = opacus_module('opacus.grad_sample').GradSampleModule\n"
INIT_ONCE = """
opacus_module('opacus.accountants.analysis.rdp')
import opacus.accountants as package
assert 'RDPAccountant' not in vars(package)
first = package.RDPAccountant
again = opacus_module('opacus.accountants').RDPAccountant
from opacus.accountants.accountant import IAccountant
from opacus.optimizers import DPOptimizer
assert issubclass(first, IAccountant) and isinstance(DPOptimizer, type)
found = [first is again, type(package).__name__, hasattr(package, 'no_such_name')]
"""
OTHERS = "import scipy.optimize, scipy.special, scipy.stats, torch._dynamo, torch.distributed.tensor, torch.nn.parallel"
"""Most of what the whole of Opacus imports, so that it is imported once."""
ALREADY = """
import opacus
before = vars(opacus).copy()
opacus_module('opacus.validators')
found = [type(opacus).__name__, 'PrivacyEngine' in before]
"""
FORKING = """
import os
import torch

def found_by(code):
    reading, writing = os.pipe()
    if os.fork() == 0:
        names = {'opacus_module': opacus_module}
        exec(code, names)
        os.write(writing, json.dumps(names['found']).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return json.loads(answer.read() or 'null')
"""


@pytest.fixture(scope="module")
def answers(run_python_in, tmp_path_factory):
    """Return what each piece of code finds, in a process of its own, forked before anything of Opacus is imported.

    The pieces that ask what else is imported find torch alone.
    """
    alone = {"step": STEP, "updates": UPDATES, "cross-check": CROSS_CHECK}
    codes = {name: f"{BEFORE}{code}\nfound = found is ours" for name, code in USERS_IMPORTS.items()}
    codes |= {"init once": INIT_ONCE, "already": ALREADY}
    run = run_python_in(tmp_path_factory.mktemp("opacus"))
    return report(
        run,
        f"{FORKING}\nanswers = {{name: found_by(code) for name, code in {alone}.items()}}\n{OTHERS}\n"
        f"print(json.dumps(answers | {{name: found_by(code) for name, code in {codes}.items()}}))",
    )


def test_a_worker_loads_neither_opacus_nor_a_compiler(answers):
    assert answers["step"] == ["torch"]


def test_an_update_loads_no_compiler(answers):
    assert answers["updates"] == ["torch"]


def test_a_comparison_of_the_accountants_loads_no_optimizer(answers):
    assert answers["cross-check"] == ["torch"]


@pytest.mark.parametrize("way", USERS_IMPORTS)
def test_a_users_import_finds_the_same_classes(way, answers):
    assert answers[way] is True


def test_a_package_that_somebody_asks_runs_its_init_once(answers):
    assert answers["init once"] == [True, "module", False]


def test_what_is_imported_already_stays(answers):
    assert answers["already"] == ["module", True]
