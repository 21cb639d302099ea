"""A run on Ray that is stopped by a signal, resumed, and replayed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from raycloak.coordinator.config.home import ledger_url
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.replay import replay
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import ConfigError
from tests.conftest import ROOT
from tests.protocol import RENYI

DEADLINE_S = 600
STEPS = 40
"""More than a run takes between two looks at its events."""


def digests(run_dir):
    """Return the model digest after each step, in the order of metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [event["model_digest"] for event in map(json.loads, lines) if event["event"] == "step"]


def wait_for(condition, process):
    """Return what ``condition`` gives once it is true."""
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert process.poll() is None, "the command ended early"
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)
    return found


def stopped_by_a_signal(arguments, environment, home):
    """Run the command, send SIGTERM after its second step, and return (run directory, exit code, JSON, stderr)."""
    command = [sys.executable, "-m", "raycloak", *arguments, "--json"]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            events = wait_for(lambda: list(home.glob("runs/*/metrics.jsonl")), process)[0]
            wait_for(lambda: len(digests(events.parent)) >= 2, process)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    return events.parent, process.returncode, json.loads(out), err


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.yaml"
    changes = {
        "num_workers": 1,
        "secure_aggregation": False,
        "steps": STEPS,
        "expected_batch_size": 64,
        "evaluation": None,
        "dp_config": RENYI,
    }
    path.write_text(yaml.safe_dump(demo_config() | changes | {"checkpoint": {"checkpoint_frequency": 0}}))
    return path


def test_a_stopped_run_resumes_and_can_be_replayed(ray_cluster, config_file, tmp_path, raycloak_home, capsys):
    secret = tmp_path / "secret"
    secret.write_text("5e" * 32)
    secret.chmod(0o644)
    arguments = ["run", str(config_file), "--run-secret", str(secret)]
    environment = {**os.environ, **ray_cluster.environment}
    run_dir, code, result, errors = stopped_by_a_signal(arguments, environment, raycloak_home)
    assert (code, result["ending"], result["run_dir"]) == (4, "stopped", str(run_dir))
    assert "SIGTERM: the run stops after this step" in errors
    warning = f"warning: {secret} has mode 0644."
    assert errors.count(warning) == (run_dir / "run.log").read_text().count(warning) == 1
    assert json.loads((run_dir / "verdict.json").read_text()) == result
    first = result["steps"]
    assert 2 <= first == len(digests(run_dir)) < STEPS
    (packages,) = (raycloak_home / "packages").iterdir()
    assert [path.name for path in packages.iterdir()] == [f"step-{first:06d}.tssp"]

    config = load_config(config_file)
    on = Trainer(config, config_dir=tmp_path, resume=True, notice=lambda line: None).train()
    shown = capsys.readouterr().err
    assert "starting workers" in shown, "a program that asks for no progress is shown some"
    assert "1 worker" in shown
    assert (on["run_dir"], on["metrics"]["ending"], on["metrics"]["steps"]) == (str(run_dir), "complete", STEPS)
    assert json.loads((run_dir / "verdict.json").read_text())["ending"] == "complete"
    assert len(digests(run_dir)) == STEPS
    with pytest.raises(ConfigError, match="nothing_to_resume"):
        Trainer(config, config_dir=tmp_path, resume=True).train()

    head = PrivacyLedger(ledger_url(), create=False).view().head
    again = replay(run_dir, (first, STEPS), 1, lambda line: None)
    assert list(again.digests) == digests(run_dir)[first:]
    assert (again.first, again.last, again.workers, again.charged_steps) == (first, STEPS, 1, STEPS)
    assert PrivacyLedger(ledger_url(), create=False).view().head == head
