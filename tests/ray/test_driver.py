"""A driver process, driven over its pipes: the bytes of ``raycloak run``, though it is killed."""

import queue
import time
from pathlib import Path

import pytest

from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.client.service_client import ServiceClient
from raycloak.coordinator.config.home import ledger_url
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.ledger.entries import StepCharged, VectorsBound
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.service.drivers import Driver
from raycloak.coordinator.service.pipe import (
    Allow,
    Begin,
    Close,
    Computed,
    Copied,
    Copy,
    Ended,
    HeldStep,
    Opened,
    Ready,
    Refused,
    ReleasedStep,
    Save,
    Saved,
)
from raycloak.metrics.service_errors import BudgetExceededError, FutureCancelledError
from tests.protocol import RENYI, settle

DEADLINE_S = 600
STEPS = 3
CONFIG = demo_config() | {
    "num_workers": 1,
    "secure_aggregation": False,
    "steps": STEPS,
    "expected_batch_size": 64,
    "evaluation": None,
    "dp_config": RENYI,
    "checkpoint": {"checkpoint_frequency": 0},
}


class Watched(Driver):
    """A driver whose reports a test waits for, in their order."""

    def __init__(self, log: Path) -> None:
        self.reports: queue.SimpleQueue = queue.SimpleQueue()
        self.log = log
        super().__init__(log, self.reports.put)

    def until(self, kind: type, **fields):
        """Return the next report of a kind, which must have these fields; fail on an end that comes before."""
        while not isinstance(report := self.reports.get(timeout=DEADLINE_S), kind):
            assert not isinstance(report, Failed | Exited), f"{report}\n{self.log.read_text()}"
        assert {name: getattr(report, name) for name in fields} == fields
        return report


@pytest.fixture
def started(tmp_path, ray_cluster, monkeypatch):
    """Start a driver on the cluster of the session; end it with the test."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    drivers = []

    def start(run_id: str | None = None, **fields) -> Watched:
        driver = Watched(tmp_path / f"driver-{len(drivers)}.log")
        drivers.append(driver)
        secret = tmp_path / "secret"
        secret.write_text("5e" * 32)
        secret.chmod(0o600)
        driver.start(Begin(config=CONFIG | fields, base=tmp_path, run_secret=secret, run_id=run_id))
        return driver

    yield start
    for driver in drivers:
        driver.child.destroy()


def test_a_driver_that_is_killed_and_resumed_gives_the_bytes_of_a_run_without_one(
    started, tmp_path, raycloak_home, monkeypatch
):
    settle(raycloak_home)
    idle = started()
    void = idle.until(Opened)
    idle.stop()
    idle.until(Ended, ending="stopped", metrics=None)
    assert idle.until(Exited, code=0)

    first = started(void.run_id)
    run = first.until(Opened)
    # Its secret is the user's own, so it is the same run; but nothing was charged, so there is nothing to resume.
    assert run.run_id == void.run_id
    assert run.run_dir != void.run_dir
    ready = first.until(Ready, finished_steps=0, steps=STEPS, evidence_class="simulated", epsilon=0.0)
    assert ready.manifest["run_id"] == run.run_id
    first.send(Allow(computed=2, released=1))
    begun = first.until(Computed, step=0, loss=None)
    assert 0 < begun.epsilon <= ready.epsilon_cap
    released = first.until(ReleasedStep, step=0)
    assert first.until(Computed, step=1).epsilon > begun.epsilon
    first.child.kill()
    assert first.until(Exited, code=-9).last_words

    second = started(run.run_id)
    assert second.until(Opened).run_id == run.run_id
    second.until(Ready, finished_steps=0, charged_steps=2)
    second.send(Save(id="too early", after=0))
    second.send(Save(id="kept", after=STEPS))
    second.send(Allow(computed=STEPS, released=STEPS))
    second.until(Refused, id="too early", code="no_state")
    digests = [second.until(ReleasedStep).model_digest for _ in range(STEPS)]
    assert digests[0] == released.model_digest
    saved = second.until(Saved, id="kept", model_digest=digests[-1], step=STEPS)
    assert Path(saved.package).exists()
    copy = tmp_path / "copies" / "weights.safetensors"
    second.send(Copy(id="sampled", after=STEPS, path=copy))
    second.until(Copied, id="sampled", model_digest=digests[-1])
    assert copy.exists()
    second.send(Close())
    ended = second.until(Ended, ending="complete")
    assert ended.metrics["model_digest"] == digests[-1]
    assert second.until(Exited, code=0)

    third = started(run.run_id)
    assert third.until(Ended, ending="complete").metrics == ended.metrics, "it was complete before"

    ledger = PrivacyLedger(ledger_url(), create=False)
    ledger.verify()
    events = [entry.event for entry in ledger.history()]
    ledger.close()
    for kind in (StepCharged, VectorsBound):
        assert [event.step for event in events if isinstance(event, kind)] == [0, 1, 2]

    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "other"))
    settle(tmp_path / "other")
    seen = []
    Trainer(
        parse_config(CONFIG),
        config_dir=tmp_path,
        run_secret=tmp_path / "secret",
        progress=lambda report: seen.append(report.model_digest),
        notice=lambda line: None,
    ).train()
    assert digests == seen


STUCK = """
import gc
import time
from pathlib import Path

from torch import nn

from raycloak.coordinator.runs.demo import digits_model
from raycloak.coordinator.vaults.hosted import Inside

FOLDER = Path({folder!r})


class Stuck(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = digits_model()

    def forward(self, images):
        if (FOLDER / "armed").exists():
            with (FOLDER / "passes").open("a") as file:
                file.write("x")
        if (FOLDER / "stuck").exists():
            (inside,) = (each for each in gc.get_objects() if isinstance(each, Inside))
            while (FOLDER / "stuck").exists() and not inside.is_cancelled():
                time.sleep(0.02)
        return self.layers(images)


def build():
    return Stuck()
"""
"""A model whose passes a test counts, and has last until a cancellation has arrived at its vault."""


UNCHECKED = 3
"""The first step at which no worker checks its model, which takes passes of its own."""


def until_computing(passes: Path) -> None:
    """Return when an armed model has computed a micro-batch."""
    end = time.monotonic() + DEADLINE_S
    while not passes.exists():
        assert time.monotonic() < end, "no micro-batch is computed"
        time.sleep(0.02)


def test_a_step_that_is_held_is_left_between_two_micro_batches(started, tmp_path, raycloak_home):
    settle(raycloak_home)
    (tmp_path / "stuck_model.py").write_text(STUCK.format(folder=str(tmp_path)))
    passes, stuck = tmp_path / "passes", tmp_path / "stuck"
    driver = started(model="stuck_model:build", virtual_workers=2, micro_batch_size=16, steps=UNCHECKED + 1)
    driver.until(Ready)
    driver.send(Allow(computed=UNCHECKED, released=UNCHECKED))
    for step in range(UNCHECKED):
        driver.until(ReleasedStep, step=step)
    (tmp_path / "armed").touch()
    stuck.touch()
    driver.send(Allow(computed=UNCHECKED + 1, released=UNCHECKED + 1))
    until_computing(passes)
    driver.send(Allow(computed=UNCHECKED + 1, released=UNCHECKED + 1, held=True))
    held = driver.until(HeldStep, step=UNCHECKED)
    left = len(passes.read_text())
    passes.unlink()
    stuck.unlink()
    driver.send(Allow(computed=UNCHECKED + 1, released=UNCHECKED + 1))
    assert driver.until(Computed, step=UNCHECKED).epsilon == held.epsilon, "it was charged once"
    again = len(passes.read_text())
    driver.until(ReleasedStep, step=UNCHECKED)
    driver.send(Close())
    driver.until(Ended, ending="complete")
    assert driver.until(Exited, code=0)
    ledger = PrivacyLedger(ledger_url(), create=False)
    ledger.verify()
    charged = [each.event.step for each in ledger.history() if isinstance(each.event, StepCharged)]
    assert charged == [*range(UNCHECKED + 1)]
    ledger.close()
    assert left == 1 < again


SMALL = {"accountant": "rdp", "noise_multiplier": 0.8, "epsilon_cap": 3.0}
"""An account with room for some of eight steps."""


def test_a_caller_of_a_whole_service_cancels_a_step_between_two_micro_batches_and_saves_what_the_cap_leaves(
    tmp_path, ray_cluster, raycloak_home, monkeypatch
):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    settle(raycloak_home)
    (tmp_path / "stuck_model.py").write_text(STUCK.format(folder=str(tmp_path)))
    passes, stuck = tmp_path / "passes", tmp_path / "stuck"
    given = {"steps": 8, "expected_batch_size": CONFIG["expected_batch_size"], "dp_config": SMALL}
    run = {"num_workers": 1, "virtual_workers": 2, "secure_aggregation": False, "metrics": {"bind": "127.0.0.1:0"}}
    with (
        ServiceClient.local(
            datasets={"digits": {"dataset": {"kind": "digits", "public": True}}},
            code=["stuck_model:build"],
            run=run,
            base=tmp_path,
        ) as service,
        service.create_training_client(
            {**given, "model": "stuck_model:build", "dataset": "digits", "micro_batch_size": 16}
        ) as client,
    ):
        for _ in range(UNCHECKED):
            client.forward_backward()
            client.optim_step().result(DEADLINE_S)
        (tmp_path / "armed").touch()
        stuck.touch()
        forward, optim = client.forward_backward(), client.optim_step()
        until_computing(passes)
        assert forward.cancel()
        with pytest.raises(FutureCancelledError, match="stays charged"):
            forward.result(DEADLINE_S)
        assert optim.exception(DEADLINE_S).code == "cancelled"
        left = len(passes.read_text())
        assert client.refresh().step == UNCHECKED
        assert client.dp_metrics.steps_charged == UNCHECKED + 1
        passes.unlink()
        stuck.unlink()
        client.forward_backward()
        last = client.optim_step().result(DEADLINE_S)
        assert last.dp_metrics.steps_charged == UNCHECKED + 1
        assert left == 1 < len(passes.read_text())
        (tmp_path / "armed").unlink()
        while (refused := client.forward_backward().exception(DEADLINE_S)) is None:
            last = client.optim_step().result(DEADLINE_S)
        assert isinstance(refused, BudgetExceededError)
        assert 0 < refused.current_epsilon <= refused.max_epsilon == 3.0
        saved = client.save_state(metadata={"step": last.step}).result(DEADLINE_S)
        assert (saved.step, saved.model_digest) == (last.step, last.model_digest)
        assert len(service.pull_artifact(saved.artifact_id)) == saved.bytes
        assert client.load_state(saved.artifact_id).result(DEADLINE_S).step == last.step
        assert isinstance(client.forward_backward().exception(DEADLINE_S), BudgetExceededError)
        assert client.refresh().status == "READY"
    ledger = PrivacyLedger(ledger_url(), create=False)
    ledger.verify()
    steps = [each.event.step for each in ledger.history() if isinstance(each.event, StepCharged)]
    ledger.close()
    assert steps == list(range(last.step))
