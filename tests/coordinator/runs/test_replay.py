"""What a replay needs, checked before any process is started for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.runs import replay
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.user_code import UNPACKED, portable_base
from tests.coordinator.config.test_run import GOOD


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no execution begin."""
    monkeypatch.setattr(replay, "Execution", None)
    monkeypatch.setattr(RunFolder, "manifest", lambda folder: _TEN_STEPS)


_TEN_STEPS = SimpleNamespace(computation=SimpleNamespace(mechanism=SimpleNamespace(steps=10)))


@pytest.mark.usefixtures("never")
def test_a_run_whose_secret_was_destroyed_is_not_replayed_and_says_why_and_what_to_do():
    folder = RunFolder.create(parse_config({**GOOD, "model": "m:f"}), "ab12", ".", None)
    with pytest.raises(ConfigError) as refused:
        replay.replay(folder.path, (0, 2), 2, print)
    assert refused.value.code == "secret_destroyed"
    assert "destroyed when the run was complete" in refused.value.message
    assert "secret_retention=keep" in refused.value.remedy
    (home.home() / "orchestrator").mkdir(exist_ok=True)
    (home.home() / "orchestrator" / "ab12.secret").touch()
    with pytest.raises(ConfigError, match="ledger_missing"):
        replay.replay(folder.path, (0, 2), 2, print)


@pytest.mark.usefixtures("never")
def test_a_secret_of_the_users_own_has_to_be_there(tmp_path: Path):
    gone = tmp_path / "secret.hex"
    folder = RunFolder.create(parse_config({**GOOD, "model": "m:f"}), "ab12", ".", str(gone))
    with pytest.raises(ConfigError, match=r"run_secret: .*secret\.hex, which is not there"):
        replay.replay(folder.path, (0, 2), 2, print)
    gone.touch()
    with pytest.raises(ConfigError, match="ledger_missing"):
        replay.replay(folder.path, (0, 2), 2, print)


class _Asked(Exception):
    """Raised in place of an execution, with the base that it was given."""


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_replay_finds_the_runs_own_code_from_any_directory(
    is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(config: object, model: object, base: str, notice: object, phase: object) -> None:
        raise _Asked(base)

    project, elsewhere = tmp_path / UNPACKED / "project", tmp_path / "elsewhere"
    project.mkdir(parents=True)
    elsewhere.mkdir()
    monkeypatch.setattr(replay, "Execution", asked)
    monkeypatch.setattr(replay, "_charged_steps", lambda config, folder: 0)
    monkeypatch.setattr(RunFolder, "manifest", lambda folder: _TEN_STEPS)
    (tmp_path / "secret.hex").touch()
    monkeypatch.chdir(project)
    settings = parse_config({**GOOD, "model": "own_code:model"})
    folder = RunFolder.create(settings, "ab12", portable_base(project), str(tmp_path / "secret.hex"))
    assert folder.record.base == "."
    monkeypatch.chdir(elsewhere)
    if is_gone:
        project.rmdir()
    with pytest.raises(_Asked) as given:
        replay.replay(folder.path, (0, 2), 2, print)
    assert str(given.value) == ("." if is_gone else str(project))
