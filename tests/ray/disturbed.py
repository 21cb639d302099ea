"""Run by tests/ray/test_nodes.py as a driver of a cluster of several nodes; prints one JSON object.

Trains once undisturbed, on one worker of plain objects, and once on three while a worker's process is asked to end, a
node is drained and a node is killed, one after the other, each when the run has its full membership again. RAYLETS maps
node ids to process ids.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import ray
from ray._raylet import GcsClient

from raycloak.coordinator.cluster.actors import connect
from raycloak.coordinator.cluster.ray_backend import RayBackend
from raycloak.coordinator.cluster.remote import Worker
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak_lab.bench.chaos.raylets import DRAIN_PREEMPTION
from tests.protocol import RENYI, settle, trained

STEPS = 50
SLOWED_S, LATER_S = 1.0, 10.0
"""A step takes as long while the run is disturbed, so that it has enough of them for three recoveries. The later steps
are for a busy machine, where these take longer."""
RAYLETS = json.loads(os.environ["RAYLETS"])


class Watched(RayBackend):
    """Knows its workers, and kills a worker's node as soon as that worker was asked for a step."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        Watched.current = self
        self.workers = {}
        self.doomed = None
        self.killed_at = None

    def start_worker(self, member_id):
        self.workers[member_id] = super().start_worker(member_id)
        return self.workers[member_id]

    def stop(self, actor):
        self.workers.pop(actor.member_id, None)
        super().stop(actor)

    def call(self, actor, method, *args, **options):
        references = super().call(actor, method, *args, **options)
        if method is Worker.step and actor.member_id == self.doomed:
            self.doomed, self.killed_at = None, time.monotonic()
            os.kill(RAYLETS[self.node(actor)], signal.SIGKILL)
        return references


class Disturbances:
    """The disturbances after each step; the run is slowed down until all of them were done."""

    def __init__(self):
        self.departed = []
        self.detected_s = None
        self.done = 0

    def notice(self, line):
        if match := re.match(r"(worker-\d+) left: (\w+): ", line):
            self.departed.append(match[2])
            if Watched.current.killed_at is not None and self.detected_s is None:
                self.detected_s = time.monotonic() - Watched.current.killed_at

    def after(self, report):
        if self.done == 3 and self.detected_s is not None:
            return
        time.sleep(SLOWED_S if report.step < STEPS // 2 else LATER_S)
        if report.workers == 3 and len(self.departed) == self.done < 3:
            (self.ask_to_end, self.drain, self.kill)[self.done]()
            self.done += 1

    def ask_to_end(self):
        handle = Watched.current.workers["worker-0"].handle
        os.kill(ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=120), signal.SIGTERM)

    def drain(self):
        client = GcsClient(address=os.environ["RAY_ADDRESS"])
        deadline_ms = int(1000 * (time.time() + 600))
        node = Watched.current.node(Watched.current.workers["worker-1"])
        assert client.drain_node(node, DRAIN_PREEMPTION, "taken away", deadline_ms)[0]

    def kill(self):
        Watched.current.doomed = "worker-2"


def raw_config():
    spread = {"steps": STEPS, "expected_batch_size": 64, "evaluation": None, "placement": {"strategy": "SPREAD"}}
    # `trained` plans without a worker's measurement, and other shapes would give other bits.
    return demo_config() | spread | {"dp_config": RENYI, "micro_batch_size": 64}


def train(secret, progress, notice):
    trainer = Trainer(parse_config(raw_config()), run_secret=secret, progress=progress, notice=notice)
    result = trainer.train()
    events = map(json.loads, (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines())
    digests = [event["model_digest"] for event in events if event["event"] == "step"]
    return digests, [outcome.commit.attempts for outcome in trainer.finished.outcomes]


def main():
    from raycloak.coordinator.runs import ray_session

    secret = Path("secret")
    secret.write_text("5e" * 32)
    ray_session.RayBackend = Watched
    connect(num_cpus=0)
    alone = {"num_workers": 1, "secure_aggregation": False}
    undisturbed = trained(Path("alone").absolute(), secret=secret.read_text(), **raw_config() | alone).digests
    settle(home.home())
    disturbances = Disturbances()
    digests, attempts = train(secret, disturbances.after, disturbances.notice)
    ray.shutdown()
    answer = {
        "same": digests == undisturbed,
        "steps": len(digests),
        "departed": disturbances.departed,
        "detected_s": disturbances.detected_s,
        "repeated": sum(attempts) - len(attempts),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
