"""A run directory keeps what a later execution needs, and two executions never meet."""

import os
import signal
import subprocess
import sys

import pytest

from raycloak.coordinator.config import home
from raycloak.coordinator.record.folder import RunFolder, run_lock, unfinished_run
from raycloak.coordinator.record.same_run import require_same_config
from raycloak.coordinator.runs.execution import Execution
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import ConfigError, RefusedError
from tests.conftest import ROOT
from tests.protocol import config


def made(name="run", run_id="ab" * 8, **fields):
    return RunFolder.create(config(name=name), run_id, "/base", fields.get("secret_file"))


def code(kind, call, *arguments):
    with pytest.raises(kind) as refusal:
        call(*arguments)
    return refusal.value.code


def test_a_directory_opened_again_holds_what_was_begun():
    folder = made(secret_file="/secret")
    again = RunFolder.open(folder.path)
    assert again.record == folder.record
    assert (again.record.status, again.record.secret_file, again.record.base) == ("running", "/secret", "/base")
    assert again.config() == config()
    assert again.manifest() is None
    again.mark("stopped")
    assert RunFolder.open(folder.path).record.status == "stopped"
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "run.json"]


def test_another_ledger_is_no_resume():
    with pytest.raises(RefusedError, match=r"ledger\.url was postgresql://ada@db\.example"):
        require_same_config(*(config([f"ledger.url=postgresql://{who}@db.example/l"]) for who in ("ada", "eve")))


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json"])
def test_what_is_no_run_directory_is_refused(tmp_path, damage):
    assert code(ConfigError, RunFolder.open, tmp_path) == "not_a_run"
    folder = made()
    (folder.path / "run.json").write_bytes(damage)
    assert code(ConfigError, RunFolder.open, folder.path) == "not_a_run"
    (folder.path / "config.yaml").write_text("[")
    assert code(ConfigError, folder.config) == "not_a_run"
    (folder.path / "manifest.json").write_bytes(damage)
    assert code(ConfigError, folder.manifest) == "not_a_run"


def test_the_newest_unfinished_run_of_a_name_is_found():
    assert code(ConfigError, unfinished_run, "run") == "nothing_to_resume"
    first, second, done, void, other = (made("run" if i < 4 else "other", f"{i:016x}") for i in range(5))
    done.mark("done")
    void.mark("void")
    assert unfinished_run("run").path == second.path
    second.mark("done")
    assert unfinished_run("run").path == first.path
    first.mark("failed")
    assert unfinished_run("run").path == first.path
    assert unfinished_run("other").path == other.path


def test_a_run_is_held_by_one_process_and_freed_by_its_death(tmp_path):
    holder = (
        "import sys, time\nfrom raycloak.coordinator.record.folder import run_lock\n"
        "with run_lock('ab'):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            assert code(RefusedError, lambda: run_lock("ab").__enter__()) == "run_in_progress"
            with run_lock("cd"):
                pass
        finally:
            process.send_signal(signal.SIGKILL)
    with run_lock("ab"):
        assert home.run_lock_file("ab").exists()
    with run_lock("ab"):
        pass


@pytest.mark.parametrize(("has_model", "named"), [(True, "nothing_to_resume"), (False, "secret_destroyed")])
def test_a_run_that_died_before_it_could_say_that_it_is_done_is_done(monkeypatch, tmp_path, has_model, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples.npz").touch()
    folder = made()
    if has_model:
        (folder.path / "parameters.safetensors").touch()
    trainer = Trainer(folder.config(), resume=True)

    def destroyed(self, folder):
        raise ConfigError("secret_destroyed", "the secret is gone")

    monkeypatch.setattr(Execution, "resume", destroyed)
    assert code(ConfigError, trainer.train) == named
    assert RunFolder.open(folder.path).record.status == ("done" if has_model else "running")
