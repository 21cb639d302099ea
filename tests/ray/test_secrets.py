"""Secrets are in no argument, message or environment of an actor, and so in nothing that Ray keeps.

A run with every secret that a configuration can name is searched for them while it trains: Ray's session folder, and
all that the driver sends to actors. That the search would find them is seen by planting: an actor that is started as
the ledger was before. What processes hold is searched by `test_hostile`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from raycloak.coordinator.cluster.actors import actor, on_this_node
from raycloak.coordinator.cluster.ray_calls import ask, fetch
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.config.secret_variables import SECRET_VARIABLES
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.vaults.hosted import Hosted
from raycloak.metrics.errors import ConfigError
from tests.coordinator.ledger.witness_server import url_file, witness_server
from tests.ray import leaks, planted

DEADLINE_S = 240
VARIABLE = "Planted-" + "variable"


def _session() -> Path:
    return Path(ray._private.worker._global_node.get_session_dir_path())


class Sent:
    """All that the driver gives to actors, pickled: arguments of their constructors and of their methods."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, bytes]] = []
        for kind in (ray.actor.ActorClass, ray.actor.ActorMethod):
            genuine = kind._remote
            monkeypatch.setattr(kind, "_remote", self._recording(genuine))

    def _recording(self, genuine):
        def remote(caller, args=None, kwargs=None, *rest, **options):
            # A reference stands for what another actor made, and is no content.
            plain = [each for each in (*(args or ()), *(kwargs or {}).values()) if not isinstance(each, ray.ObjectRef)]
            name = getattr(caller, "_method_name", "a constructor")
            self.seen.append((f"arguments of {name}", ray.cloudpickle.dumps((plain, options.get("runtime_env")))))
            return genuine(caller, args, kwargs, *rest, **options)

        return remote


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Return a folder with data and secrets; it is not searched."""
    return planted.inputs(tmp_path)


def test_guarantee_no_secret_of_a_run_is_in_what_ray_keeps_or_an_actor_is_given(
    ray_cluster, raycloak_home, inputs, postgres, monkeypatch
):
    sent, found = Sent(monkeypatch), []

    def search(report):
        if report.step == 1:
            found.extend(leaks.leaks(planted.needles(raycloak_home), [*sent.seen, *leaks.files_below(_session())]))

    with witness_server() as server:
        witness = url_file(inputs, f"http://127.0.0.1:{server.server_port}/{planted.WITNESS_PATH}")
        config = parse_config(planted.config(inputs, postgres.url(), witness, 2))
        options = {"config_dir": inputs, "run_secret": inputs / "run.secret", "notice": lambda line: None}
        result = Trainer(config, progress=search, **options).train()
        assert any(planted.WITNESS_PATH in path for _, path in server.asked), "the ledger has read the file"
    assert result["metrics"]["steps"] == 2
    assert not result["metrics"]["rollback_witness"], "the witness is on this machine"
    assert found == []


def test_the_search_finds_a_password_that_is_an_actors_argument(ray_cluster, monkeypatch):
    """As it was before: in the control store, and in what was given."""
    sent = Sent(monkeypatch)
    url = f"postgresql://raycloak:{planted.PASSWORD}@127.0.0.1:9/ledger"
    handle = actor(PrivacyLedger, scheduling_strategy=on_this_node()).remote(url, True, None)
    with pytest.raises(ConfigError, match="password"):
        fetch(ask(handle, Hosted.opened), DEADLINE_S)
    found = leaks.leaks({"password": planted.PASSWORD.encode()}, [*sent.seen, *leaks.what_ray_has(_session())])
    assert "password in arguments of a constructor" in found
    assert any("memory of" in line and "gcs_server" in line for line in found)


STARTS_RAY = """
import os, sys
from pathlib import Path
from raycloak.coordinator.cluster.actors import connect, disconnect
from raycloak.coordinator.cluster.processes import descendants, process_table
assert connect(1, {"CUDA_VISIBLE_DEVICES": ""})
children = descendants([os.getpid()], process_table())
assert any("raylet" in each.title for each in children)
for each in children:
    try:
        content = Path(f"/proc/{each.pid}/environ").read_bytes()
    except OSError:
        continue
    for line in content.split(b"\\0"):
        if sys.argv[1].encode() in line or line.startswith(b"RAY_AUTH_TOKEN="):
            print("leaked", each.title[:30], line)
print("token", os.environ["RAY_AUTH_TOKEN_PATH"], oct(os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode & 0o777))
print("kept", all(os.environ[name] == sys.argv[1] for name in sys.argv[2:]))
disconnect()
"""


def test_guarantee_no_process_of_a_local_ray_inherits_a_secret_of_the_driver(raycloak_home: Path):
    """The driver keeps its variables: it uploads packages and tells loggers."""
    names = sorted(SECRET_VARIABLES.keys() - {"RAY_AUTH_TOKEN"})
    environment = {**os.environ, **dict.fromkeys(names, VARIABLE)}
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        environment.pop(name, None)
    command = [sys.executable, "-c", STARTS_RAY, VARIABLE, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.splitlines() == [f"token {raycloak_home / 'ray.token'} 0o600", "kept True"], done.stderr[-3000:]


def test_a_job_whose_variables_hold_a_secret_is_refused(ray_cluster, inputs, monkeypatch):
    class Context:
        runtime_env = {"env_vars": {"PLAIN": "1", "WANDB_API_KEY": VARIABLE}}

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    config = parse_config(demo_config() | {"steps": 1})
    with pytest.raises(
        ConfigError, match=r"secret_variable: WANDB_API_KEY is in .*runtime_env.*wandb login"
    ) as refused:
        Trainer(config, config_dir=inputs, notice=lambda line: None).train()
    assert VARIABLE not in str(refused.value)
