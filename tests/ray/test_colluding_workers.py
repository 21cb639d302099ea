"""Colluding workers are counted by machine: a whole run on three nodes, whose workers are killed."""

import json
from pathlib import Path

import pytest

from raycloak.coordinator.bench.chaos.raylets import Node
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs.demo import demo_config
from raycloak.metrics.errors import RefusedError
from raycloak.workers.gradients.numerics import worker_environment

HERE = Path(__file__).parent


@pytest.fixture
def nodes(raylets):
    """Yield three nodes of two CPUs each; they are taken away again."""
    nodes = [raylets.add(Node(2)) for _ in range(3)]
    yield nodes
    for each in nodes:
        each.kill()


def test_no_machine_gets_keys_of_more_virtual_workers_than_the_noise_allows_for(nodes, raylets, run_python):
    """The run recovers or is refused. A worker's successor in its place is the same machine."""
    environment = {**raylets.environment, **worker_environment(parse_config(demo_config()).cpu_capability)}
    done = run_python(str(HERE / "colluding.py"), environment=environment, deadline_s=600)
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["nodes"] == 3
    assert len(answer["killed"]) == 3, f"too few were killed to show anything: {answer}"
    keys, allowed = answer["keys"], answer["allowed"]
    assert max(map(len, keys)) <= allowed, (
        f"a machine has keys of {max(keys, key=len)}, allowed are {allowed}: {answer}"
    )
    if (refusal := answer["refusal"]) is not None:
        assert refusal["exit_code"] == RefusedError.exit_code, refusal
