"""Several nodes on one machine: where workers are placed, and what becomes of a run whose nodes go."""

import json
import time
from pathlib import Path

import pytest

from raycloak.coordinator.cluster.processes import process_table
from raycloak.coordinator.config.sections import FailureConfig
from raycloak.workers.gradients.environment import own_flags, widest_shared, worker_environment
from raycloak_lab.bench.chaos.cluster import role
from raycloak_lab.bench.chaos.raylets import Node

HERE = Path(__file__).parent
DEADLINE_S = 120
"""Far from what an idle machine takes: it is met on a busy one too."""


@pytest.fixture(scope="module")
def nodes(raylets):
    """Yield three nodes of two CPUs each; they are taken away again."""
    nodes = [raylets.add(Node(2, {"vault": 1.0} if index == 0 else {}, {"zone": f"z{index}"})) for index in range(3)]
    yield nodes
    for each in nodes:
        each.kill()


@pytest.fixture(scope="module")
def answers(nodes, raylets, run_python_in, tmp_path_factory):
    """Return what a driver of the three nodes found."""
    folder = tmp_path_factory.mktemp("driver")
    done = run_python_in(folder)(str(HERE / "placing.py"), environment=raylets.environment, deadline_s=600)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_strategy_places_as_it_says(answers):
    """Only the strict strategies promise nodes: to Ray, PACK and SPREAD are wishes, which a busy machine denies."""
    assert sorted(answers["strict_spread"]["zones"]) == ["z0", "z1", "z2"]
    assert len(set(answers["strict_pack"]["zones"])) == 1
    for name in ("strict_spread", "strict_pack", "spread", "pack"):
        assert answers[name]["strategy"] == name.upper()


def test_labels_and_resources_choose_the_node(answers):
    assert answers["labels"]["zones"] == ["z1", "z1"]
    assert answers["resources"]["zones"] == ["z0"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("too_many", "bundle 4 of 4 does not fit"),
        ("no_such_resource", "bundle 2 of 2 does not fit"),
        ("no_such_label", "on nodes with {zone=z9}"),
        ("no_such_accelerator", "accelerator_type:H200: 0.001"),
    ],
)
def test_what_cannot_be_placed_is_named_within_the_deadline(answers, case, said):
    refusal = answers[case]
    assert refusal["code"] == "unplaceable"
    assert said in refusal["message"]
    assert all(f"zone=z{index}" in refusal["message"] for index in range(3)), "every node is shown with its label"
    assert 1.0 <= refusal["seconds"] < DEADLINE_S


def test_a_wrong_selector_is_the_users_mistake(answers):
    assert answers["wrong_selector"]["code"] == "config"


def test_a_joiner_gets_a_group_of_its_own_or_the_place_of_one_that_left(answers):
    joiners = answers["joiners"]
    assert joiners["rooms"] == [1, 0, 1]
    assert joiners["own"]
    assert joiners["again"]
    assert joiners["waiting"] == ["CREATED", "CREATED", "PENDING"]
    assert joiners["left"] == ["CREATED", "CREATED"], "a joiner that was not placed in time leaves nothing reserved"
    assert answers["left"] == []


def test_nobody_gets_a_place_that_was_closed(answers):
    """The nodes have room for one worker each; a closed place keeps its node's, so the third worker is on the third."""
    assert answers["closed"] == {"rooms": [1, 0], "own": True, "kept": ["CREATED", "CREATED"]}


def test_aggregators_avoid_the_node_of_the_orchestrator(answers):
    """The head is the fourth node, with the driver on one of them; Ray alone would spread over all."""
    assert answers["off_the_drivers"] == [True] * 4
    rooms = answers["aggregator_rooms"]
    assert len(rooms) == 3
    assert all(2**28 < room < 2**50 for room in rooms), "each has the memory and the object store of its node, in bytes"


def test_workers_asked_to_leave_drained_and_dead_nodes_change_no_byte(answers, nodes, raylets, run_python):
    """A SIGTERM and a drain cost no attempt, since the step under way finishes; a dead node costs one or two.

    Two nodes are gone afterwards, so it comes after the placing.
    """
    nodes.append(raylets.add(Node(2)))
    (session,) = {each.session for each in process_table() if each.pid in {node.pid for node in nodes}}
    done = run_python(
        str(HERE / "disturbed.py"),
        environment={
            **raylets.environment,
            **worker_environment(widest_shared([own_flags()])),
            "RAYLETS": json.dumps({each.node_id: each.pid for each in nodes}),
        },
        deadline_s=1200,
    )
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["departed"][:2] == ["left", "preempted"]
    # A worker whose raylet is gone ends by itself; the driver may notice that before it hears of the node's death.
    assert answer["departed"][2] in ("died", "unreachable")
    assert answer["same"]
    assert answer["steps"] == 50
    # Two if its worker had just answered: then the first is lost with its vector, and the next finds the worker gone.
    assert answer["repeated"] in (1, 2)
    # By the death and not by a deadline of the run; `DEAD_NODE_S` of test_ray_cluster.py is what the documents promise.
    assert 0 < answer["detected_s"] < FailureConfig().step_deadline_s
    deadline = time.monotonic() + DEADLINE_S
    while left := [each for each in process_table() if each.session == session and role(each)]:
        assert time.monotonic() < deadline, f"processes outlived the node they were on: {left}"
        time.sleep(0.1)
