"""Rates and sizes of the evidence service."""

import pytest
from pydantic import ValidationError

from raycloak.attestation.core import rate_limit
from raycloak.attestation.core.rate_limit import RateLimit
from raycloak.attestation.service.limits import ServiceLimits


def test_a_peer_may_spend_its_burst_and_then_its_rate():
    now = [100.0]
    limit = RateLimit(2.0, 3, lambda: now[0])
    assert [limit.allows("a") for _ in range(4)] == [True, True, True, False]
    assert limit.allows("b")
    now[0] += 0.5
    assert [limit.allows("a"), limit.allows("a")] == [True, False]
    now[0] += 1000.0
    assert [limit.allows("a") for _ in range(4)] == [True, True, True, False]


def test_calls_beyond_the_rate_wait_as_long_as_they_are_told():
    now = [0.0]
    limit = RateLimit(2.0, 3, lambda: now[0])
    assert [limit.wait("a") for _ in range(3)] == [0.0] * 3
    assert limit.wait("a") == pytest.approx(0.5)
    assert limit.wait("b") == 0.0
    now[0] = 0.5
    assert limit.wait("a") == 0.0
    assert limit.wait("a") > 0


def test_a_crowd_of_peers_fills_no_memory(monkeypatch):
    monkeypatch.setattr(rate_limit, "_MAX_BUCKETS", 10)
    limit = RateLimit(1.0, 1, lambda: 0.0)
    for peer in range(100):
        limit.allows(str(peer))
        assert not limit.allows(str(peer))
    assert len(limit._buckets) == 10


@pytest.mark.parametrize("name", ["deadline_s", "stranger_s", "idle_s", "age_s", "connections", "message_bytes"])
def test_no_limit_can_be_switched_off(name):
    with pytest.raises(ValidationError):
        ServiceLimits(**{name: 0})
    with pytest.raises(ValidationError):
        ServiceLimits(**{name: 1e12})
