"""Workers with several devices each: a run on Ray whose members have other numbers of them than each other."""

import json
import os
import signal
from pathlib import Path

import pytest
import ray

from raycloak.coordinator.cluster.ray_backend import RayBackend
from raycloak.coordinator.cluster.remote import Worker
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from tests.protocol import RENYI, settle
from tests.ray.relayed import LaidWorkerActor

STEPS = 4
DEADLINE_S = 240


class _Killing(RayBackend):
    """Kills ``victim`` when it is first asked for a step."""

    victim = None
    members: set = set()

    def call(self, actor, method, *args, **options):
        if method is Worker.step:
            self.members.add(actor.member_id)
            if actor.member_id == self.victim:
                _Killing.victim = None
                os.kill(
                    ray.get(actor.handle.__ray_call__.remote(lambda _: os.getpid()), timeout=DEADLINE_S), signal.SIGKILL
                )
        return super().call(actor, method, *args, **options)


@pytest.fixture
def train(ray_cluster, tmp_path, monkeypatch):
    """Returns a function that trains a deep model on workers over devices, and gives ending and model digests."""
    monkeypatch.setattr("raycloak.coordinator.runs.ray_session.RayBackend", _Killing)
    monkeypatch.setattr("raycloak.coordinator.cluster.ray_backend.TrainWorkerActor", LaidWorkerActor)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("5e" * 32)

    def trained(home, stops=False, resume=False, **fields):
        settle(tmp_path / home)
        monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / home))
        raw = demo_config() | {
            "model": "tests.models:deep_model",
            "virtual_workers": 4,
            "steps": STEPS,
            "expected_batch_size": 128,
            # Several micro-batches are in flight.
            "micro_batch_size": 16,
            "evaluation": None,
            "dp_config": RENYI,
            **fields,
        }
        trainer = Trainer(
            parse_config(raw),
            run_secret=None if resume else secret,
            resume=resume,
            progress=lambda report: trainer.stop() if stops and report.step == 2 else None,
            notice=lambda line: None,
        )
        result = trainer.train()
        events = map(json.loads, (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines())
        digests = [event["model_digest"] for event in events if event["event"] == "step"]
        return result["metrics"]["ending"], digests

    return trained


def test_guarantee_members_over_one_two_and_four_devices_a_kill_and_a_resume_give_one_digest(train):
    ending, undisturbed = train("alone", num_workers=1, secure_aggregation=False)
    assert (ending, len(undisturbed)) == ("complete", STEPS)
    assert _Killing.members == {"worker-0"}
    _Killing.victim = "worker-1"
    ending, digests = train("several", stops=True)
    assert (ending, digests) == ("stopped", undisturbed[: len(digests)])
    assert _Killing.victim is None, "it was killed"
    ending, digests = train("several", resume=True)
    assert (ending, digests) == ("complete", undisturbed)
    assert {"worker-0", "worker-1", "worker-2"} <= _Killing.members
