"""The driver holds a run's own code against the policy's list before any process is given it."""

from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.planning.listed_code import listed_code
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.inputs.code_bundle import CodeBundle
from tests.protocol import config

HUB = {"model": {"hf": "bert", "task": "sequence_classification"}}
OWN: dict[str, dict[str, Any]] = {
    "model": {"model": "own:model"},
    "loss": HUB | {"loss": "own:loss"},
    "data": HUB | {"dataset": {"kind": "module", "function": "own:data"}},
    "pipeline": HUB | {"dataset": {"kind": "ray_data", "path": "rows", "function": "own:data"}},
    "update rule": HUB | {"optimizer": {"name": "own:Rule"}},
    "schedule": HUB | {"optimizer": {"schedule": "own:schedule"}},
    "metric": HUB
    | {"evaluation": {"dataset": {"kind": "digits", "split": "public", "public": True}, "metrics": ["own:metric"]}},
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return simulated_policy(SimulatedVendor.create(), bytes(48))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text("raise SystemExit\n")
    return tmp_path


def listing(policy: Policy, *code: bytes) -> Policy:
    return policy.model_copy(update={"code": code})


def refusal(*arguments: Any) -> str:
    with pytest.raises(EvidenceError) as caught:
        listed_code(*arguments)
    assert caught.value.code == "code_unlisted"
    return caught.value.message


@pytest.mark.parametrize("kind", OWN)
def test_each_kind_of_code_is_refused_by_name_unless_the_policy_lists_it(policy, project, kind):
    run, listed = config(**OWN[kind]), CodeBundle.read(project).digest
    for code in ((), (b"x" * 32,)):
        assert "own:" in refusal(listing(policy, *code), run, [], project)
    assert listed_code(listing(policy, b"x" * 32, listed), run, [], project) == listed
    assert listed_code(policy, run, [], project) == b""
    (project / "extra.py").touch()
    assert "own:" in refusal(listing(policy, listed), run, [], project)


def test_a_run_without_code_of_its_own_needs_no_entry(policy, tmp_path):
    assert listed_code(listing(policy), config(**HUB), [], tmp_path) == b""


def test_an_installed_function_is_in_no_bundle(policy, project):
    listed = CodeBundle.read(project).digest
    assert "torch" in refusal(listing(policy, listed), config(**HUB, loss="torch.nn.functional:mse_loss"), [], project)


def test_a_callable_is_refused_by_name(policy, project):
    listed = CodeBundle.read(project).digest
    assert "my_model" in refusal(listing(policy, listed), config(**HUB), ["my_model"], project)
    assert listed_code(policy, config(**HUB), ["my_model"], project) == b""
