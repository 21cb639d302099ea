"""Strangers at an adapter's server: their connections end within seconds, and a client's session goes on."""

import time
from contextlib import ExitStack

import torch

from raycloak_lab.adapter import server
from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter
from raycloak_lab.adapter.introduction import introduction_digest
from raycloak_lab.encrypted.parameters import ANSWER_BYTES
from tests.attestation.serving import tls_connection
from tests.raw_http2 import connect, is_closed, opened, unfinished_calls

APPLY = "/raycloak.adapter.v1.Adapter/Apply"
DEADLINE_S = 60


def test_guarantee_strangers_connections_end_within_seconds_and_a_client_goes_on(site, encoder, tmp_path):
    given = torch.ones(1, 5, 16)
    with site() as served, EncryptedAdapter(encoder, served.address) as model, ExitStack() as held:
        expected = model(given)
        port, known = served.server.port, introduction_digest(served.desk.facts.identity_key)
        strangers = [held.enter_context(connect(port)) for _ in range(20)]
        for _ in range(4):
            strangers.append(held.enter_context(tls_connection(port, tmp_path, known=known)))
            opened(strangers[-1])
        # Their calls are refused by their key, so that these end first.
        for _ in range(4):
            stranger = held.enter_context(tls_connection(port, tmp_path, known=known))
            strangers.append(unfinished_calls(stranger, APPLY, 4, sent=1000))
        begun = time.monotonic()
        while strangers:
            assert time.monotonic() - begun < server._BOUNDS.stranger_s + DEADLINE_S
            strangers = [each for each in strangers if not is_closed(each)]
            time.sleep(0.1)
        assert torch.allclose(model(given), expected, atol=1e-2)
        assert served.server.figures().sessions == 1


def test_a_server_says_what_its_calls_take_at_most(site):
    with site() as served:
        most = server._most_bytes(served.desk)
        assert most > server._BOUNDS.most_bytes + server._OPEN * ANSWER_BYTES
        assert f"at most {most / 2**20:,.0f} MiB" in served.server.memory
