"""An execution is a new run, a resumed one or a replay, and nothing between them can be written."""

from pathlib import Path

import pytest

from raycloak.coordinator.record.folder import RunFolder, RunRecord
from raycloak.coordinator.runs.execution import Execution
from raycloak.coordinator.training.assignment import NewRun, ReplayedRun, ResumedRun
from raycloak.workers.models.models import ModelSource
from tests.models import small_model
from tests.protocol import HandRun, config


@pytest.mark.parametrize(
    ("kind", "impossible"),
    [
        (NewRun, {"recorded": None}),
        (NewRun, {"last_step": 1}),
        (ResumedRun, {"recorded": None, "archive": None, "charges": False}),
        (ReplayedRun, {"recorded": None, "archive": None, "first_step": 0, "last_step": 1, "charges": True}),
    ],
)
def test_what_the_kind_of_an_execution_implies_cannot_be_given(kind, impossible):
    with pytest.raises(TypeError):
        kind(**impossible)


@pytest.mark.parametrize("with_manifest", [False, True])
def test_a_run_that_ended_before_it_had_a_manifest_is_resumed_as_a_new_one(tmp_path, monkeypatch, with_manifest):
    begun: list[NewRun | ResumedRun] = []
    monkeypatch.setattr(Execution, "_again", lambda self, folder, assignment: begun.append(assignment))
    record = RunRecord(
        run_id="a", name="run", base="/", secret_file=None, started_at=0.0, status="failed", driver_base="/"
    )
    folder = RunFolder(Path(tmp_path), record)
    if with_manifest:
        folder.write_manifest(HandRun(tmp_path / "other").manifest)
    execution = Execution(config(), ModelSource.of(small_model), str(tmp_path), notice=lambda line: None)
    execution.resume(folder)
    assert [type(each) for each in begun] == [ResumedRun if with_manifest else NewRun]
    assert begun[0].recorded == folder.manifest()
