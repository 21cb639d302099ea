"""Ray that is started ahead of a run: who ends it, and what SIGTERM does meanwhile. Without a cluster."""

import signal

import pytest

from raycloak.coordinator.cluster.actors import NO_GPU
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs import ray_start
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.ray_start import ray_ahead, start_ray
from raycloak.workers.gradients.environment import own_flags, widest_shared, worker_environment

CONFIG = parse_config(demo_config())


class FakeRay:
    """A Ray that is there or not, and counts how often it was started."""

    def __init__(self):
        self.is_there, self.starts, self.phases = False, [], []

    def connect(self, num_cpus, environment):
        self.is_there = True
        self.starts.append((num_cpus, environment))
        return True

    def disconnect(self):
        assert self.is_there
        self.is_there = False

    def start(self, config=CONFIG):
        return start_ray(config, self.phases.append)

    def ahead(self):
        return ray_ahead(CONFIG, self.phases.append)


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(ray_start, "connect", fake.connect)
    monkeypatch.setattr(ray_start, "disconnect", fake.disconnect)
    monkeypatch.setattr(ray_start, "is_connected", lambda: fake.is_there)
    return fake


def test_a_local_ray_gives_its_processes_the_environment_of_a_worker(ray):
    assert ray.start()
    assert ray.start(CONFIG) is False, "it is there, and its starter ends it"
    ray.disconnect()
    ray.start(parse_config({**demo_config(), "use_gpu": True, "threads_per_worker": 2}))
    own = widest_shared([own_flags()])
    assert ray.starts == [(4, worker_environment(own) | NO_GPU), (4, worker_environment(own, 2))]
    ray.disconnect()
    ray.start(parse_config({**demo_config(), "cpu_capability": "avx2"}))
    assert ray.starts[2] == (4, worker_environment("avx2") | NO_GPU)
    assert ray.phases == ["connecting to Ray"] * 3


def test_the_first_execution_ends_the_ray_that_was_started_ahead_and_the_next_starts_its_own(ray):
    with ray.ahead():
        assert ray.start()
        assert len(ray.starts) == 1
        ray.disconnect()
        assert ray.start()
        assert len(ray.starts) == 2
        ray.disconnect()
    assert not ray.is_there


def test_a_run_that_is_refused_before_it_executes_leaves_no_ray_behind(ray):
    with pytest.raises(ValueError, match="refused"), ray.ahead():
        raise ValueError("refused")
    assert not ray.is_there
    assert ray.start(), "nothing is left of the one before"


def test_a_ray_of_somebody_else_is_left_alone(ray):
    ray.is_there = True
    with ray.ahead():
        assert not ray.start()
    assert ray.is_there


def test_sigterm_ends_the_process_until_the_run_takes_it_over(ray):
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with ray.ahead():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)
