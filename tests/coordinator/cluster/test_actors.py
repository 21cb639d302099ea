"""The variables of an actor's process, without a cluster."""

import os
import stat
from functools import partial
from types import SimpleNamespace

import pytest

from raycloak.coordinator.cluster import actors
from raycloak.coordinator.cluster.actors import (
    NO_GPU,
    actor,
    connect,
    disconnect,
    job_folder,
    require_no_secret_in_job,
)
from raycloak.coordinator.config.secret_variables import SECRET_VARIABLES
from raycloak.metrics.errors import ConfigError
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


def test_guarantee_a_local_ray_inherits_no_secret_of_the_driver(started, monkeypatch, raycloak_home):
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    before = dict(os.environ)
    connect(3)
    assert not any("s3cret" in value for value in started.values())
    token = raycloak_home / "ray.token"
    assert started["RAY_AUTH_TOKEN_PATH"] == str(token)
    assert (stat.S_IMODE(token.stat().st_mode), len(bytes.fromhex(token.read_text()))) == (0o600, 32)
    assert {name: os.environ[name] for name in before} == before
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")


@pytest.mark.parametrize(
    ("variables", "code"),
    [({}, None), ({"PLAIN": "1"}, None), ({"HF_TOKEN": "s3cret"}, "HF_TOKEN"), ({"PGPASSWORD": ""}, "PGPASSWORD")],
)
def test_a_job_is_refused_whose_own_variables_hold_a_secret(monkeypatch, variables, code):
    context = SimpleNamespace(runtime_env={"env_vars": variables} if variables else {})
    monkeypatch.setattr(actors.ray, "get_runtime_context", lambda: context)
    if code is None:
        require_no_secret_in_job()
        return
    with pytest.raises(ConfigError, match=f"secret_variable: {code} is in .* then unset {code}") as refusal:
        require_no_secret_in_job()
    assert "s3cret" not in str(refusal.value)


def test_the_folder_of_a_job_is_where_ray_unpacked_it(monkeypatch, tmp_path):
    inner = tmp_path / "working_dir_files" / "_ray_pkg_0123" / "deep"
    inner.mkdir(parents=True)
    for env, working, expected in (
        ({}, inner, None),
        ({"working_dir": "gcs://_ray_pkg_0123.zip"}, inner, inner.parent),
        ({"working_dir": "gcs://_ray_pkg_0123.zip"}, tmp_path, tmp_path),
    ):
        monkeypatch.setattr(actors.ray, "get_runtime_context", partial(SimpleNamespace, runtime_env=env))
        monkeypatch.chdir(working)
        assert job_folder() == expected


def test_the_driver_keeps_its_own_variables_when_it_starts_ray(started):
    before = dict(os.environ)
    connect(3, NO_GPU | WORKER)
    assert started["MKL_DYNAMIC"] == "FALSE"
    assert {name: os.environ.get(name) for name in WORKER} == {name: before.get(name) for name in WORKER}
    assert os.environ["MKL_DYNAMIC"] == "TRUE"
