"""Run by tests/ray/test_colluding_workers.py as a driver of a cluster of three machines; prints one JSON object.

Usage: ``colluding.py LEDGER_URL first|resumed``. Trains on three workers, one a machine, of which one is assumed to
collude. In the first execution a worker is killed when it is asked for a step, and a newcomer takes its place; the run
is stopped after that step. In the resumed one every worker stands on another machine than its namesake before.
"""

import json
import os
import signal
import sys
from collections import defaultdict

import ray
from ray.util.placement_group import placement_group_table

from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.release import KeyPackage
from raycloak.coordinator.cluster.actors import connect
from raycloak.coordinator.cluster.placement import Placement, cluster_nodes
from raycloak.coordinator.cluster.processes import MACHINE_LABEL
from raycloak.coordinator.cluster.ray_backend import RayBackend
from raycloak.coordinator.cluster.remote import Worker
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.batches import hosted_at_most
from raycloak.coordinator.runs import execution, ray_session
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import RaycloakError
from tests.protocol import RENYI

WORKERS = 3
VICTIM = "worker-0"


def machines():
    """The machine of each node, as its label says."""
    return {node.node_id: node.labels.get(MACHINE_LABEL) for node in cluster_nodes()}


class Seated(Placement):
    """Puts the initial workers on the machines in order, from ``first`` on."""

    first = 0

    def _free_seat(self, shared):
        if self._seated == self._num_workers:
            return super()._free_seat(shared)
        wanted, names = f"machine-{(self.first + self._seated) % WORKERS}", machines()
        self._seated += 1
        nodes = placement_group_table(shared)["bundles_to_node_id"]
        return next(seat for seat, node in nodes.items() if names[node] == wanted)


class Killing(RayBackend):
    """Notes which keys every machine is sent, and kills ``victim`` when it is first asked for a step."""

    victim = None
    killed: list = []
    keys: dict = defaultdict(set)

    def call(self, actor, method, *args, **options):
        if method is Worker.accept_keys:
            package = parse(KeyPackage, args[0].package.body)
            self.keys[machines()[self.node(actor)], package.epoch].update(package.virtual_workers)
        if method is Worker.step and actor.member_id == self.victim not in self.killed:
            os.kill(ray.get(actor.handle.__ray_call__.remote(lambda _: os.getpid()), timeout=120), signal.SIGKILL)
            self.killed.append(actor.member_id)
        return super().call(actor, method, *args, **options)


def raw_config(url):
    return demo_config() | {
        "num_workers": WORKERS,
        "min_workers": WORKERS,
        "steps": 2,
        "expected_batch_size": 64,
        "evaluation": None,
        "placement": {"strategy": "STRICT_SPREAD"},
        "dp_config": RENYI | {"colluding_workers": 1},
        "ledger": {"url": url},
    }


def main(url, part):
    ray_session.RayBackend, execution.Placement = Killing, Seated
    if part == "first":
        Killing.victim = VICTIM
    else:
        Seated.first = 1
    connect(num_cpus=0)
    config, refusal, metrics = parse_config(raw_config(url)), None, {}
    trainer = Trainer(
        config,
        resume=part == "resumed",
        progress=lambda report: trainer.stop() if part == "first" else None,
        notice=lambda line: sys.stderr.write(f"{line}\n"),
    )
    try:
        metrics = trainer.train()["metrics"]
    except RaycloakError as error:
        refusal = {"exit_code": error.exit_code, "code": error.code, "message": error.message}
    nodes = sorted(node for node, name in machines().items() if name is not None)
    ray.shutdown()
    answer = {
        "refusal": refusal,
        "ending": metrics.get("ending"),
        "keys_on_one_machine": metrics.get("keys_on_one_machine"),
        "killed": Killing.killed,
        "nodes": nodes,
        "allowed": hosted_at_most(config.slices, config.fewest_workers),
        "keys": [[machine, epoch, sorted(held)] for (machine, epoch), held in sorted(Killing.keys.items())],
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
