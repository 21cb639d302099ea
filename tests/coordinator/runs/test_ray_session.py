"""What a session on Ray decides before its processes start; sessions themselves are in tests/ray."""

from types import SimpleNamespace

import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs import ray_session
from raycloak.coordinator.runs.demo import demo_config
from raycloak.workers.gradients.environment import worker_environment
from raycloak.workers.gradients.numerics import current_numerics, pin_numerics


def test_guarantee_a_run_that_is_resumed_keeps_the_instruction_set_that_it_began_with(monkeypatch):
    monkeypatch.setattr(ray_session, "shared_capability", lambda present: "amx")
    for name, value in worker_environment("avx2").items():
        monkeypatch.setenv(name, value)
    pin_numerics()
    recorded = current_numerics("cpu")
    chosen = parse_config(demo_config())
    assert chosen.cpu_capability == "auto"
    reserved = []
    places = SimpleNamespace(reserve=lambda: reserved.append(1))
    assert ray_session._capability(chosen, places, {}, recorded) == "avx2"
    assert not reserved
    assert ray_session._capability(chosen, places, {}, None) == "amx"
    assert reserved, "a cluster may start nodes for the workers, which count as well"
    told = parse_config({**demo_config(), "cpu_capability": "avx512"})
    for numerics in (None, recorded):
        assert ray_session._capability(told, places, {}, numerics) == "avx512"


@pytest.mark.parametrize("capability", ["auto", "avx512_bf16", "amx"])
def test_each_named_set_can_be_asked_for(capability):
    assert parse_config({**demo_config(), "cpu_capability": capability}).cpu_capability == capability
