"""The record of marks names what exists, and a test without a mark cannot be slow for long."""

import re
from types import SimpleNamespace

import pytest

from tests import marks
from tests.conftest import ROOT
from tests.marks import LIMIT_S, Limit, marks_of, pytest_collection_modifyitems, recorded

RECORD = recorded()


def test_the_record_names_folders_files_and_tests_that_exist():
    missing = []
    for place in RECORD:
        path, _, name = place.partition("::")
        if not (ROOT / path).exists() or (name and not re.search(rf"def {name}\(", (ROOT / path).read_text())):
            missing.append(place)
    assert missing == []


def test_no_line_of_the_record_repeats_another():
    for place, given in RECORD.items():
        above = marks_of(place, {other: each for other, each in RECORD.items() if other != place})
        assert len(set(given)) == len(given), place
        assert not above & set(given), place


def test_a_test_has_the_marks_of_its_folders_its_file_and_its_own():
    record = {"tests/a": ["ray"], "tests/a/test_b.py": ["server"], "tests/a/test_b.py::test_c": ["slow", "process"]}
    assert marks_of("tests/a/test_b.py::test_c", record) == {"ray", "server", "slow", "process"}
    assert marks_of("tests/a/test_b.py::test_cc", record) == {"ray", "server"}
    assert marks_of("tests/ab/test_b.py::test_c", record) == set()


def test_each_collected_test_is_marked():
    given = []
    pytest_collection_modifyitems([SimpleNamespace(nodeid="tests/ray/test_a.py::test_b[c/d]", add_marker=given.append)])
    assert given == ["ray"]


@pytest.mark.parametrize("line", ["fast tests/ray", "ray", "ray tests/ray tests/metrics"])
def test_a_line_that_cannot_be_read_is_named(tmp_path, line):
    record = tmp_path / "marks.txt"
    record.write_text(f"# a comment\n{line}\n")
    with pytest.raises(pytest.UsageError, match=re.escape("marks.txt:2")):
        recorded(record)


@pytest.mark.parametrize("exceeds", [0, 1, 2])
def test_a_test_above_the_limit_is_run_again_since_the_first_one_pays_for_what_others_share(monkeypatch, exceeds):
    limit, runs, told = Limit(), [], []

    def run(item, log, nextitem):
        runs.append(item)
        limit._exceeded = len(runs) <= exceeds
        return [f"run {len(runs)}"]

    monkeypatch.setattr(marks, "runtestprotocol", run)
    hooks = {
        "pytest_runtest_logstart": lambda **_: None,
        "pytest_runtest_logreport": lambda report: told.append(report),
        "pytest_runtest_logfinish": lambda **_: None,
    }
    item = SimpleNamespace(nodeid="a", location=(), ihook=SimpleNamespace(**hooks), _initrequest=lambda: None)
    assert limit.pytest_runtest_protocol(item, None)
    assert told == [f"run {1 + min(exceeds, 1)}"]


@pytest.mark.parametrize(
    ("own_s", "shared_s", "names", "fails"),
    [
        (1.1 * LIMIT_S, 0.0, [], True),
        (0.9 * LIMIT_S, 0.0, [], False),
        (0.9 * LIMIT_S, 5.0, [], False),
        (1.1 * LIMIT_S, 5.0, ["parametrize"], True),
        (1.1 * LIMIT_S, 0.0, ["slow"], False),
        (1.1 * LIMIT_S, 0.0, ["server", "parametrize"], False),
    ],
)
def test_an_unmarked_test_above_the_limit_fails(own_s, shared_s, names, fails):
    clock = SimpleNamespace(now=7.0)
    limit, item = (
        Limit(lambda: clock.now),
        SimpleNamespace(iter_markers=lambda: [SimpleNamespace(name=name) for name in names]),
    )
    limit.pytest_runtest_setup()
    for scope, cost_s in (("session", shared_s), ("function", own_s / 2)):
        fixture = limit.pytest_fixture_setup(SimpleNamespace(scope=scope))
        next(fixture)
        clock.now += cost_s
        with pytest.raises(StopIteration):
            next(fixture)
    call = limit.pytest_runtest_call(item)
    next(call)
    clock.now += own_s / 2
    with pytest.raises(pytest.fail.Exception if fails else StopIteration):
        next(call)
