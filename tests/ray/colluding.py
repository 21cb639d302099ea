"""Run by tests/ray/test_colluding_workers.py as a driver of a cluster of three nodes; prints one JSON object.

Trains on three workers, one a node, of which one is assumed to collude. Workers are killed when they are asked for a
step: twice on one node, then once on another, each when all three have their keys. A newcomer takes the dead one's
place, on the same simulated platform.
"""

import json
import os
import signal
import sys
from collections import defaultdict

import ray

from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.coordinator.cluster.actors import connect
from raycloak.coordinator.cluster.ray_backend import RayBackend
from raycloak.coordinator.cluster.remote import Worker
from raycloak.coordinator.config.home import runs_folder
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.plan import hosted_at_most
from raycloak.coordinator.runs import ray_session
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.evidence_address import manifest_in
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import RaycloakError
from tests.protocol import RENYI

WORKERS = 3
VICTIMS = ("worker-0", "worker-0", "worker-1")
"""Each time the worker on the node where this one began. It takes all three to move one more key to worker-0's node."""


class Killing(RayBackend):
    """Knows on which node each worker has been, and kills one of each place of ``VICTIMS`` in turn."""

    nodes: dict = {}
    alive: set = set()
    killed: list = []

    def start_worker(self, member_id):
        self.alive.add(member_id)
        return super().start_worker(member_id)

    def call(self, actor, method, *args, **options):
        if method is Worker.accept_keys:
            self.nodes[actor.member_id] = self.node(actor)
        if method is Worker.step and len(self.alive) == WORKERS and len(self.killed) < len(VICTIMS):
            place = self.nodes[VICTIMS[len(self.killed)]]
            if self.nodes[actor.member_id] == place:
                pid = ray.get(actor.handle.__ray_call__.remote(lambda _: os.getpid()), timeout=120)
                os.kill(pid, signal.SIGKILL)
                self.alive.discard(actor.member_id)
                self.killed.append(actor.member_id)
        return super().call(actor, method, *args, **options)


def raw_config():
    return demo_config() | {
        "num_workers": WORKERS,
        "min_workers": WORKERS,
        "steps": 2,
        "expected_batch_size": 64,
        "evaluation": None,
        "placement": {"strategy": "STRICT_SPREAD"},
        "dp_config": RENYI | {"colluding_workers": 1},
        "failure": {"max_failures": 2 * len(VICTIMS)},
    }


def keys_by_node():
    """Return, by node and epoch, the virtual workers whose keys went there, as the exported evidence log says."""
    (folder,) = runs_folder().iterdir()
    given = defaultdict(set)
    for entry in read_exported_log(folder / "evidence.jsonl", manifest_in(folder).log_owner).entries:
        if entry.kind == "released" and entry.content["kind"] == "virtual_worker":
            node = Killing.nodes[entry.content["member_id"]]
            given[node, entry.content["epoch"]] |= set(entry.content["virtual_workers"])
    return [sorted(virtual_workers) for _, virtual_workers in sorted(given.items())]


def main():
    ray_session.RayBackend = Killing
    connect(num_cpus=0)
    config, refusal = parse_config(raw_config()), None
    try:
        Trainer(config, notice=lambda line: sys.stderr.write(f"{line}\n")).train()
    except RaycloakError as error:
        refusal = {"exit_code": error.exit_code, "code": error.code, "message": error.message}
    ray.shutdown()
    answer = {
        "refusal": refusal,
        "killed": Killing.killed,
        "nodes": len({*Killing.nodes.values()}),
        "allowed": hosted_at_most(config, config.fewest_workers),
        "keys": keys_by_node(),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
