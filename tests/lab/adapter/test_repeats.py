"""What a client must not get twice: noise for one request, and tokens for one adapter."""

import numpy as np
import pytest
import torch

from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.config import home
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.metrics.errors import ProtocolError, RefusedError
from raycloak_lab.adapter import adapter_pb2 as wire
from raycloak_lab.adapter import session
from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter
from raycloak_lab.encrypted.adapter_worker import Adapter, AdapterWorker, LowRank
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.parameters import BlockShape
from tests.lab.adapter.conftest import NAMES, TOKENS


def test_a_request_that_is_repeated_in_another_session_gets_the_same_bytes(site, encoder, monkeypatch):
    """With fresh noise, an average over sessions would take some of it away."""
    with site() as served:
        shape = served.desk.facts.shape
        keys = ClientKeys(BlockShape(shape.tokens, shape.rank))
        monkeypatch.setattr(session, "ClientKeys", lambda _: keys)
        batch, _ = keys.encrypt(np.ones((4, 16)))
        answers = []
        for _ in range(2):
            with EncryptedAdapter(encoder, served.address) as model:
                own = model._session
                request = wire.ApplyRequest(
                    session=own._name, sequence=1, fingerprint=keys.fingerprint, projections=NAMES[:2], batch=batch
                )
                answers.append(list(own._connection.call("Apply", iter([request])).answers))
        assert answers[0] == answers[1]
        assert served.desk.tokens_left("me") == 2**20 - 2 * TOKENS


@pytest.mark.parametrize("change", [{"shared": b"another head"}, {}])
def test_budgets_are_of_the_matrices_alone(matrices, change):
    """Another shared head is another adapter to clients, and the matrices have told as much as before."""
    platform = LocalPlatform(SimulatedVendor.load_or_create(home.simulator_folder()).platform())
    first = AdapterWorker(Adapter(matrices, b"a head"), TOKENS, platform).facts
    other = AdapterWorker(Adapter(matrices, **change), TOKENS, platform).facts
    assert first.adapter_digest != other.adapter_digest
    assert first.matrices_digest == other.matrices_digest
    name, each = next(iter(matrices.items()))
    changed = {**matrices, name: LowRank(each.down, each.up * 2)}
    assert AdapterWorker(Adapter(changed, b"a head"), TOKENS, platform).facts.matrices_digest != first.matrices_digest


def test_nothing_is_charged_in_a_session_without_keys(site, encoder):
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        own = model._session._orchestrator
        session_name, _ = served.desk.begin("me", own.contract, own.policy, own.challenge())
        batch = bytes(served.desk.batch_bytes(NAMES[:1]))
        with pytest.raises(ProtocolError) as refusal:
            served.desk.apply("me", session_name, 1, model._session._keys.fingerprint, batch, NAMES[:1])
        assert refusal.value.code == "keys_of_another_session"
        assert served.desk.tokens_left("me") == 2**20


def test_a_block_is_charged_before_it_is_computed(site, encoder, monkeypatch):
    """What a worker computed in part may have shown, so an answer that fails costs its tokens."""

    def fails(*_):
        raise RefusedError("adapter_failed", "as a test wants it.", "Nothing.")

    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        monkeypatch.setattr(served.worker, "apply", fails)
        with pytest.raises(RefusedError):
            model(torch.ones(1, 4, 16))
        assert served.desk.tokens_left("me") == 2**20 - TOKENS
