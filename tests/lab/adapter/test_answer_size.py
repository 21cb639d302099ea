"""An answer is bounded: a block for more projections takes several requests, and each projection is charged once."""

import pytest
import torch

from raycloak.metrics.errors import ProtocolError
from raycloak_lab.adapter import adapter_pb2 as wire
from raycloak_lab.adapter import desk, session
from raycloak_lab.adapter.connection import _ANSWER_BYTES
from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter
from raycloak_lab.encrypted.parameters import ANSWER_BYTES
from tests.lab.adapter.conftest import NAMES, TOKENS

ONE_ANSWER = 2**16
"""One ciphertext, which holds what a projection of the tiny encoder answers."""


@pytest.fixture
def narrow(monkeypatch):
    """Let an answer hold one projection."""
    for end in (desk, session):
        monkeypatch.setattr(end, "ANSWER_BYTES", ONE_ANSWER)


@pytest.mark.usefixtures("narrow")
def test_projections_that_share_a_block_are_answered_request_by_request(site, encoder, adapted):
    given, seen = torch.randn(1, 150, 16), []
    with site() as served, EncryptedAdapter(encoder, served.address, progress=lambda *each: seen.append(each)) as model:
        found = model(given)
        # Two blocks for query and value of a layer, each sent for the one and the other; two for the next layer.
        assert model.traffic.blocks == 6
        assert model.traffic.tokens == 300
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert model.tokens_left == served.desk.tokens_left("me") == 2**20 - 2 * TOKENS
    expected = adapted(given)
    assert (found - expected).abs().max() < 1e-2 * (expected - encoder(given)).abs().max()


@pytest.mark.usefixtures("narrow")
def test_a_request_whose_answer_would_be_too_long_is_refused_before_it_is_charged(site, encoder):
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        own = model._session
        batch, _ = own._keys.encrypt(torch.ones(4, 16).numpy())
        request = wire.ApplyRequest(
            session=own._name, sequence=1, fingerprint=own._keys.fingerprint, projections=NAMES[:2], batch=batch
        )
        with pytest.raises(ProtocolError) as refusal:
            own._connection.call("Apply", iter([request]))
        assert refusal.value.code == "answer_size"
        assert served.desk.tokens_left("me") == 2**20
        model(torch.ones(1, 4, 16))


def test_a_client_takes_the_longest_answer():
    assert ANSWER_BYTES < _ANSWER_BYTES
