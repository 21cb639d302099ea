"""Whole runs that end early, since a result no longer gets better: the same bytes, and the claim of the plan."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.record.outcome import Ending
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.coordinator.training.assignment import NewRun, ResumedRun
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.manifest import Manifest
from tests.protocol import WholeRun, examples, whole_run

STEPS = 6
OF_A_SPLIT = {"metric": "evaluation_accuracy", "patience": 1, "min_delta": 1.0}
"""No accuracy is better by one than another: the second result ends the run."""
OF_A_RELEASE = {"metric": "measured_evaluation_loss", "patience": 1, "min_delta": 1e9}
RELEASED = {"measurements": {"evaluation": {"every": 2, "noise_multiplier": 20}}}


class Killed(BaseException):
    """An error that stands for a driver that ends without any of its handlers."""


def archive(home: Path) -> Archive:
    config = CheckpointConfig(checkpoint_frequency=1, storage="packages")
    return Archive(config, "the one of SECRET", home, lambda line: None)


def early(home: Path, assignment: Any = None, **fields: Any) -> WholeRun:
    (home / "data").mkdir(parents=True, exist_ok=True)
    features, labels = examples()
    np.savez(home / "data" / "split.npz", features=features[:8], labels=labels[:8])
    split = {"kind": "npz", "path": "split.npz", "features": "features", "public": True}
    return whole_run(
        home,
        assignment=assignment or NewRun(archive(home)),
        steps=STEPS,
        evaluation={"dataset": split, "every": 1},
        **{"early_stopping": OF_A_SPLIT, **fields},
    )


def killed(home: Path, method: str, index: int, **fields: Any) -> WholeRun:
    """Return a run whose driver is killed at a call, once what it handed over to be sealed is published."""
    run = early(home, **fields)

    def disturb(call: Any) -> None:
        if (call.method, call.index) == (method, index):
            run.coordinator._training.checkpoints.close(60)
            raise Killed

    run.stage.disturb = disturb
    with pytest.raises(Killed):
        run.train()
    return run


def resumed(home: Path, first: WholeRun, **fields: Any) -> WholeRun:
    recorded = Manifest.model_validate_json((first.folder / "manifest.json").read_bytes())
    run = early(home, ResumedRun(recorded, archive(home)), **fields)
    for name in ("early_stopping.json", "measurements.json"):
        if (first.folder / name).exists():
            shutil.copy(first.folder / name, run.folder)
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    run = early(tmp_path_factory.mktemp("undisturbed"))
    run.train()
    return run


def test_guarantee_a_run_that_ends_early_claims_what_its_plan_costs(undisturbed: WholeRun) -> None:
    finished = undisturbed.finished
    assert (finished.ending, finished.steps) == (Ending.EARLY, 2)
    assert finished.charged == {"gradient": 2}
    verdict = verdict_of(finished, undisturbed.folder, 1.0, "early_stopped", ())
    assert verdict.privacy_epsilon == pytest.approx(finished.plan.epsilon_outsiders)
    assert verdict.privacy_epsilon_if_stop_was_blind == verdict.privacy_epsilon
    by_hand = verdict_of(finished, undisturbed.folder, 1.0, "stopped", ())
    assert by_hand.privacy_epsilon_if_stop_was_blind < verdict.privacy_epsilon


@pytest.mark.parametrize(("method", "index"), [("charge", 1), ("open_step", 1), ("finish", 0)])
def test_guarantee_a_run_that_was_killed_ends_early_after_the_same_step(
    tmp_path: Path, undisturbed: WholeRun, method: str, index: int
) -> None:
    first = killed(tmp_path, method, index)
    second = resumed(tmp_path, first)
    finished = second.train()
    assert (finished.ending, finished.steps) == (Ending.EARLY, 2)
    assert finished.model_digest == undisturbed.finished.model_digest
    assert finished.charged == {"gradient": 2}


def test_a_release_that_ends_a_run_comes_before_the_next_step_is_charged(tmp_path: Path) -> None:
    run = early(tmp_path, early_stopping=OF_A_RELEASE, **RELEASED)
    finished = run.train()
    assert (finished.ending, finished.steps) == (Ending.EARLY, 4)
    assert finished.charged == {"gradient": 4, "evaluation": 2}


def test_without_the_record_of_its_results_a_run_is_not_resumed(tmp_path: Path) -> None:
    first = killed(tmp_path, "charge", 1)
    second = resumed(tmp_path, first)
    (second.folder / "early_stopping.json").unlink()
    with pytest.raises(ConfigError, match="lacks the result after step 1") as caught:
        second.train()
    assert caught.value.code == "early_stopping"
