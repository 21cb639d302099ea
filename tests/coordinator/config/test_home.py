"""The state folder and the paths below it."""

from pathlib import Path

import pytest

from raycloak.coordinator.config import home
from raycloak.metrics.errors import ConfigError


def test_home_is_created_private(raycloak_home: Path):
    assert home.home() == raycloak_home
    assert raycloak_home.stat().st_mode & 0o777 == 0o700


def test_a_relative_home_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYCLOAK_HOME", "state")
    with pytest.raises(ConfigError, match="relative_home"):
        home.ledger_url()
    assert list(tmp_path.iterdir()) == []


def test_the_default_is_below_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("RAYCLOAK_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home.home() == tmp_path / ".local/share/raycloak"


def test_a_home_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ConfigError, match="home_unusable"):
        home.home()


def test_no_folder_below_home_is_open_to_others(raycloak_home: Path):
    made = home.packages_folder("ab12")
    assert [folder.stat().st_mode & 0o777 for folder in (made, made.parent)] == [0o700, 0o700]


def test_paths_below_home(raycloak_home: Path):
    assert home.ledger_url() == f"sqlite:///{raycloak_home}/ledger.sqlite"
    assert home.run_lock_file("ab12") == raycloak_home / "orchestrator" / "ab12.lock"
    assert home.simulator_folder() == raycloak_home / "simulator"
    for name in ("orchestrator", "simulator"):
        assert (raycloak_home / name).stat().st_mode & 0o777 == 0o700


def test_each_execution_gets_a_new_run_folder(raycloak_home: Path):
    folders = [home.create_run_folder("demo", "ab12") for _ in range(3)]
    assert [folder.name for folder in folders] == ["demo-ab12", "demo-ab12-2", "demo-ab12-3"]
    assert all(folder.parent == raycloak_home / "runs" and not list(folder.iterdir()) for folder in folders)
