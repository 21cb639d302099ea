"""A Ray that is not there is refused within seconds, and so is a folder that a local one could not use."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from raycloak.coordinator.cluster import actors, ray_checks
from raycloak.coordinator.cluster.ray_checks import check_address
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
        ray_checks.check_temp()
    assert (caught.value.code, caught.value.exit_code) == ("ray_temp", 2)
    assert "RAY_TMPDIR" in caught.value.remedy


def test_the_longest_path_that_fits_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The path of a socket as Ray names it, with a process id of seven digits, has 107 bytes at most."""
    longest = ray_checks.SOCKET_BYTES - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", "d" * longest)
    ray_checks.check_temp()
    monkeypatch.setenv("TMPDIR", "d" * (longest + 1))
    with pytest.raises(ConfigError, match="1 bytes too long"):
        ray_checks.check_temp()
    # Bytes count, and not letters.
    monkeypatch.setenv("TMPDIR", "ü" * longest)
    with pytest.raises(ConfigError, match="too long"):
        ray_checks.check_temp()


def test_rays_own_variable_comes_before_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ray_checks, "SOCKET_BYTES", 1000)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_checks.temp_folder() == (tmp_path, "RAY_TMPDIR")
    ray_checks.check_temp()


def test_the_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ray_checks, "SOCKET_BYTES", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    ray_checks.check_temp()
    # A superuser may write anywhere, so this user is made one who may not.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "ray")
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "ray").stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"/ray belongs to another user, and cannot be written to") as caught:
        ray_checks.check_temp()
    assert caught.value.code == "ray_temp"


def test_a_file_in_the_place_of_the_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ray_checks, "SOCKET_BYTES", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").write_text("")
    with pytest.raises(ConfigError, match="/ray is not a folder"):
        ray_checks.check_temp()


def test_what_ray_says_as_it_fails_to_start_is_one_line_with_a_code():
    error = ray_checks.start_failed(RuntimeError("The GCS has died.\nwith a trace"))
    assert error.code == "ray_start"
    assert error.message == "Ray does not start on this machine: The GCS has died."
    assert ray_checks.start_failed(OSError()).message == "Ray does not start on this machine: OSError."


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def address_of(opened: socket.socket) -> str:
    return f"127.0.0.1:{opened.getsockname()[1]}"


def test_guarantee_a_dead_address_is_refused_at_once_and_by_name(listener: socket.socket):
    address = address_of(listener)
    listener.close()
    for named in (address, f"ray://{address}"):
        with pytest.raises(ConfigError, match=rf"ray_unreachable: RAY_ADDRESS names {named}.*refused") as refused:
            check_address(named)
        assert "unset RAY_ADDRESS" in refused.value.remedy


def test_a_port_where_no_ray_answers_is_refused_in_time(listener: socket.socket):
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"ray_unreachable: .*no Ray answers"):
        check_address(address_of(listener), deadline_s=0.6)
    assert time.monotonic() - began < 30


def test_with_tls_an_open_port_is_enough(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_address(address_of(listener))


def test_a_server_that_speaks_grpc_passes():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        check_address(f"127.0.0.1:{port}", deadline_s=60)
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("address", ["nowhere", "host:", ":6379", "host:x", "host:70000", "host:0", "http://host:8265"])
def test_what_is_no_address_is_bad_input(address: str):
    with pytest.raises(ConfigError, match="ray_address: RAY_ADDRESS is") as refused:
        check_address(address)
    assert refused.value.exit_code == 2


def test_names_that_ray_resolves_are_left_to_it_and_its_answer_has_a_name(monkeypatch: pytest.MonkeyPatch):
    check_address("auto")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(actors.ray, "is_initialized", lambda: False)

    def nobody(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please start one.\nmore")

    monkeypatch.setattr(actors.ray, "init", nobody)
    with pytest.raises(ConfigError, match=r"ray_unreachable: .*Could not find any running Ray instance"):
        actors.connect(1)


def test_a_dead_address_never_reaches_ray(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    address = address_of(listener)
    listener.close()
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(actors.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(actors.ray, "init", lambda **_: sys.exit("Ray would wait for minutes"))
    with pytest.raises(ConfigError, match="ray_unreachable"):
        actors.connect(1)
