"""Run by tests/ray/test_nodes.py as a driver of a cluster of several nodes; prints one JSON object.

Each node has 2 CPUs; one of them also has `vault`, and each carries a label `zone` of its own. The vault's zone is z0.
"""

import json
import os
import time

import ray
from ray.util.placement_group import placement_group_table

from raycloak.coordinator.cluster.actors import actor, ask_node, connect, kill_all, off_this_node
from raycloak.coordinator.cluster.placement import Placement, cluster_nodes
from raycloak.coordinator.cluster.ray_backend import RayBackend
from raycloak.coordinator.cluster.ray_calls import fetch
from raycloak.coordinator.config.sections import PlacementConfig
from raycloak.metrics.errors import ConfigError


def placed(num_workers, **config):
    """Return each bundle's zone and the group's strategy, after the placement was taken and given back."""
    placement = Placement(PlacementConfig(**config), num_workers, use_gpu=False)
    groups = {placement.take(f"worker-{index}").placement_group for index in range(num_workers)}
    (group,) = groups
    table = placement_group_table(group)
    nodes = table["bundles_to_node_id"]
    placement.close()
    zones = {node.node_id: node.labels.get("zone") for node in cluster_nodes()}
    return {"zones": [zones[nodes[index]] for index in range(num_workers)], "strategy": table["strategy"]}


def refused(num_workers, **config):
    started = time.monotonic()
    try:
        placed(num_workers, deadline_s=1.0, **config)
    except ConfigError as error:
        return {"code": error.code, "message": error.message, "seconds": time.monotonic() - started}
    return None


def settled(look, wanted, deadline_s=120.0):
    """Return what ``look`` sees once it is ``wanted``, or at the deadline; Ray's tables follow when they can."""
    end = time.monotonic() + deadline_s
    while (seen := look()) != wanted and time.monotonic() < end:
        time.sleep(0.1)
    return seen


def joiners():
    """Return the room with two workers on three nodes, after a joiner, and after one left; and who sits where."""
    placement = Placement(PlacementConfig(resources_per_worker={"CPU": 2}), 2, use_gpu=False)
    shared = {placement.take(f"worker-{index}").placement_group.id.hex() for index in range(2)}
    rooms = [settled(placement.room, 1)]
    own = placement.take("worker-2").placement_group.id.hex()
    rooms.append(settled(placement.room, 0))
    placement.release("worker-0")
    rooms.append(settled(placement.room, 1))
    again = placement.take("worker-3").placement_group.id.hex()
    placement.take("worker-4")
    placement.expire()
    waiting = settled(reserved, ["CREATED", "CREATED", "PENDING"])
    placement._pending["worker-4"] = time.monotonic()  # its deadline has come
    placement.expire()
    left = settled(reserved, ["CREATED", "CREATED"])
    placement.close()
    return {"rooms": rooms, "own": own not in shared, "again": again in shared, "waiting": waiting, "left": left}


def closed():
    """Return whether a worker that comes after a place was closed has a place of its own; and what remains reserved."""
    placement = Placement(PlacementConfig(resources_per_worker={"CPU": 2}), 2, use_gpu=False)
    shared = {placement.take(f"worker-{index}").placement_group.id.hex() for index in range(2)}
    rooms = [settled(placement.room, 1)]
    placement.close_place("worker-0")
    placement.release("worker-0")
    own = placement.take("worker-2").placement_group.id.hex()
    rooms.append(settled(placement.room, 0))
    placement.close_place("worker-2")
    placement.release("worker-2")
    kept = settled(reserved, ["CREATED", "CREATED"])
    placement.close()
    return {"rooms": rooms, "own": own not in shared, "kept": kept}


class Somewhere:
    """A stand-in for an aggregator."""


def off_the_drivers():
    """Return whether each of as many actors as there are nodes is on another node than this driver."""
    own = ray.get_runtime_context().get_node_id()
    handles = [actor(Somewhere, **off_this_node()).remote() for _ in cluster_nodes()]
    apart = [fetch(ask_node(handle), 120.0) != own for handle in handles]
    kill_all(handles)
    return apart


def reserved():
    """Return the states of all groups that hold or want resources."""
    return sorted(info["state"] for info in placement_group_table().values() if info["state"] != "REMOVED")


def main():
    connect(num_cpus=0)
    answers = {
        "strict_spread": placed(3, strategy="STRICT_SPREAD"),
        "spread": placed(3, strategy="SPREAD"),
        "strict_pack": placed(2, strategy="STRICT_PACK"),
        "pack": placed(2, strategy="PACK"),
        "labels": placed(2, labels={"zone": "in(z1, z9)"}),
        "resources": placed(1, resources_per_worker={"CPU": 1, "vault": 1}),
        "too_many": refused(4, strategy="STRICT_SPREAD"),
        "no_such_resource": refused(2, resources_per_worker={"CPU": 1, "vault": 1}),
        "no_such_label": refused(2, labels={"zone": "z9"}),
        "no_such_accelerator": refused(1, accelerator_type="H200"),
        "wrong_selector": refused(1, labels={"zone": "in()"}),
        "joiners": joiners(),
        "closed": closed(),
        "off_the_drivers": off_the_drivers(),
        "aggregator_rooms": RayBackend.aggregator_rooms(),
    }
    answers["left"] = settled(reserved, [])
    print(json.dumps(answers))
    ray.shutdown()


if __name__ == "__main__":
    assert os.environ["RAY_ADDRESS"], "a cluster is given"
    main()
