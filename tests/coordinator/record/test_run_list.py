"""Runs of any version and in any state are listed, and a name leads to one run or to its candidates."""

import json

import pytest

from raycloak.coordinator.record.folder import run_lock
from raycloak.coordinator.record.run_list import UnreadableRun, find_run, list_runs, read_summary
from raycloak.metrics.errors import ConfigError
from tests.coordinator.record.run_logs import LoggedRun

VERDICT = {
    "steps": 100,
    "planned_steps": 100,
    "private": True,
    "privacy_epsilon": 4.0,
    "privacy_epsilon_charged": 3.5,
    "evaluation_accuracy": 0.9,
    "evaluation_loss": None,
    "evidence_class": "simulated",
    "account": "patients",
    "model_digest": "cd" * 32,
}


def test_a_run_that_just_began_is_listed():
    run = LoggedRun()
    with run_lock(run.folder.record.run_id):
        found = read_summary(run.path)
    assert (found.state, found.steps, found.planned_steps) == ("running", 0, None)
    assert (found.epsilon_charged, found.evidence_class, found.account) == (None, None, None)


def test_the_verdict_speaks_of_a_run_that_is_over():
    run = LoggedRun()
    run.admit()
    run.step(0)
    run.folder.write_verdict(json.dumps(VERDICT))
    run.folder.mark("done")
    found = read_summary(run.path)
    assert (found.state, found.steps, found.planned_steps, found.account) == ("done", 100, 100, "patients")
    assert (found.epsilon_charged, found.epsilon_claimed, found.accuracy) == (3.5, 4.0, 0.9)


def test_the_log_speaks_of_a_run_that_goes_on_after_an_earlier_verdict():
    run = LoggedRun()
    run.folder.write_verdict(json.dumps({**VERDICT, "steps": 1}))
    run.admit()
    for step in range(3):
        run.step(step, evaluation_loss=0.25)
    with run_lock(run.folder.record.run_id):
        found = read_summary(run.path)
    assert (found.state, found.steps, found.planned_steps, found.loss) == ("running", 3, 100, 0.25)
    assert (found.epsilon_charged, found.epsilon_claimed) == (pytest.approx(0.12), 4.0)
    assert read_summary(run.path).state == "killed"


def test_a_run_that_cannot_be_read_is_listed_with_its_reason():
    good, bad, damaged = LoggedRun(), LoggedRun(run_id="cd" * 8), LoggedRun(run_id="ef" * 8)
    (bad.path / "run.json").write_text("{}")
    (damaged.path / "metrics.jsonl").write_text("no event\n")
    listed = {each.run_dir: each for each in list_runs()}
    assert listed[good.path].run_id == "ab" * 8
    assert isinstance(listed[bad.path], UnreadableRun)
    assert listed[bad.path].problem.startswith("not_a_run: ")
    assert listed[damaged.path].problem.startswith("run_file: ")


def named(*runs):
    return [LoggedRun(name, f"{run_id:0<16}") for name, run_id in runs]


def test_a_run_is_found_by_directory_name_beginning_and_as_the_last(monkeypatch):
    times = iter((10.0, 30.0, 20.0))
    monkeypatch.setattr("raycloak.coordinator.record.folder.time.time", lambda: next(times))
    small, large, other = named(("digits", "ab12"), ("digits-large", "ab34"), ("mnist", "cd56"))
    assert find_run(str(small.path)) == small.path
    assert find_run("digits") == small.path
    assert find_run("ab12") == find_run("digits-ab1") == small.path
    assert find_run("digits-large") == find_run("digits-l") == find_run("ab3") == large.path
    assert find_run("mn") == other.path
    assert find_run("last") == large.path
    monkeypatch.chdir(other.path.parent)
    assert find_run(other.path.name) == other.path


def test_a_directory_goes_before_the_directories_that_it_begins():
    first, again = named(("digits", "ab12"), ("other", "cd"))
    again.path.rename(first.path.with_name(f"{first.path.name}-2"))
    assert find_run(first.path.name) == first.path


def test_an_ambiguous_name_lists_the_candidates():
    runs = named(("digits", "ab12"), ("digits", "ab34"))
    for name in ("digits", "ab", "di"):
        with pytest.raises(ConfigError, match="is 2 runs") as refused:
            find_run(name)
        assert refused.value.code == "run_ambiguous"
        assert all(run.path.name in refused.value.message for run in runs)


@pytest.mark.parametrize("name", ["nothing", "", "last", "zz"])
def test_an_unknown_name_says_where_runs_are_listed(name):
    with pytest.raises(ConfigError, match="raycloak runs list") as refused:
        find_run(name)
    assert refused.value.code == "run_unknown"


def test_a_path_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not_a_run"):
        find_run(str(tmp_path))
