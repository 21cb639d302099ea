"""The commands as a user types them: on a local Ray of their own, as a Ray job, and on a cluster that is there."""

import csv
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import raycloak
from raycloak.coordinator.cli import app
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.workers.gradients.environment import own_flags, stated_capability, widest_shared
from raycloak_lab.cli import app as lab_app
from raycloak_lab.scale import calibration
from raycloak_lab.scale.simulation import Scale, ScaleConfig, simulate
from tests.layout import PACKAGES, ROOT
from tests.protocol import settle
from tests.spans import collector

DEADLINE_S = 900
RDP = "dp_config.accountant=rdp"
"""The accounting of a run whose epsilon nobody looks at: driver and ledger save a second each."""
PROMISED = {
    "run_dir", "steps", "privacy_epsilon", "privacy_epsilon_one_worker", "privacy_delta", "epsilon_cap",
    "evaluation_accuracy", "evidence_class", "model_digest", "num_workers", "virtual_workers", "masked_bytes",
    "wall_seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def received():
    """A collector of spans on loopback, and the variables that a traced command has."""
    with collector() as (spans, address):
        yield spans, {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "TRACEPARENT": f"00-{'ab' * 16}-{'cd' * 8}-01"}


def test_demo_prints_one_json_object_and_ends_with_a_private_accurate_model(run_python, ray_cluster, received):
    traced, variables = received
    environment = {**ray_cluster.environment, **variables}
    done = run_python("-m", "raycloak", "demo", "--json", environment=environment, deadline_s=DEADLINE_S)
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() >= PROMISED
    assert result["evidence_class"] == "simulated"
    assert result["evaluation_accuracy"] >= 0.93
    assert 0 < result["privacy_epsilon"] <= result["epsilon_cap"] == 8.0
    assert result["privacy_epsilon_one_worker"] is None, "all workers are on one machine, which had all keys"
    assert result["keys_on_one_machine"] == result["virtual_workers"]
    written = {path.name for path in Path(result["run_dir"]).iterdir()}
    assert written >= {"config.yaml", "manifest.json", "metrics.jsonl", "parameters.safetensors", "run.log"}
    verdict = json.loads((Path(result["run_dir"]) / "verdict.json").read_text())
    assert verdict == result
    phases = ["connecting to Ray", "loading libraries", "starting workers", "opening data", "planning", "training"]
    told = [done.stderr.find(f" {phase}") for phase in phases]
    assert told == sorted(told), done.stderr
    assert -1 not in told
    log = (Path(result["run_dir"]) / "run.log").read_text()
    assert "SIMULATED" in log
    assert "opentelemetry" not in log
    names = Counter(span.name for span in traced.spans)
    assert names["step"] == names["charge"] == result["steps"]
    assert names["worker"] >= 3 * result["steps"]
    once = ("run", "connect", "launch", "prepare", "admit", "train", "finish")
    assert [names[name] for name in once] == [1] * len(once)
    (run,) = (span for span in traced.spans if span.name == "run")
    assert (run.trace_id.hex(), run.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
    linked = {link.span_id for span in traced.spans if span.name == "step" for link in span.links}
    assert linked == {run.span_id}


@pytest.fixture
def here(run_python, monkeypatch, capfd):
    """Run a command in this process and in the folder of `run_python`; returns the object that it prints."""
    for program in (app, lab_app):
        monkeypatch.setattr(program, "leave_stdout", lambda: None)
    monkeypatch.chdir(run_python.folder)

    def run(*arguments, program=app):
        with pytest.raises(SystemExit) as ended:
            program.main([*arguments, "--json"])
        out, err = capfd.readouterr()
        assert ended.value.code == 0, err
        # Ray prints what workers say to the same stream.
        (line,) = (line for line in out.splitlines() if line.startswith('{"'))
        return json.loads(line)

    return run


def test_a_new_project_is_trained_and_its_model_loaded_and_exported(here, run_python, ray_environment):
    """The first ten minutes: init, run, load, predict, export; on a Ray of its own, as on a newcomer's machine."""
    here("init", "own", "--template", "tabular")
    environment = {**ray_environment, "PYTHONPATH": str(ROOT)}
    command = ("-m", "raycloak", "run", "own/config.yaml", "--json")
    done = run_python(*command, environment=environment, deadline_s=DEADLINE_S)
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == result["planned_steps"] == 69, "30 epochs"
    assert result["evaluation_accuracy"] >= 0.85
    manifest = json.loads((Path(result["run_dir"]) / "manifest.json").read_text())
    numerics = manifest["computation"]["numerics"]
    assert numerics["threads"] == 1, "the processes of a Ray of its own inherit the variables of a worker"
    assert stated_capability(numerics["cpu_capability"]) == widest_shared([own_flags()])
    with (run_python.folder / "own" / "public.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    features = torch.tensor([[float(value) for value in row[:-1]] for row in rows])
    labels = torch.tensor([["malignant", "benign"].index(row[-1]) for row in rows])
    # Not from the folder that the run was started in: its record knows where the model is.
    model = raycloak.load(result["run_dir"])
    with torch.no_grad():
        predicted = model(features).argmax(1)
    assert float((predicted == labels).float().mean()) == pytest.approx(result["evaluation_accuracy"])
    written = here("export", result["run_dir"], "--format", "torch", "--out", "model.pt")
    state = torch.load(run_python.folder / written["out"], weights_only=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_bad_input_is_one_line_with_exit_code_2(run_python):
    wrong = run_python("-m", "raycloak", "demo", "--set", "stepz=3")
    assert (wrong.code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: config: stepz")


def submitted(head, checkout, raycloak_home, *command, succeeds=True):
    """Return the output of a command that ran as a job of the cluster, with a copy of the product as its folder."""
    for name in (*PACKAGES, "raycloak", "examples"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    ray = str(Path(sys.executable).parent / "ray")
    submit = [ray, "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--", "python", *command]
    done = subprocess.run(
        submit, cwd=checkout, env={**head.environment, "RAYCLOAK_HOME": str(raycloak_home)}, capture_output=True,
        text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return done.stdout


def test_guarantee_a_job_in_whose_uploaded_folder_a_key_lies_is_refused(head, tmp_path, raycloak_home):
    """Whatever the configuration names: Ray has spread the folder by then, so the error says to take another key."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "owner.key").write_text("7a" * 32)
    command = ("-m", "raycloak", "run", "examples/digits.yaml", "--set", "steps=1")
    output = submitted(head, checkout, raycloak_home, *command, succeeds=False)
    assert re.search(r"key_in_job: .*owner\.key is .*uploaded.* Take a new one", " ".join(output.split()))
    assert "7a" * 32 not in output


def test_a_ray_job_ends_with_the_same_verdict_as_a_local_run(head, ray_cluster, tmp_path, raycloak_home, monkeypatch):
    checkout, secret = tmp_path / "checkout", tmp_path / "secret.hex"
    checkout.mkdir()
    secret.touch(0o600)
    secret.write_text("7a" * 32)
    settle(raycloak_home)
    settle(tmp_path / "other")
    output = submitted(
        head, checkout, raycloak_home, "-m", "raycloak", "run", "examples/digits.yaml", "--json", "--set", "steps=5",
        "--set", "num_workers=2", "--set", RDP, "--run-secret", str(secret),
    )  # fmt: skip
    (line,) = (line for line in output.splitlines() if line.startswith('{"') and "model_digest" in line)
    job = json.loads(line)
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "other"))
    examples = checkout / "examples"
    config = load_config(examples / "digits.yaml", ["steps=5", "num_workers=1", "secure_aggregation=false", RDP])
    local = Trainer(config, config_dir=examples, run_secret=secret, notice=lambda line: None).train()["metrics"]
    same = ("steps", "privacy_epsilon", "evaluation_accuracy", "evidence_class", "model_digest", "epsilon_cap")
    assert {key: job[key] for key in same} == {key: local[key] for key in same}


def test_a_service_in_a_ray_job_serves_a_loop(head, tmp_path, raycloak_home):
    """The example's service joins the cluster of the job, and so do its drivers."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    output = submitted(head, checkout, raycloak_home, "examples/service_loop.py", "2")
    assert re.findall(r"step (\d+): ε \d", output) == ["1", "2"]
    assert re.search(r"released model [0-9a-f]{64}", output)


def test_the_loop_by_hand_runs_as_written(ray_cluster, capfd):
    runpy.run_path(str(ROOT / "examples" / "actors_by_hand.py"), run_name="__main__")
    steps = [line for line in capfd.readouterr().out.splitlines() if line.startswith("SIMULATED step")]
    assert len(steps) == len(set(steps)) == 5


def test_bench_step_measures_on_a_ledger_of_its_own(here, ray_cluster, raycloak_home):
    config = str(ROOT / "benchmarks" / "step.yaml")
    options = ("--set", "steps=10", "--set", "num_workers=2", "--set", RDP, "--against", "bare-ray")
    figures = here("bench", "step", config, *options, program=lab_app)
    assert figures["parameters"] == 1000
    assert figures["bytes_per_parameter"] == 4.0
    assert figures["framing_bytes"] < 1024
    assert 0 < figures["control_overhead_ms"] < figures["step_ms"]
    ratio = figures["control_overhead_ms"] / figures["bare_ray_ms"]
    assert figures["control_vs_bare_ray"] == pytest.approx(ratio)
    assert not (raycloak_home / "ledger.sqlite").exists()


def test_rates_of_this_machine_predict_a_step_beyond_them(ray_cluster, monkeypatch):
    # Small, so that the prediction is tried and not its quality, which the command prints.
    for name, value in {"WORDS": 2**12, "CHECKED": 2**14, "FEW": 3, "MANY": 4}.items():
        monkeypatch.setattr(calibration, name, value)
    rates = calibration.calibrate("adam")
    checked = calibration.check(rates)
    assert (checked.workers, checked.parameters) == (2, 2**14 // 20 * 20)
    assert checked.ratio == checked.predicted_seconds / checked.measured_seconds > 0
    # Not what one vector more costs: at this size, noise makes it zero in one of a hundred measurements.
    assert min(rates.words[32].mask, rates.words[64].averaged.at(8), rates.ledger_wall, rates.imports) > 0
    assert all(isinstance(size, Scale) for size in simulate(ScaleConfig(workers=[8], parameters=[10**7]), rates))
