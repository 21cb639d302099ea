"""The variables of an actor's process, without a cluster."""

import os

import pytest

from raycloak.coordinator.cluster import actors
from raycloak.coordinator.cluster.actors import NO_GPU, actor, connect, disconnect
from raycloak.workers.gradients.environment import worker_environment

WORKER = worker_environment("avx2")


class Plain:
    """Anything that becomes an actor."""


@pytest.fixture
def started(monkeypatch):
    """Return the variables that Ray is started with, where `connect` starts it; this process has one of them."""
    seen = {}
    monkeypatch.setenv("MKL_DYNAMIC", "TRUE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(actors.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(actors.ray, "init", lambda **_: seen.update(os.environ))
    monkeypatch.setattr(actors.ray, "shutdown", lambda: None)
    yield seen
    disconnect()


def variables(**options):
    return actor(Plain, **options)._default_options.get("runtime_env", {}).get("env_vars", {})


def test_an_actor_has_every_variable_of_its_own_on_a_cluster_that_others_started():
    assert variables() == NO_GPU
    assert variables(environment=WORKER) == NO_GPU | WORKER
    assert variables(num_gpus=1, environment=WORKER) == WORKER
    assert variables(sees_gpus=True) == {}


def test_an_actor_has_no_variable_of_its_own_that_its_process_inherits(started):
    assert connect(3, NO_GPU | WORKER)
    assert started.items() >= (NO_GPU | WORKER).items()
    assert variables() == variables(environment=WORKER) == {}
    assert variables(environment=worker_environment("avx512")).keys() == {
        "ATEN_CPU_CAPABILITY",
        "ONEDNN_MAX_CPU_ISA",
        "MKL_ENABLE_INSTRUCTIONS",
    }
    disconnect()
    assert variables() == NO_GPU


def test_the_driver_keeps_its_own_variables_when_it_starts_ray(started):
    before = dict(os.environ)
    connect(3, NO_GPU | WORKER)
    assert started["MKL_DYNAMIC"] == "FALSE"
    assert {name: os.environ.get(name) for name in WORKER} == {name: before.get(name) for name in WORKER}
    assert os.environ["MKL_DYNAMIC"] == "TRUE"
