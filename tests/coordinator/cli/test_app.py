"""The command: exit codes, one-line errors, one JSON object, and nothing charged by what is refused."""

import json
import socket
import sys
import types
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.console.output import attach_log
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.record.folder import RunFolder, run_lock
from raycloak.coordinator.runs.demo import demo_config, digits_model
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import BudgetError, ConfigError, RefusedError, RunFailedError
from raycloak.workers.inputs.user_code import resolve

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

RESULT = {
    "steps": 2,
    "planned_steps": 2,
    "ending": "complete",
    "private": True,
    "privacy_epsilon": 7.5,
    "privacy_epsilon_if_stop_was_blind": 7.5,
    "privacy_epsilon_one_worker": 10.0,
    "privacy_epsilon_charged": 7.5,
    "privacy_delta": 1e-5,
    "epsilon_cap": 8.0,
    "evaluation_accuracy": 0.94,
    "evidence_class": "simulated",
    "model_digest": "ab" * 32,
    "num_workers": 3,
    "virtual_workers": 8,
    "masked_bytes": 1000,
    "wall_seconds": 1.5,
}


class FakeTrainer:
    """A stand-in for the trainer: it records how it was made, reports two steps, prints, and returns or raises."""

    made = None
    outcome = None
    log = None

    def __init__(
        self, config, *, config_dir, run_secret, resume, progress, phase, notice, handle_signals, small_epsilon
    ):
        FakeTrainer.made = types.SimpleNamespace(
            config=config, config_dir=config_dir, run_secret=run_secret, resume=resume
        )
        self._progress = progress
        self._phase = phase
        self._notice = notice

    def train(self):
        if self.log is not None:
            attach_log(self.log)
        print("noise of a library")
        self._notice("metrics: http://127.0.0.1:1/metrics")
        self._phase("training")
        for step in (1, 2):
            self._progress(StepReport(step, 2, 3.75 * step, 8.0, 0.9, 3, "ab" * 32, 0.1))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return {"run_dir": "/runs/digits", "metrics": RESULT}


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setattr(FakeTrainer, "outcome", None)
    monkeypatch.setattr(FakeTrainer, "made", None)
    monkeypatch.setitem(sys.modules, "raycloak.coordinator.runs.trainer", types.SimpleNamespace(Trainer=FakeTrainer))
    without_ray = types.SimpleNamespace(ray_ahead=lambda config, phase: nullcontext())
    monkeypatch.setitem(sys.modules, "raycloak.coordinator.runs.ray_start", without_ray)
    return FakeTrainer


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(demo_config()))
    return path


def test_run_ends_in_a_verdict(raycloak, trainer, config_file):
    code, out, err = raycloak("run", str(config_file))
    assert code == 0
    assert "Verdict (SIMULATED evidence)" in out
    assert "metrics: http://127.0.0.1:1/metrics" in err
    assert "0:00 loading libraries" in err
    assert "training (after loading libraries" in err
    assert "step 2 of 2" in err
    assert "noise of a library" not in out + err
    assert trainer.made.config_dir == config_file.parent
    assert trainer.made.run_secret is None


def test_the_runs_log_holds_what_was_printed_and_the_verdict(raycloak, trainer, config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "log", tmp_path / "run.log")
    assert raycloak("run", str(config_file))[0] == 0
    log = (tmp_path / "run.log").read_text()
    assert log.startswith("noise of a library\n")
    assert "Verdict (SIMULATED evidence)" in log


def test_run_with_json_prints_one_object(raycloak, trainer, config_file):
    code, out, _ = raycloak("run", str(config_file), "--json")
    assert code == 0
    assert json.loads(out) == {**RESULT, "run_dir": "/runs/digits"}


def run_named(config_file, run_id, status, **verdict):
    folder = RunFolder.create(load_config(config_file), run_id, str(config_file.parent), None)
    if verdict:
        folder.write_verdict(json.dumps({"run_dir": str(folder.path), **RESULT, **verdict}))
    folder.mark(status)
    return folder


@pytest.mark.parametrize(
    ("status", "resumed"), [(None, False), ("void", False), ("running", True), ("stopped", True), ("failed", True)]
)
def test_once_starts_a_run_or_resumes_it(raycloak, trainer, config_file, status, resumed):
    if status is not None:
        run_named(config_file, "a" * 16, status)
    assert raycloak("run", str(config_file), "--once")[0] == 0
    assert trainer.made.resume is resumed


def test_guarantee_once_starts_nothing_after_a_run_that_is_done(raycloak, trainer, config_file):
    run_named(config_file, "a" * 16, "failed")
    folder = run_named(config_file, "b" * 16, "done", ending="complete", steps=7)
    code, out, err = raycloak("run", str(config_file), "--once", "--json")
    assert (code, trainer.made) == (0, None)
    assert json.loads(out) == {**RESULT, "run_dir": str(folder.path), "ending": "complete", "steps": 7}
    assert f"the run in {folder.path} is done; nothing was started" in err
    assert "Verdict (SIMULATED evidence)" in raycloak("run", str(config_file), "--once")[1]


@pytest.mark.parametrize("verdict", [{}, {"ending": "too_few_workers"}])
def test_once_shows_no_verdict_of_an_execution_that_failed(raycloak, trainer, config_file, verdict):
    folder = run_named(config_file, "a" * 16, "done", **verdict)
    code, out, _ = raycloak("run", str(config_file), "--once", "--json")
    assert (code, json.loads(out), trainer.made) == (0, {"run_dir": str(folder.path)}, None)


def test_once_takes_a_run_for_done_that_could_not_say_so(raycloak, trainer, config_file, monkeypatch):
    folder = run_named(config_file, "a" * 16, "running")
    complete = ConfigError("nothing_to_resume", "the run is complete.", "Run without --resume.")
    monkeypatch.setattr(trainer, "outcome", complete)
    code, out, _ = raycloak("run", str(config_file), "--once", "--json")
    assert (code, json.loads(out)) == (0, {"run_dir": str(folder.path)})
    assert trainer.made.resume


def test_once_refuses_a_done_run_of_another_configuration_and_resume_beside_it(raycloak, trainer, config_file):
    run_named(config_file, "a" * 16, "done")
    code, _, err = raycloak("run", str(config_file), "--once", "--set", "seed=99")
    assert (code, trainer.made) == (3, None)
    assert err.startswith("error: resume_differs: ")
    code, _, err = raycloak("run", str(config_file), "--once", "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: usage: give --resume or --once, not both.")


@pytest.fixture
def without_ray(trainer, monkeypatch):
    """Fail a command that starts Ray."""
    refuse = types.SimpleNamespace(ray_ahead=lambda config, phase: pytest.fail("Ray is started"))
    monkeypatch.setitem(sys.modules, "raycloak.coordinator.runs.ray_start", refuse)


@pytest.mark.parametrize("how", ["--resume", "--once"])
def test_a_run_that_cannot_be_resumed_now_is_refused_before_ray_starts(raycloak, without_ray, config_file, how):
    folder = run_named(config_file, "a" * 16, "running")
    code, _, err = raycloak("run", str(config_file), how, "--set", "seed=99")
    assert (code, err.count("\n")) == (3, 1)
    assert err.startswith("error: resume_differs: the configuration changed since the run began: seed was ")
    # Also where the run in progress has the port that the configuration names.
    with run_lock(folder.record.run_id), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = raycloak("run", str(config_file), how, "--set", f"metrics.bind=127.0.0.1:{port}")
    assert (code, err.count("\n")) == (3, 1)
    assert err.startswith(f"error: run_in_progress: another process is executing run {'a' * 16}.")


def test_demo_takes_overrides_and_a_secret(raycloak, trainer, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    code, _, _ = raycloak(
        "demo", "--set", "steps=3", "--set", "dp_config.target_epsilon=2", "--run-secret", str(secret)
    )
    assert code == 0
    assert (trainer.made.config.steps, trainer.made.config.dp_config.target_epsilon) == (3, 2.0)
    assert trainer.made.run_secret == secret
    assert trainer.made.config_dir is None


@pytest.mark.parametrize(
    ("outcome", "code", "line"),
    [
        (ConfigError("config", "a field is wrong.", "Mend it."), 2, "error: config: a field is wrong. Mend it."),
        (BudgetError("cap_exceeded", "the cap is spent."), 3, "error: cap_exceeded: the cap is spent."),
        (RunFailedError("unreachable", "worker-1 is gone."), 4, "error: unreachable: worker-1 is gone."),
        (MemoryError("Unable to allocate 355. PiB"), 4, "error: out_of_memory: there is not enough memory for that."),
        (ValueError("a defect"), 4, "error: unexpected: ValueError: a defect."),
        (KeyboardInterrupt(), 4, "error: interrupted: stopped by the user."),
    ],
)
def test_every_failure_is_one_line_with_its_exit_code(outcome, code, line, raycloak, trainer, config_file, monkeypatch):
    monkeypatch.setattr(trainer, "outcome", outcome)
    got, out, err = raycloak("run", str(config_file))
    assert (got, out) == (code, "")
    assert err.splitlines()[-1].startswith(line)
    assert "Traceback" not in err
    got, out, _ = raycloak("run", str(config_file), "--json")
    assert got == code
    assert json.loads(out)["error"]["exit_code"] == code
    assert "Traceback" in raycloak("run", str(config_file), "--debug")[2]


def test_a_run_that_fails_late_shows_what_it_came_to(raycloak, trainer, config_file, monkeypatch):
    failure = RefusedError("too_few_workers", "1 worker is left.", "Go on with --resume.")
    failure.step, failure.spent_epsilon = 2, 7.5
    failure.result = {"run_dir": "/runs/digits", "metrics": RESULT | {"ending": "too_few_workers"}}
    monkeypatch.setattr(trainer, "outcome", failure)
    code, out, err = raycloak("run", str(config_file))
    assert code == 3
    assert "2 of 2, 1.5 s with the start of the workers: ended by too_few_workers" in out
    assert err.splitlines()[-1] == (
        "error: too_few_workers: 1 worker is left. It ended in step 2, with ε 7.500 charged to the account. "
        "Go on with --resume."
    )
    code, out, _ = raycloak("run", str(config_file), "--json")
    result = json.loads(out)
    assert (code, result["ending"], result["run_dir"]) == (3, "too_few_workers", "/runs/digits")
    assert (result["error"]["step"], result["error"]["spent_epsilon"]) == (2, 7.5)


def test_a_run_that_was_stopped_says_so_and_exits_with_4(raycloak, trainer, config_file, monkeypatch):
    monkeypatch.setitem(RESULT, "ending", "stopped")
    run_named(config_file, "a" * 16, "stopped")
    code, out, _ = raycloak("run", str(config_file), "--resume")
    assert code == 4
    assert "stopped, resume with --resume" in out
    assert trainer.made.resume


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("no_such_field=1", "no_such_field"),
        ("dp_config.target_epsilon=0", "target_epsilon"),
        ("dp_config.target_epsilon=-1", "target_epsilon"),
        ("dp_config.target_delta=1", "target_delta"),
        ("dp_config.target_delta=0", "target_delta"),
        ("dp_config.noise_multiplier=1", "dp_config"),
        ("batch_size_per_worker=4", "batch_size_per_worker"),
        ("virtual_workers=2", "virtual_workers"),
        ("min_workers=1", "secure_aggregation"),
        ("steps", "steps"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(override, field, raycloak, config_file, raycloak_home, trainer):
    trainer.made = None
    code, out, err = raycloak("run", str(config_file), "--set", override)
    assert (code, out) == (2, "")
    assert err.startswith("error: config: ")
    assert err.count("\n") == 1
    assert field in err
    assert trainer.made is None
    assert not raycloak_home.exists()


@pytest.mark.parametrize("arguments", [["run"], ["train"], ["demo", "--sett", "x=1"], ["budget", "open"], []])
def test_a_wrong_command_line_is_bad_input(arguments, raycloak):
    code, out, err = raycloak(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: usage: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "command"),
    [(["budget", "foo"], "budget"), (["budget", "open"], "budget open"), (["plan", "x", "--trials", "0"], "plan")],
)
def test_a_wrong_command_line_names_the_help_of_its_command(arguments, command, raycloak):
    assert raycloak(*arguments)[2].endswith(f". See raycloak {command} --help.\n")


def test_a_command_that_is_nearly_right_is_proposed(raycloak):
    assert raycloak("budget", "shw")[2].endswith(" Did you mean 'show'? See raycloak budget --help.\n")


def test_a_wrong_command_line_with_json_prints_the_error(raycloak):
    code, out, _ = raycloak("run", "--json")
    assert code == 2
    assert json.loads(out)["error"]["code"] == "usage"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["budget", "open", "--help"]])
def test_help_is_on_stdout(arguments, raycloak):
    code, out, _ = raycloak(*arguments)
    assert code == 0
    assert "--help" in out


def test_the_version_is_the_distributions_and_is_on_stdout(raycloak):
    assert raycloak("--version") == (0, f"raycloak {metadata.version('raycloak')}\n", "")


@pytest.mark.parametrize("text", ["a: [", "- just\n- a list\n", ""])
def test_a_file_that_is_no_configuration_is_bad_input(text, raycloak, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    code, _, err = raycloak("plan", str(path))
    assert code == 2
    assert err.startswith("error: config: ")


def test_a_missing_configuration_is_bad_input(raycloak, tmp_path):
    code, _, err = raycloak("run", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "none.yaml" in err


def test_plan_shows_what_will_be_spent_and_touches_no_budget(raycloak, config_file, raycloak_home):
    code, out, _ = raycloak("plan", str(config_file), "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan.keys() >= {
        *("noise_multiplier", "sample_rate", "steps", "epsilon", "accountant"),
        *("ring_bits", "gamma", "sensitivity_inflation", "bytes_per_step"),
    }
    assert plan["epsilon"] <= 8.0
    assert plan["num_examples"] == 1437
    assert plan["evidence_classes"] == ["simulated"]
    assert not raycloak_home.exists()
    code, out, _ = raycloak("plan", str(config_file))
    assert code == 0
    assert "noise multiplier" in out
    assert "ε by step" in out
    assert "SIMULATED (proves nothing about a machine)" in out


def test_plan_refuses_evidence_that_could_not_be_judged_and_says_whose_is_admitted(raycloak, config_file, tmp_path):
    policy = tmp_path / "policy.yaml"
    tdx = "{measurements: [], rtmr0: any, rtmr1: any, rtmr2: any, rtmr3: any}\n"
    policy.write_text(f"accepted_classes: [intel_tdx]\nanchors: [intel_tdx]\ntdx: {tdx}")
    (tmp_path / "collateral.yaml").write_text("tdx: []\n")
    for given, code in (
        (["policy=none.yaml"], "policy"),
        ([f"policy={policy}"], "collateral"),
        (["collateral=collateral.yaml"], "collateral"),
        ([f"policy={policy}", "collateral=none.yaml"], "collateral"),
    ):
        overrides = [word for each in given for word in ("--set", each)]
        status, out, _ = raycloak("plan", str(config_file), "--json", *overrides)
        assert (status, json.loads(out)["error"]["code"]) == (2, code)
    overrides = ("--set", f"policy={policy}", "--set", f"collateral={tmp_path / 'collateral.yaml'}")
    status, out, _ = raycloak("plan", str(config_file), "--json", *overrides)
    assert (status, json.loads(out)["evidence_classes"]) == (0, ["intel_tdx"])


@pytest.mark.parametrize(
    ("command", "heavy"),
    [("run", "raycloak.coordinator.runs.ray_start"), ("plan", "raycloak.coordinator.planning.dry_run")],
)
def test_guarantee_plan_and_run_look_before_they_import(command, heavy, raycloak, config_file, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, heavy, None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        bind = f"127.0.0.1:{server.getsockname()[1]}"
        code, _, err = raycloak(command, str(config_file), "--set", f"metrics.bind={bind}")
    assert code == 2
    assert err.startswith(f"error: metrics_bind: metrics.bind: cannot listen on {bind}: Address already in use.")
    assert raycloak(command, str(config_file))[2].splitlines()[-1].startswith("error: unexpected: ")
    if command == "run":
        monkeypatch.setenv("RAY_ADDRESS", bind)
        assert raycloak(command, str(config_file))[2].startswith(f"error: ray_unreachable: RAY_ADDRESS names {bind}")


def test_plan_takes_the_cap_of_a_named_account(raycloak, config_file):
    arguments = ("plan", str(config_file), "--set", "ledger.account=clinic", "--json")
    code, out, _ = raycloak(*arguments)
    assert (code, json.loads(out)["error"]["code"]) == (2, "ledger_missing")
    assert raycloak("budget", "open", "clinic", "--epsilon-cap", "6.5")[0] == 0
    code, out, _ = raycloak(*arguments)
    assert (code, json.loads(out)["epsilon_cap"]) == (0, 6.5)
    assert json.loads(out)["account"]["steps"] == json.loads(out)["steps_within_cap"]
    assert "clinic: ε 0.000 spent, 6.500 left" in raycloak(*arguments[:-1])[1]
    assert json.loads(out)["steps_within_cap"] < 60
    code, out, _ = raycloak("plan", str(config_file), "--set", "ledger.account=other", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (3, "account_unknown")


def test_plan_refuses_what_cannot_be_trained(raycloak, config_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def model(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))\n"
    )
    code, _, err = raycloak("plan", str(config_file), "--set", "model=mine:model")
    assert code == 2
    assert err.startswith("error: mixing_layer: ")
    assert "BatchNorm1d" in err


BROKEN = {
    "module": ("raise KeyError('row 17')", "model=mine:model", "module_function"),
    "model": ("def model(): raise KeyError('row 17')", "model=mine:model", "model_function"),
    "loss": ("def loss(output, label): raise KeyError('row 17')", "loss=mine:loss", "model_input"),
    "dataset": (
        "def rows(): raise KeyError('row 17')",
        "dataset={kind: module, function: 'mine:rows'}",
        "dataset_function",
    ),
    "batch": (
        "class Rows:\n  def __len__(self): return 9\n  def batch(self, ids): raise KeyError('row 17')\nrows = Rows",
        "dataset={kind: module, function: 'mine:rows'}",
        "dataset_function",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_guarantee_a_plan_shows_the_users_own_exception_with_debug(broken, raycloak, config_file, tmp_path):
    source, override, code = BROKEN[broken]
    (tmp_path / "mine.py").write_text(source)
    status, _, err = raycloak("plan", str(config_file), "--set", override)
    assert status == 2
    assert err.startswith(f"error: {code}: ")
    assert "KeyError" in err
    assert "Traceback" not in err
    _, _, err = raycloak("plan", str(config_file), "--debug", "--set", override)
    assert "KeyError: 'row 17'" in err
    assert str(tmp_path / "mine.py") in err


def test_budget_open_show_history(raycloak, raycloak_home):
    code, out, _ = raycloak("budget", "show", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "ledger_missing")
    code, out, _ = raycloak("budget", "open", "clinic", "--epsilon-cap", "8", "--delta", "1e-6", "--json")
    assert code == 0
    assert {**json.loads(out), "runs": []} == json.loads(out)
    assert json.loads(out)["epsilon_cap"] == 8.0
    code, out, _ = raycloak("budget", "show", "--json")
    (account,) = json.loads(out)["accounts"]
    assert (account["name"], account["delta"], account["spent_epsilon"]) == ("clinic", 1e-6, 0.0)
    code, out, _ = raycloak("budget", "history", "clinic", "--json")
    history = json.loads(out)
    assert history["verified"]
    assert [entry["kind"] for entry in history["entries"]] == ["account_opened"]
    assert "clinic" in raycloak("budget", "show")[1]
    assert "account opened" in raycloak("budget", "history")[1]


def test_budget_takes_another_ledger(raycloak, raycloak_home, tmp_path):
    url = f"sqlite:///{tmp_path / 'other.sqlite'}"
    assert raycloak("budget", "open", "clinic", "--epsilon-cap", "8", "--ledger", url)[0] == 0
    assert not raycloak_home.exists()
    ledger = PrivacyLedger(url, create=False)
    assert [account.name for account in ledger.view().accounts] == ["clinic"]
    ledger.close()


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [
        (["budget", "open", "clinic", "--epsilon-cap", "9"], 3, "account_mismatch"),
        (["budget", "open", "other", "--epsilon-cap", "8", "--delta", "1"], 2, "account_terms"),
        (["budget", "show", "nobody"], 3, "account_unknown"),
        (["budget", "show", "--ledger", "sqlite:///relative.sqlite"], 2, "ledger_url"),
    ],
)
def test_budget_refuses(arguments, code, name, raycloak):
    assert raycloak("budget", "open", "clinic", "--epsilon-cap", "8")[0] == 0
    got, out, _ = raycloak(*arguments, "--json")
    assert (got, json.loads(out)["error"]["code"]) == (code, name)


def test_doctor_fails_with_exit_code_4_if_a_check_does(raycloak, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    code, out, _ = raycloak("doctor", "--json")
    assert code == 4
    report = json.loads(out)
    assert report["ok"] is False
    assert {"name", "status", "finding", "remedy"} == set(report["checks"][0])
    token = tmp_path / "none"
    token.touch(mode=0o600)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    # Short: a test's own folder leaves Ray's sockets no room.
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    code, out, _ = raycloak("doctor")
    assert code == 0
    assert "raycloak doctor" in out


def test_python_m_coordinator_is_the_command(run_python):
    done = run_python("-m", "raycloak", "budget", "show", "--json")
    assert done.code == 2
    assert json.loads(done.stdout)["error"]["code"] == "ledger_missing"
    assert done.stderr.startswith("error: ledger_missing: ")


def test_the_demo_is_the_example():
    example = yaml.safe_load((EXAMPLES / "digits.yaml").read_text())
    assert {**example, "model": None} == {**demo_config(), "model": None}
    assert repr(resolve(example["model"], EXAMPLES)()) == repr(digits_model())
