"""The command `raycloak audit`: what it prints, and its exit codes."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from raycloak.coordinator.audit import audit
from raycloak.coordinator.audit.audit import AuditResult
from raycloak.coordinator.cli import app
from tests.coordinator.audit.audit_cases import EXAMPLES, small_config
from tests.protocol import examples

RESULT = AuditResult(
    epsilon_lower=0.43219,
    confidence=0.95,
    epsilon=1.0,
    delta=1e-5,
    sensitivity=0.99998,
    contradicted=False,
    epsilon_ceiling=4.1,
    canaries=1000,
    included=490,
    guesses=500,
    correct=320,
    score="likelihood",
    examples=200,
    steps=4,
    sample_rate=0.5,
    noise_multiplier=6.0,
    account="run-1",
    evidence_class="simulated",
    run_dir=Path("/runs/audit"),
)


@pytest.fixture
def config_file(tmp_path):
    features, labels = examples(EXAMPLES)
    np.savez(tmp_path / "examples.npz", features=features, labels=labels)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_config().model_dump(mode="json")))
    return path


@pytest.fixture
def raycloak(capfd, monkeypatch):
    """Run the command in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            app.main([str(argument) for argument in arguments])
        return ended.value.code, *capfd.readouterr()

    return run


def test_an_audit_prints_its_bound_beside_the_ledgers_epsilon(raycloak, config_file):
    code, stdout, stderr = raycloak("audit", config_file, "--canaries", 100, "--json")
    assert code == 0, stderr
    result = json.loads(stdout)
    assert result["epsilon_lower"] < result["epsilon"] <= 1
    assert (result["confidence"], result["canaries"], result["contradicted"]) == (0.95, 100, False)
    # The pace of steps is measured from here, and not from the checks of the model.
    assert " training (after admitting workers " in stderr


@pytest.mark.parametrize("contradicted", [False, True])
def test_exit_code_3_and_one_line_where_the_claim_is_contradicted(raycloak, config_file, monkeypatch, contradicted):
    epsilon = 0.4 if contradicted else 1.0
    changed = {name: getattr(RESULT, name) for name in RESULT.__slots__}
    result = AuditResult(**{**changed, "epsilon": epsilon, "contradicted": contradicted})
    monkeypatch.setattr(audit, "audit", lambda *arguments, **options: result)
    code, stdout, stderr = raycloak("audit", config_file)
    assert code == (3 if contradicted else 0)
    assert "SIMULATED" in stdout
    assert "at least 0.432 with confidence 0.95" in stdout
    assert ("CONTRADICTS" in stdout) == contradicted
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == contradicted
    assert all(line.startswith("error: claim_contradicted: ") for line in errors)
    code, stdout, _ = raycloak("audit", config_file, "--json")
    assert json.loads(stdout)["contradicted"] == contradicted


def test_a_sum_that_one_example_moves_too_far_is_told_as_such(raycloak, config_file, monkeypatch):
    changed = {name: getattr(RESULT, name) for name in RESULT.__slots__}
    result = AuditResult(**{**changed, "sensitivity": 25.0312, "contradicted": True})
    monkeypatch.setattr(audit, "audit", lambda *arguments, **options: result)
    code, stdout, stderr = raycloak("audit", config_file)
    assert code == 3
    assert "25.032 C moved by one synthetic example" in stdout
    assert "error: claim_contradicted: taking one example away moves a clipped sum by 25.031 C" in stderr


def test_what_cannot_be_audited_is_one_line(raycloak, config_file):
    code, stdout, stderr = raycloak("audit", config_file, "--canaries", 3)
    assert (code, stdout) == (2, "")
    assert stderr.splitlines()[-1].startswith("error: audit_canaries: ")
