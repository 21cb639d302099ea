"""Runs with metrics, an update rule and a schedule of the user's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.coordinator.training.assignment import NewRun, ReplayedRun, ResumedRun
from raycloak.coordinator.training.pace import StopRequest
from raycloak.metrics.errors import ProtocolError, RefusedError
from raycloak.workers.terms.manifest import Manifest
from tests.protocol import RENYI, Call, WholeRun, examples, whole_run

RULES = Path(__file__).parents[2] / "own_code.py"
STEPS = 4


def run_of(home: Path, **fields: Any) -> WholeRun:
    """Return a run whose own code stands in a file beside its data."""
    base = home / "data"
    base.mkdir(parents=True, exist_ok=True)
    if not (base / "own.py").exists():
        (base / "own.py").write_text(RULES.read_text())
    features, labels = examples()
    np.savez(base / "public.npz", features=features, labels=labels)
    split = {"kind": "npz", "path": "public.npz", "features": "features", "public": True}
    rule = {"name": "own:Lion", "learning_rate": 0.01, "settings": {"beta": 0.5}, "schedule": "own:ramp"}
    evaluation = {"dataset": split, "every": 2, "metrics": ["own:predicted_first", "own:largest_label"]}
    return whole_run(home, steps=STEPS, **{"optimizer": rule, "evaluation": evaluation, "dp_config": RENYI, **fields})


def manifest_of(run: WholeRun) -> Manifest:
    return Manifest.model_validate_json((run.folder / "manifest.json").read_bytes())


def archive(home: Path) -> Archive:
    config = CheckpointConfig(checkpoint_frequency=2, storage="packages")
    return Archive(config, "run", home, lambda line: None, lambda steps, digest: published.append((steps, digest)))


published: list[tuple[int, bytes]] = []


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> WholeRun:
    run = run_of(tmp_path_factory.mktemp("own"))
    run.train()
    return run


def test_an_own_metric_stands_beside_the_accuracy(own) -> None:
    found = own.finished.evaluation.own
    assert found.keys() == {"predicted_first", "largest_label"}
    assert found["largest_label"] == 2.0
    verdict = verdict_of(own.finished, own.folder, 1.0, "complete", ())
    assert verdict.metrics()["evaluation_metrics"] == found
    assert own.reports[-1].evaluation_metrics == found
    assert [report.evaluation_metrics == {} for report in own.reports] == [True, False, True, False]
    told = [(line["steps"], line["value_name"]) for line in own.told if line["event"] == "metric"]
    assert told == [(steps, name) for steps in (2, 4) for name in ("predicted_first", "largest_label")]


def test_the_manifest_states_the_source_of_all_own_code(own) -> None:
    computation = manifest_of(own).computation
    assert [metric.name for metric in computation.metrics] == ["own:predicted_first", "own:largest_label"]
    sources = {computation.optimizer.code, computation.optimizer.schedule_code}
    assert sources == {metric.source for metric in computation.metrics}
    assert {len(source) for source in sources} == {32}


def test_guarantee_a_run_with_an_own_rule_is_exact_through_a_stop_a_resume_and_a_replay(own, tmp_path) -> None:
    """With other workers and ranges each time; the rule's state comes back from the package."""
    published.clear()
    stop = StopRequest()
    first = run_of(
        tmp_path,
        assignment=NewRun(archive(tmp_path), stop),
        disturb=lambda call: stop.make() if (call.method, call.index) == ("reduce", 1) else None,
    )
    first.train()
    assert [steps for steps, _ in published] == [2]
    recorded = manifest_of(first)
    resumed = run_of(tmp_path, num_workers=4, aggregators=3, assignment=ResumedRun(recorded, archive(tmp_path)))
    resumed.train()
    assert first.digests + resumed.digests == own.digests
    replayed = run_of(tmp_path, aggregators=2, assignment=ReplayedRun(recorded, archive(tmp_path), 2, 4))
    replayed.train()
    assert replayed.digests == own.digests[2:]


def test_a_run_is_not_resumed_with_other_code(tmp_path) -> None:
    stop = StopRequest()
    first = run_of(
        tmp_path,
        assignment=NewRun(archive(tmp_path), stop),
        disturb=lambda call: stop.make() if (call.method, call.index) == ("reduce", 0) else None,
    )
    first.train()
    (tmp_path / "data" / "own.py").write_text(RULES.read_text() + "# changed\n")
    second = run_of(tmp_path, assignment=ResumedRun(manifest_of(first), archive(tmp_path)))
    with pytest.raises(RefusedError, match="resume_differs") as refusal:
        second.train()
    assert "computation.optimizer.code was" in refusal.value.message
    assert "computation.metrics[0].source was" in refusal.value.message


def test_guarantee_an_aggregator_with_other_source_than_the_manifests_is_refused(tmp_path) -> None:
    def change(call: Call) -> None:
        if (call.member_id[:10], call.method) == ("aggregator", "present"):
            (tmp_path / "data" / "own.py").write_text(RULES.read_text() + "# changed\n")

    run = run_of(tmp_path, disturb=change)
    with pytest.raises(ProtocolError, match="the source of own:Lion is not the one that the manifest states"):
        run.train()
    assert run.stage.calls("charge") == []
