"""The worker in its own process: neither what one client sends nor a hung worker holds up everybody else for ever."""

import os
import signal
import time
from typing import ClassVar

import numpy as np
import pytest

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import Challenge
from raycloak.attestation.core.messages import Envelope, Message, parse
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.config import home
from raycloak.metrics.errors import RaycloakError, RunFailedError
from raycloak_lab.adapter import worker_process
from raycloak_lab.adapter.registration import ClientOrchestrator
from raycloak_lab.adapter.worker_process import AdapterVault, WorkerProcess
from raycloak_lab.encrypted.adapter_worker import Adapter, LowRank

RELEASED = b"keys"


class TinyOpening(Message):
    DOMAIN: ClassVar[str] = "test/vault/adapter/v1"
    fails: bool
    tokens: int = 128
    simulated: bool = True


class FailingPlatform:
    """A platform whose quotes fail in a way that nobody foresaw."""

    def collect(self, report_data):
        raise ZeroDivisionError


class TinyAdapterVault(AdapterVault):
    """A worker of a tiny adapter."""

    OPENING = TinyOpening

    def _adapter(self, opening):
        return Adapter({"query": LowRank(np.ones((2, 16)), np.ones((16, 2)))})

    def _source(self, opening):
        return FailingPlatform() if opening.fails else super()._source(opening)


def tiny_worker(*, fails=False):
    return WorkerProcess(TinyOpening(fails=fails), f"{__name__}:TinyAdapterVault")


@pytest.fixture
def worker():
    started = tiny_worker()
    yield started
    started.stop()


@pytest.fixture
def client(worker, tmp_path):
    """Return a client's orchestrator."""
    vendor = SimulatedVendor.load_or_create(home.simulator_folder())
    own = ClientOrchestrator(
        tmp_path / "client",
        simulated_policy(vendor, code_measurement()),
        vendor.collateral(int(time.time())),
        fingerprint=digest(RELEASED),
        adapter_digest=worker.facts.adapter_digest,
        worker_key=worker.facts.identity_key,
    )
    yield own
    own.finish()


def code(call):
    with pytest.raises(RaycloakError) as refusal:
        call()
    return refusal.value.code


def test_a_contract_without_keys_of_an_orchestrator_is_refused_and_the_worker_serves_on(worker, client):
    terms = parse(ServiceContract, client.contract).model_copy(update={"orchestrator_ml_dsa": b"short"})
    asked = parse(Challenge, client.challenge()).model_copy(update={"manifest_digest": terms.digest()})
    worker.present("hostile", terms.encode(), client.policy, asked.encode())
    nothing = KeyRelease(package=Envelope(body=b"", signature=b""), proof=b"")
    assert code(lambda: worker.register("hostile", nothing, digest(RELEASED), b"")) == "malformed"
    assert worker.present("other", client.contract, client.policy, client.challenge())


def test_a_package_without_the_key_is_refused_and_the_worker_serves_on(worker, client, monkeypatch):
    presented = worker.present("hostile", client.contract, client.policy, client.challenge())
    desk, grant = client._session.keys, client._session.keys.grant
    monkeypatch.setattr(desk, "grant", lambda member, epoch, _, seen: grant(member, epoch, (), seen))
    given = client.release(presented, RELEASED)
    refused = code(lambda: worker.register("hostile", given.release, digest(RELEASED), given.sealed))
    assert refused == "key_package_mismatch"
    assert worker.present("other", client.contract, client.policy, client.challenge())


def test_an_error_that_nobody_foresaw_ends_one_call_and_not_the_worker(client):
    failing = tiny_worker(fails=True)
    try:
        asked = parse(Challenge, client.challenge()).encode()
        for _ in range(2):
            assert code(lambda: failing.present("one", client.contract, client.policy, asked)) == "adapter_failed"
    finally:
        failing.stop()


def test_a_worker_that_hangs_is_given_up_though_it_reads_nothing(worker, monkeypatch):
    """The block is longer than what a socket holds, so it cannot even be sent."""
    monkeypatch.setattr(worker_process, "CALL_DEADLINE_S", 0.5)
    os.kill(worker._vault.pid, signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(RunFailedError) as refusal:
            worker.apply("one", bytes(32), bytes(2**22), ["query"])
        assert refusal.value.code == "worker_gone"


def test_ctrl_c_leaves_the_worker_to_the_server(worker, client):
    os.kill(worker._vault.pid, signal.SIGINT)
    assert worker.present("one", client.contract, client.policy, client.challenge())
