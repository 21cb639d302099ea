"""The figures of an adapter's server: calls, tokens, seconds by phase and what is left, of no client and no token."""

import torch
from prometheus_client import generate_latest

from raycloak.metrics.exporter import Exporter
from raycloak_lab.adapter.collector import ADAPTER_SERIES, AdapterCollector
from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter
from tests.lab.adapter.conftest import TOKENS


def test_the_page_shows_calls_tokens_seconds_and_what_is_left(site, encoder):
    with site(of_adapter=1000) as served:
        exporter = Exporter(ADAPTER_SERIES)
        exporter.add(AdapterCollector(served.server.figures))
        with EncryptedAdapter(encoder, served.address) as model:
            model(torch.ones(1, 5, 16))
            page = generate_latest(exporter.registry).decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(lines['raycloak_adapter_calls_total{code="ok",method="Apply"}']) == 2
    assert float(lines['raycloak_adapter_calls_total{code="ok",method="Close"}']) == 0
    assert float(lines["raycloak_adapter_tokens_total"]) == 2 * TOKENS
    # By whole blocks: an alert waits for zero, and the rest answers nothing.
    assert float(lines["raycloak_adapter_tokens_left"]) == (1000 - TOKENS) // TOKENS * TOKENS
    assert float(lines["raycloak_adapter_sessions"]) == 1
    assert float(lines['raycloak_adapter_busy_seconds_total{phase="compute"}']) > 0
    assert "me" not in {part for line in lines for part in line.split('"')}
