"""A loop over `raycloak serve` from another network, killed again and again: the bytes of ``raycloak run``."""

import datetime as dt
import ipaddress
import json
import os
import re
import selectors
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from raycloak.coordinator.cluster.processes import descendants, process_table
from raycloak.coordinator.config.home import ledger_url
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.ledger.entries import StepCharged
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.service.tenants import new_token
from raycloak_lab.bench.chaos.cluster import role
from tests.conftest import ROOT
from tests.namespaces import NoNamespaces, other_network
from tests.protocol import settle
from tests.ray.looping import CONFIG, STEPS, SUBMITTED

DEADLINE_S = 600
PORT = 7443
"""Nobody else has it on an address that only this test has, and a service that comes back must have the same."""
DIGITS = {"kind": "digits", "public": True}
RUN = {"num_workers": 2, "virtual_workers": 8, "secret_retention": "keep", "metrics": {"bind": "127.0.0.1:0"}}


class Child:
    """A process that says lines of JSON, of which each is read once."""

    def __init__(self, command, log: Path, environment) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self._said = b""

    def heard(self):
        """Return the next line."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._said:
                assert selector.select(DEADLINE_S), f"it said nothing in time\n{self.log.read_text()}"
                piece = os.read(self.process.stdout.fileno(), 65536)
                assert piece, f"it ended\n{self.log.read_text()}"
                self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def go(self) -> None:
        """Answer a line."""
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def end(self, number: int) -> int:
        """Send a signal; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self.process.stdin.close()
        self.process.stdout.close()
        return code


def certify(folder: Path, address: str) -> None:
    """Write a certificate for a service at ``address``, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "service")])
    now = dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "service.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "service.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))


@pytest.fixture
def network():
    with ExitStack() as stack:
        try:
            found = stack.enter_context(other_network())
        except NoNamespaces as reason:
            pytest.skip(f"cannot make a network namespace: {reason}")
        yield found


@pytest.fixture
def site(network, tmp_path, ray_cluster):
    """A folder with everything that a service and its client are given; and starters of both, which end with it."""
    certify(tmp_path, network.here)
    token, hashed = new_token()
    (tmp_path / "token").write_text(token)
    settings = {
        "bind": f"{network.here}:{PORT}",
        "tls": {"certificate": "service.pem", "key": "service.key"},
        "run": RUN,
        "datasets": {"digits": {"dataset": DIGITS}},
        "tenants": {
            "hospital": {"token_sha256": [{"sha256": hashed}], "datasets": ["digits"], "code": [CONFIG["model"]]}
        },
        "metrics": {"bind": "127.0.0.1:0"},
    }
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(settings))
    environment = {**os.environ, **ray_cluster.environment}
    children = []

    def start(*command, log):
        children.append(Child(command, tmp_path / log, environment))
        return children[-1]

    def serve():
        service = start(
            sys.executable, "-m", "raycloak", "serve", str(tmp_path / "service.yaml"), "--json", log="service.log"
        )
        assert service.heard()["address"] == settings["bind"]
        return service

    def loop(*client_id):
        program = (sys.executable, "-m", "tests.ray.looping", settings["bind"], str(tmp_path), *client_id)
        return start(*network.command, *program, log="client.log")

    yield serve, loop
    for each in children:
        each.end(signal.SIGKILL)


def workers():
    """Return the worker processes below this one, which started the cluster; the newest last."""
    found = [each for each in descendants([os.getpid()], process_table()) if role(each) == "worker"]
    return sorted((each for each in found if each.state not in "ZX"), key=lambda each: (each.started, each.pid))


def test_a_loop_from_another_network_has_the_bytes_of_a_run_though_all_parts_of_it_are_killed(
    site, tmp_path, raycloak_home, monkeypatch
):
    """The service is killed twice, once between a step's computation and its release; so are a caller and a worker."""
    serve, loop = site
    settle(raycloak_home)
    service, caller = serve(), loop()
    client_id = caller.heard()["client"]
    service.end(signal.SIGKILL)
    service = serve()
    caller.go()
    assert caller.heard() == {"submitted": SUBMITTED}
    service.end(signal.SIGKILL)
    caller.end(signal.SIGKILL)
    service, caller = serve(), loop(client_id)
    assert caller.heard() == {"computed": SUBMITTED}
    # Its part of this step was computed; the next step finds that it is gone.
    os.kill(workers()[-1].pid, signal.SIGKILL)
    caller.go()
    assert caller.heard() == {"computed": SUBMITTED + 1}
    caller.go()
    told = caller.heard()
    caller.go()
    assert service.end(signal.SIGTERM) == 0
    log = (raycloak_home / "training-service" / "logs" / f"{client_id}.log").read_text()
    assert re.search(r"worker-\d left: died", log), log

    ledger = PrivacyLedger(ledger_url(), create=False)
    charges = [entry.event.step for entry in ledger.history() if isinstance(entry.event, StepCharged)]
    ledger.close()
    assert charges == list(range(STEPS)), "what was repeated is charged once"
    assert told["steps"] == list(range(1, STEPS + 1))

    (secret,) = raycloak_home.rglob(f"{told['run_id']}.secret")
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "other"))
    settle(tmp_path / "other")
    # Of the fewest processes that make a run.
    alone = {"num_workers": 1, "secure_aggregation": False}
    config = parse_config({**CONFIG, **RUN, **alone, "dataset": DIGITS})
    reports = []
    Trainer(config, run_secret=secret, progress=reports.append, notice=lambda line: None).train()
    assert told["digests"] == [report.model_digest for report in reports]
    assert told["epsilons"] == [report.epsilon for report in reports]
