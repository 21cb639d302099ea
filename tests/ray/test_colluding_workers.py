"""Colluding workers are counted by machine: a run on three machines that is stopped, and resumed on new nodes."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from raycloak.coordinator.cluster.processes import MACHINE_LABEL
from raycloak.workers.gradients.environment import own_flags, widest_shared, worker_environment
from raycloak_lab.bench.chaos.raylets import Node

HERE = Path(__file__).parent
MACHINES = 3


@pytest.fixture
def execute(raylets, postgres, run_python):
    """Runs one execution of the run on nodes of its own, which are on the same machines each time."""
    url = postgres.url()

    def on_new_nodes(part):
        nodes = [raylets.add(Node(2, labels={MACHINE_LABEL: f"machine-{index}"})) for index in range(MACHINES)]
        try:
            environment = {**raylets.environment, **worker_environment(widest_shared([own_flags()]))}
            done = run_python(str(HERE / "colluding.py"), url, part, environment=environment)
        finally:
            for each in nodes:
                each.kill()
        assert done.code == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return on_new_nodes


def test_no_machine_gets_keys_of_more_virtual_workers_than_the_noise_allows_for_on_two_sets_of_nodes(execute):
    """The successor of a dead worker is on the same machine, and so is a worker of the resumed run, which has another
    name there. All nodes of the second execution are new to Ray."""
    first, resumed = execute("first"), execute("resumed")
    assert first["killed"] == ["worker-0"]
    assert not {*first["nodes"]} & {*resumed["nodes"]}
    given = defaultdict(set)
    for machine, epoch, held in (*first["keys"], *resumed["keys"]):
        given[machine, epoch].update(held)
    assert sorted(given) == [(f"machine-{index}", 0) for index in range(MACHINES)]
    allowed = first["allowed"]
    assert max(map(len, given.values())) <= allowed == 3, f"allowed are {allowed}: {given}"
    assert (first["refusal"], first["ending"]) == (None, "stopped")
    assert (resumed["refusal"], resumed["ending"]) == (None, "complete")
    assert first["keys_on_one_machine"] == resumed["keys_on_one_machine"] == allowed
