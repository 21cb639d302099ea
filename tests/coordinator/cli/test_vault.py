"""``raycloak vault`` as a process: it says where it listens, serves its peer, and ends with SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.vaults.machine_vault import MachineVault
from raycloak.coordinator.vaults.openings import PlatformOpening
from raycloak.coordinator.vaults.platform_vault import PlatformVault
from raycloak.metrics.errors import ConfigError
from tests.coordinator.vaults.listeners import stop, vaults, written
from tests.process_ends import has_ended

DEADLINE_S = 120


@contextmanager
def vault(role: str, settings: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command."""
    command = [sys.executable, "-m", "raycloak", "vault", role, str(settings), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_with_its_vaults_and_its_socket(tmp_path, number):
    state, socket = tmp_path / "vendor", tmp_path / "platform.sock"
    settings = written(tmp_path, "platform", state=str(state), vaults=[str(os.getuid())], sessions=2)
    with vault("platform", settings) as program:
        facts = json.loads(program.stdout.readline())
        policy = simulated_policy(SimulatedVendor.load_or_create(state), code_measurement())
        assert facts == {
            "role": "platform",
            "socket": str(socket),
            "peer": str(os.getuid()),
            "sessions": 2,
            "simulated_policy": policy.digest().hex(),
        }
        with MachineVault(str(socket), PlatformOpening()) as connection:
            root = connection.ask(PlatformVault.root)
            assert root == SimulatedVendor.load_or_create(state).root_der
            (pid,) = vaults(program.pid)
            # It is stopped, and so does not see the end of its relay.
            stop(pid)
            program.send_signal(number)
            assert program.wait(DEADLINE_S) == 0, program.stderr.read()
            assert has_ended(pid, DEADLINE_S)
        assert not socket.exists()
    with pytest.raises(ConfigError, match="vault_unreachable"):
        MachineVault(str(socket), PlatformOpening())


def test_a_second_one_at_the_socket_is_refused_and_one_that_was_killed_is_replaced(tmp_path):
    settings = written(tmp_path, "aggregator")
    with vault("aggregator", settings) as program:
        assert json.loads(program.stdout.readline())["socket"] == str(tmp_path / "aggregator.sock")
        with vault("aggregator", settings) as second:
            assert second.wait(DEADLINE_S) == 2
            assert json.load(second.stdout)["error"]["code"] == "vault_socket"
        program.kill()
        program.wait(DEADLINE_S)
    assert (tmp_path / "aggregator.sock").is_socket()
    with vault("aggregator", settings) as third:
        assert json.loads(third.stdout.readline())["role"] == "aggregator"


def test_a_role_or_settings_that_are_none_end_it_at_once(tmp_path, raycloak):
    settings = written(tmp_path, "aggregator")
    code, out, _ = raycloak("vault", "driver", str(settings), "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "usage")
    code, out, _ = raycloak("vault", "aggregator", str(tmp_path / "none.yaml"), "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "vault_settings")
    code, out, _ = raycloak("vault", "ledger", str(settings), "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "config")
    settings = written(tmp_path, "aggregator", peer="nobody-of-this-name")
    code, out, _ = raycloak("vault", "aggregator", str(settings), "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "vault_settings")
    assert not (tmp_path / "aggregator.sock").exists()
    settings.chmod(0o666)
    code, out, _ = raycloak("vault", "aggregator", str(settings), "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "vault_settings")
