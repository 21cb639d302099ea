"""A folder that a local Ray could not use is refused before Ray starts, by the name of the variable that names it."""

import os
from pathlib import Path

import pytest

from raycloak.coordinator.cluster import local_ray
from raycloak.metrics.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("named", ["TMPDIR", "RAY_TMPDIR"])
def test_a_path_too_long_for_a_socket_is_refused_by_the_name_of_its_variable(
    named: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(named, f"/tmp/{'d' * 120}")
    with pytest.raises(
        ConfigError, match=f"{named} names /tmp/ddd.* too long for the paths of Ray's sockets"
    ) as caught:
        local_ray.check_temp()
    assert (caught.value.code, caught.value.exit_code) == ("ray_temp", 2)
    assert "RAY_TMPDIR" in caught.value.remedy


def test_the_longest_path_that_fits_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The path of a socket as Ray names it, with a process id of seven digits, has 107 bytes at most."""
    longest = local_ray.SOCKET_BYTES - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", "d" * longest)
    local_ray.check_temp()
    monkeypatch.setenv("TMPDIR", "d" * (longest + 1))
    with pytest.raises(ConfigError, match="1 bytes too long"):
        local_ray.check_temp()
    # Bytes count, and not letters.
    monkeypatch.setenv("TMPDIR", "ü" * longest)
    with pytest.raises(ConfigError, match="too long"):
        local_ray.check_temp()


def test_rays_own_variable_comes_before_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(local_ray, "SOCKET_BYTES", 1000)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert local_ray.temp_folder() == (tmp_path, "RAY_TMPDIR")
    local_ray.check_temp()


def test_the_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(local_ray, "SOCKET_BYTES", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    local_ray.check_temp()
    # A superuser may write anywhere, so this user is made one who may not.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "ray")
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "ray").stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"/ray belongs to another user, and cannot be written to") as caught:
        local_ray.check_temp()
    assert caught.value.code == "ray_temp"


def test_a_file_in_the_place_of_the_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(local_ray, "SOCKET_BYTES", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").write_text("")
    with pytest.raises(ConfigError, match="/ray is not a folder"):
        local_ray.check_temp()


def test_what_ray_says_as_it_fails_to_start_is_one_line_with_a_code():
    error = local_ray.start_failed(RuntimeError("The GCS has died.\nwith a trace"))
    assert error.code == "ray_start"
    assert error.message == "Ray does not start on this machine: The GCS has died."
    assert local_ray.start_failed(OSError()).message == "Ray does not start on this machine: OSError."
