"""A whole service in this process: what it says of itself, and its end. Its runs are in tests/ray/test_service.py."""

import json
import logging
import socket
import time

import pytest

from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.client.service_client import ServiceClient
from raycloak.coordinator.service import service as service_module
from raycloak.coordinator.service.pipe import Ready
from raycloak.coordinator.service.service import TrainingService
from raycloak.metrics.errors import ConfigError
from tests.coordinator.service.scripted import GIVEN, ScriptedDriver, World, settings

DEADLINE_S = 60


class Drivers:
    """Drivers that admit their members and then do nothing: a step of theirs lasts for ever.

    Args:
        obey: whether they end when they are told to.
    """

    def __init__(self, folder, obey):
        self.world, self.obey, self.killed, self.of = World(folder / "world"), obey, [], {}

    def start(self, client_id, begin):
        self.of[client_id] = ScriptedDriver(self.world, begin, 1)
        for report in self.of[client_id].pump():
            self.tell(client_id, report)
            if isinstance(report, Ready):
                return

    def send(self, client_id, command):
        pass

    def stop(self, client_id):
        if self.obey:
            self.end(client_id, 0)

    def kill(self, client_id):
        self.killed.append(client_id)
        self.end(client_id, -9)

    def end(self, client_id, code):
        del self.of[client_id]
        self.tell(client_id, Exited(code=code, last_words=""))


@pytest.fixture
def serve(tmp_path, raycloak_home):
    """Return a maker of services, which a test ends."""

    def make(drivers, **fields):
        return TrainingService(settings(**{"metrics": {"bind": "127.0.0.1:0"}} | fields), tmp_path, drivers)

    return make


def admitted(service):
    """Create a client, and return its id once its run is admitted."""
    with ServiceClient(service.facts.address, "north") as connection:
        client = connection.create_training_client(GIVEN)
        until = time.monotonic() + DEADLINE_S
        while client.refresh().status != "READY" and time.monotonic() < until:
            time.sleep(0.01)
        return client.client_id


@pytest.mark.parametrize("obey", [True, False])
def test_a_driver_that_does_not_end_with_the_service_is_killed_and_its_run_goes_on_later(
    serve, tmp_path, monkeypatch, caplog, obey
):
    monkeypatch.setattr(service_module, "DRIVERS_GRACE_S", DEADLINE_S if obey else 0.0)
    drivers = Drivers(tmp_path, obey)
    service = serve(drivers)
    client_id = admitted(service)
    with caplog.at_level(logging.WARNING):
        service.stop()
    assert drivers.killed == ([] if obey else [client_id])
    assert [each.message for each in caplog.records if "was killed" in each.message] == [
        f"client {each}: its driver did not end its step in time and was killed" for each in drivers.killed
    ]
    drivers = Drivers(tmp_path, obey=True)
    with serve(drivers) as service, ServiceClient(service.facts.address, "north") as connection:
        client = connection.get_client(client_id)
        assert (client.status, client.error) == ("READY", None)
        client.forward_backward()
        until = time.monotonic() + DEADLINE_S
        while client_id not in drivers.of and time.monotonic() < until:
            time.sleep(0.01)
        assert drivers.of[client_id].begin.run_id == client.summary.run_id


@pytest.mark.parametrize("field", ["bind", "metrics"])
def test_a_service_that_cannot_listen_starts_no_driver_and_leaves_its_store_to_the_next(serve, tmp_path, field):
    with serve(Drivers(tmp_path, obey=True)) as service, ServiceClient(service.facts.address, "north") as connection:
        client = connection.create_training_client(GIVEN)
        client.forward_backward()
        client.detach()
    drivers = Drivers(tmp_path, obey=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError):
            serve(drivers, **{field: {"bind": address} if field == "metrics" else address})
    assert drivers.of == {}
    with serve(drivers) as service, ServiceClient(service.facts.address, "north") as connection:
        assert len(connection.list_clients()) == 1


@pytest.mark.parametrize("evidence", ["simulated", "hardware"])
def test_a_tenant_is_told_the_evidence_that_the_policy_asks_for_and_nothing_of_anothers_run(serve, tmp_path, evidence):
    policy = {"accepted_classes": ["amd_sev_snp"], "anchors": ["amd_sev_snp"], "sev_snp": {"measurements": []}}
    (tmp_path / "policy.yaml").write_text(json.dumps(policy))
    (tmp_path / "collateral.yaml").write_text("snp_vcek_crls: []")
    run = {"policy": "policy.yaml", "collateral": "collateral.yaml"} if evidence == "hardware" else {}
    with (
        serve(Drivers(tmp_path, obey=True), run=run) as service,
        ServiceClient(service.facts.address, "south") as south,
    ):
        assert south.capabilities().evidence_class == evidence
        # Its scripted driver says that its members presented simulated evidence.
        client_id = admitted(service)
        assert south.capabilities().evidence_class == evidence
        with ServiceClient(service.facts.address, "north") as north:
            assert north.get_client(client_id).summary.evidence_class == "simulated"
            assert north.capabilities().evidence_class == evidence
