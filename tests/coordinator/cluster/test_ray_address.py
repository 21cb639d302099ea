"""A Ray that is not there is refused within seconds, before Ray itself is asked."""

import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from raycloak.coordinator.cluster import actors
from raycloak.coordinator.cluster.ray_address import check_address
from raycloak.metrics.errors import ConfigError


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
