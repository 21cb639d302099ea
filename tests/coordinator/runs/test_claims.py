"""What a run that was stopped, that failed or that was resumed states, through the classes of a whole run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.accounting.calibration import epsilon_against
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.planning.masks import MaskPlan
from raycloak.coordinator.record.outcome import Ending, Finished
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.coordinator.training.assignment import NewRun, ResumedRun
from raycloak.coordinator.training.pace import StopRequest
from raycloak.metrics.errors import RunFailedError
from raycloak.workers.terms.manifest import Manifest
from tests.protocol import WholeRun, on_machines, whole_run

STEPS = 12
FULL_BATCHES = {"steps": STEPS, "expected_batch_size": 40}
PLD = {"dp_config": {"noise_multiplier": 5.0, "epsilon_cap": 20.0}}
RDP = {"dp_config": {"noise_multiplier": 5.0, "epsilon_cap": 20.0, "accountant": "rdp"}}


def archive(home: Path) -> Archive:
    config = CheckpointConfig(checkpoint_frequency=1, storage="packages")
    return Archive(config, "the one of SECRET", home, lambda line: None)


def stopped_after(home: Path, steps: int, **fields: Any) -> WholeRun:
    """A run whose user stops it by hand once he has seen what ``steps`` steps released."""
    stop = StopRequest()
    run = whole_run(home, assignment=NewRun(archive(home), stop), **FULL_BATCHES | fields)

    def seen(call: Any) -> None:
        if (call.method, call.index) == ("charge", steps - 1):
            stop.make()

    run.stage.disturb = seen
    assert run.train().ending is Ending.STOPPED
    assert run.finished.steps == steps
    return run


def resumed(home: Path, first: WholeRun, **fields: Any) -> WholeRun:
    recorded = Manifest.model_validate_json((first.folder / "manifest.json").read_bytes())
    return whole_run(home, assignment=ResumedRun(recorded, archive(home)), **FULL_BATCHES | fields)


def verdict(run: WholeRun, finished: Finished) -> Verdict:
    return verdict_of(finished, run.folder, 1.0, "stopped", ())


def packages(home: Path) -> list[PackageManifest]:
    paths = sorted((home / "packages").rglob("manifest.json"))
    found = [path.read_bytes() for path in paths]
    return [PackageManifest.model_validate_json(text) for text in found if b'"wrapped_key"' in text]


@pytest.mark.parametrize("accountant", [PLD, RDP], ids=["pld", "rdp"])
def test_a_run_that_its_user_stopped_claims_its_plan_in_verdict_and_packages(tmp_path, accountant):
    run = stopped_after(tmp_path, 2, **accountant)
    plan, stated = run.finished.plan, verdict(run, run.finished)
    whole = epsilon_against(plan.mechanism, 0, plan.delta, STEPS)
    assert stated.privacy_epsilon == whole == plan.epsilon_outsiders
    assert max(stated.epsilon_by_accountant.values()) >= whole * (1 - 1e-12)
    blind = stated.privacy_epsilon_if_stop_was_blind
    assert blind == epsilon_against(plan.mechanism, 0, plan.delta, 2) < 0.5 * whole
    # An rdp account counts at the order that suits the plan's share of its cap, so it states more than the plan alone.
    assert stated.privacy_epsilon_charged < (0.5 * whole if plan.mechanism.accountant == "pld" else plan.epsilon_cap)
    assert stated.epsilon_cap == 20.0
    sealed = packages(tmp_path)
    assert {package.step for package in sealed} >= {1, 2}
    assert {package.epsilon for package in sealed} == {whole}


def test_a_resumed_run_claims_what_it_claimed_when_it_was_stopped(tmp_path):
    first = stopped_after(tmp_path, 2, **PLD)
    second = resumed(tmp_path, first, **PLD)
    second.train()
    assert second.finished.steps == STEPS
    before, after = verdict(first, first.finished), verdict(second, second.finished)
    assert before.privacy_epsilon == after.privacy_epsilon == after.privacy_epsilon_if_stop_was_blind


def test_a_step_that_was_decoded_and_did_not_finish_is_counted(tmp_path):
    """The aggregator has the second sum when the driver learns of nothing but a failure."""

    def lost(*answer: object) -> tuple[object, ...]:
        raise RunFailedError("unreachable", "the aggregator was lost after it had decoded", "")

    run = whole_run(tmp_path, **FULL_BATCHES, **PLD)
    run.stage.disturb = lambda call: lost if (call.method, call.index) == ("reduce", 1) else None
    with run.events:
        with pytest.raises(RunFailedError, match="after it had decoded"):
            run.coordinator.run()
        finished = run.coordinator.salvage(destroy=False)
        for actor in run.session.control.actors.values():
            actor.handle.close()
    assert finished is not None
    assert finished.steps == 1
    assert finished.charged == {"gradient": 2}
    stated = verdict(run, finished)
    assert stated.privacy_epsilon_if_stop_was_blind == pytest.approx(1.06, abs=0.01), "0.73 for the finished step"
    assert stated.privacy_epsilon == finished.plan.epsilon_outsiders > 2.5


def test_a_capped_run_claims_what_fits_its_cap(tmp_path):
    cap = {"dp_config": {"noise_multiplier": 5.0, "epsilon_cap": 2.0}}
    run = whole_run(tmp_path, **FULL_BATCHES | cap)
    assert run.train().ending is Ending.CAP
    stated = verdict(run, run.finished)
    assert 1 < stated.steps < STEPS
    assert 1.8 < stated.privacy_epsilon == run.finished.plan.epsilon_outsiders <= 2.0


def test_the_epsilon_with_one_worker_adds_up_what_a_machine_held_in_every_execution(tmp_path):
    """Three workers on three machines; after the resume, another one stands on machine A, with other keys."""
    first = stopped_after(tmp_path, 2, tamper=on_machines(tmp_path, lambda i: f"machine-{i[-1]}"), **PLD)
    assert first.finished.most_hosted == 3
    moved = on_machines(tmp_path, lambda i: f"machine-{(int(i[-1]) + 1) % 3}")
    second = resumed(tmp_path, first, tamper=moved, **PLD)
    second.train()
    plan, most = second.finished.plan, second.finished.most_hosted
    assert 3 < most <= 6
    stated = verdict(second, second.finished)
    assert stated.keys_on_one_machine == most
    assert stated.privacy_epsilon_one_worker == epsilon_against(plan.mechanism, most, plan.delta, STEPS)
    assert stated.privacy_epsilon_one_worker > verdict(first, first.finished).privacy_epsilon_one_worker
    # Each of a machine's virtual workers may have been a worker of its own in the mask graph.
    for colluding, is_claimed in ((most, True), (most - 1, False)):
        masked = replace(plan, masks=MaskPlan(colluding, 4, 47, None))
        one_worker = verdict(second, replace(second.finished, plan=masked)).privacy_epsilon_one_worker
        assert (one_worker is not None) == is_claimed
