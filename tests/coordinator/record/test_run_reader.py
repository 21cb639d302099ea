"""A run is read from its directory at any moment of its life, and a damaged file is named."""

import pytest

from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.record.run_reader import read_run, run_directories
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.events import EventWriter
from tests.protocol import config


def made(name="run", run_id="ab" * 8):
    return RunFolder.create(config(name=name), run_id, "/base", None)


def test_a_run_that_just_began_has_no_verdict_and_no_event():
    run = read_run(made().path)
    assert (run.record.status, run.config, run.manifest, run.verdict) == ("running", config(), None, None)
    assert (run.events, run.steps, run.released) == ((), (), ())


def test_a_step_repeated_after_a_resume_counts_once_and_an_unfinished_line_not_at_all():
    folder = made()
    log = folder.path / "metrics.jsonl"
    with EventWriter(log) as events:
        for step, seconds in ((0, 1.0), (1, 1.0), (1, 3.0), (2, 1.0)):
            events.write("step", step=step, seconds=seconds)
        events.write("join", workers=2)
    log.write_bytes(log.read_bytes() + b'{"event":"st')
    folder.write_verdict('{"steps":3}')
    run = read_run(folder.path)
    assert [(event["step"], event["seconds"]) for event in run.steps] == [(0, 1.0), (1, 3.0), (2, 1.0)]
    assert [event["workers"] for event in run.of("join")] == [2]
    assert run.verdict == {"steps": 3}


@pytest.mark.parametrize(
    ("file", "content"), [("metrics.jsonl", "{}\n"), ("metrics.jsonl", "x\n"), ("verdict.json", "[]")]
)
def test_a_damaged_file_is_named(file, content):
    folder = made()
    (folder.path / file).write_text(content)
    with pytest.raises(ConfigError, match=file) as refusal:
        read_run(folder.path)
    assert refusal.value.code == "run_file"


def test_runs_are_listed_from_the_oldest(monkeypatch):
    times = iter((20.0, 10.0))
    monkeypatch.setattr("raycloak.coordinator.record.folder.time.time", lambda: next(times))
    late, early = made("late", "cd" * 8), made("early")
    assert run_directories() == [early.path, late.path]
