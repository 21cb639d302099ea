"""A run is read from its directory at any moment of its life, and a damaged file is named."""

import hashlib
import json
import threading
from pathlib import Path

import pytest

from raycloak.coordinator.config import home
from raycloak.coordinator.record.folder import RunFolder, run_lock
from raycloak.coordinator.record.run_reader import (
    EventTail,
    read_run,
    read_written_config,
    run_directories,
    state_of,
)
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
    ("file", "content"),
    [
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", "x\n"),
        ("verdict.json", "[]"),
        ("verdict.json", "[" * 10**5),
        ("metrics.jsonl", "[" * 10**5 + "\n"),
    ],
    ids=["no name", "no JSON", "a list", "a deep list", "a deep line"],
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


def test_runs_of_an_unreadable_record_are_listed_and_listing_makes_nothing(raycloak_home):
    assert run_directories() == []
    assert not raycloak_home.exists()
    folder = made()
    damaged = home.runs_folder() / "damaged-00"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    assert run_directories() == [damaged, folder.path]


def test_a_run_of_a_former_format_is_listed_and_refused_by_name():
    folder = made()
    for stated, named in (({"run_id": "ab" * 8}, "without a format"), ({"format": 1}, "of format 1")):
        (folder.path / "manifest.json").write_text(json.dumps(stated) + "\n")
        with pytest.raises(ConfigError, match=rf"former_format: .*manifest\.json is a Manifest {named}; .* format 2"):
            RunFolder.open(folder.path).manifest()
    assert run_directories() == [folder.path]


def test_a_tail_reads_each_event_once_and_a_line_only_when_it_is_whole():
    folder = made()
    tail, log = EventTail(folder.path), folder.path / "metrics.jsonl"
    assert list(tail.read()) == []
    log.write_bytes(b'{"event":"a"}\n{"event":"b"}\n{"eve')
    assert [event["event"] for event in tail.read()] == ["a", "b"]
    assert list(tail.read()) == []
    with log.open("ab") as file:
        file.write(b'nt":"c"}')
    assert list(tail.read()) == []
    with log.open("ab") as file:
        file.write(b"\n")
    assert [event["event"] for event in tail.read()] == ["c"]


def test_a_tail_outlives_a_resume_that_cuts_the_unfinished_line():
    folder = made()
    tail, log = EventTail(folder.path), folder.path / "metrics.jsonl"
    log.write_bytes(b'{"event":"a"}\n{"event":"a long line that was never finis')
    assert [event["event"] for event in tail.read()] == ["a"]
    with EventWriter(log) as events:
        events.write("step", step=0)
    assert [event["event"] for event in tail.read()] == ["step"]


def test_a_tail_names_a_damaged_line_and_a_log_that_was_replaced():
    folder = made()
    tail, log = EventTail(folder.path), folder.path / "metrics.jsonl"
    log.write_bytes(b'{"event":"a"}\n{"event":"b"}\n')
    assert len(list(tail.read())) == 2
    with log.open("ab") as file:
        file.write(b"[]\n")
    with pytest.raises(ConfigError, match="line 3 is no event"):
        list(tail.read())
    log.write_bytes(b'{"event":"a"}\n')
    with pytest.raises(ConfigError, match="became shorter"):
        list(tail.read())


def test_only_the_lock_tells_a_run_from_a_killed_one(tmp_path):
    folder = made()
    with run_lock(folder.record.run_id):
        assert state_of(folder.path) == "running"
    assert state_of(folder.path) == "killed"
    folder.mark("failed")
    assert state_of(folder.path) == "failed"
    copy = tmp_path / "copies" / "runs" / folder.path.name
    copy.mkdir(parents=True)
    folder.mark("running")
    (copy / "run.json").write_bytes((folder.path / "run.json").read_bytes())
    assert state_of(copy) == "unknown"


def test_a_run_that_ends_between_two_looks_is_not_called_killed(monkeypatch):
    folder = made()

    def ends(path: Path, run_id: str) -> bool:
        folder.mark("done")
        return False

    monkeypatch.setattr("raycloak.coordinator.record.run_reader.is_executing", ends)
    assert state_of(folder.path) == "done"


def test_asking_keeps_no_execution_from_starting():
    """The guarantee of `is_executing`: while a reader asks without a pause, every start succeeds."""
    folder, over = made(), threading.Event()
    with run_lock(folder.record.run_id):
        pass

    def ask() -> None:
        while not over.is_set():
            state_of(folder.path)

    reader = threading.Thread(target=ask)
    reader.start()
    try:
        for _ in range(300):
            with run_lock(folder.record.run_id):
                pass
    finally:
        over.set()
        reader.join()


def test_a_configuration_of_another_version_is_read_as_it_is_written():
    folder = made()
    file = folder.path / "config.yaml"
    file.write_text("name: run\nof_another_version: 1\n")
    written = read_written_config(folder.path)
    assert written.values == {"name": "run", "of_another_version": 1}
    assert written.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text("[")
    with pytest.raises(ConfigError, match=r"config\.yaml is no object"):
        read_written_config(folder.path)
    file.unlink()
    with pytest.raises(ConfigError, match="run_file"):
        read_written_config(folder.path)
