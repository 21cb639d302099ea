"""What a proof needs is an error where it does not hold, also in an interpreter that drops assertions."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raycloak.metrics.errors import RefusedError
from raycloak.metrics.proof_bounds import require_assertions, require_bound

ROOT = Path(__file__).resolve().parents[2]

# Each line is one way into a process that computes or charges, or past a bound.
OPTIMISED = """
import torch
from pathlib import Path
from raycloak.metrics.errors import RaycloakError

def code(call):
    try:
        call()
    except RaycloakError as error:
        return error.code
    return "none"

def worker():
    from raycloak.workers.gradients.numerics import pin_numerics
    pin_numerics()

def aggregator():
    from raycloak.coordinator.aggregation.aggregator import MaskedAggregator
    MaskedAggregator("aggregator-0", None)

def ledger():
    from raycloak.coordinator.ledger.ledger import PrivacyLedger
    PrivacyLedger("sqlite:///nowhere/ledger.sqlite")

def auditor():
    from raycloak.coordinator.ledger.audit import audit
    audit([], b"")

def planner():
    from raycloak.coordinator.planning.plan import make_plan
    make_plan(None, 1, 1)

def orchestrator():
    from raycloak.attestation.orchestrator.orchestrator import OpenRun
    OpenRun(Path("nowhere"), None, None, generated=None, is_new=True)

def clip():
    from raycloak.workers.gradients.clipping import ClippedSum
    ClippedSum([1], 2.0**101, torch.device("cpu"))

def size():
    from raycloak.workers.gradients.clipping import ClippedSum
    ClippedSum([2**34, 1], 1.0, torch.device("cpu"))

def rows():
    from raycloak.workers.gradients.clipping import ClippedSum
    from raycloak.workers.gradients.parts import DensePart
    ClippedSum([1], 1.0, torch.device("cpu")).add([DensePart(torch.zeros(131080, 1))], torch.ones(131080, dtype=bool))

def tokens():
    from raycloak.workers.gradients.parts import GramPart, Products
    GramPart([Products(torch.zeros(1, 1, 4097, 2), torch.zeros(1, 1, 4097, 2))], [])

def width():
    from raycloak.workers.gradients.parts import GramPart, Products
    GramPart([Products(torch.zeros(1, 1, 1, 65537), torch.zeros(1, 1, 1, 2))], [])

def share():
    from raycloak.workers.vectors.ring import RingDemand, fit_ring
    fit_ring(RingDemand(1.0, 1.0, 1, 1, noise_multiplier=1.0, honest_share=1.1))

for call in (worker, aggregator, ledger, auditor, planner, orchestrator, clip, size, rows, tokens, width, share):
    print(call.__name__, code(call))
"""
PROCESSES = ("worker", "aggregator", "ledger", "auditor", "planner", "orchestrator")


# Their modules carry proofs, so no bound is an assertion: one tells the type checker what a value is.
PROVED = ("workers/vectors", "workers/terms", "workers/gradients", "coordinator/accounting", "attestation/core")


def narrows(condition: ast.expr) -> bool:
    """Return whether a condition is of the type of a value alone."""
    text = ast.unparse(condition)
    return text.endswith(" is not None") or re.fullmatch(r"(not )?isinstance\(.*\)", text) is not None


@pytest.mark.parametrize("room", PROVED)
def test_no_bound_of_a_proof_is_an_assertion(room: str):
    paths = sorted((ROOT / room).glob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                assert narrows(node.test), f"{path}:{node.lineno}: an error for a bound, or require_bound"


def test_a_bound_that_does_not_hold_is_an_error_that_says_which():
    require_bound(True, "two is even")
    with pytest.raises(RefusedError, match="proof_bound: one is even: a guarantee is proved for nothing else"):
        require_bound(False, "one is even")


def test_python_o_computes_and_charges_nothing_and_loses_no_bound():
    require_assertions()
    shown = subprocess.run([sys.executable, "-O", "-c", OPTIMISED], capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    found = dict(line.split() for line in shown.stdout.splitlines())
    assert {found.pop(process) for process in PROCESSES} == {"assertions_off"}
    assert set(found) == {"clip", "size", "rows", "tokens", "width", "share"}
    assert set(found.values()) == {"proof_bound"}
