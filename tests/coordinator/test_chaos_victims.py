"""Who is who in a table of processes, and that nobody outside the own raylets is named."""

import os
import subprocess
import sys

import pytest

from coordinator.actors import LedgerActor, OrchestratorActor
from coordinator.chaos_victims import CLASSES, Process, descendants, process_table, victims
from coordinator.ray_backend import MaskedAggregatorActor, TrainWorkerActor


def _process(pid, title, *, parent=1, state="S", started=None):
    return Process(pid, parent, state, pid if started is None else started, title)


def test_the_classes_are_those_that_are_wired():
    wired = (TrainWorkerActor, MaskedAggregatorActor, LedgerActor, OrchestratorActor)
    assert list(CLASSES) == [cls.__name__ for cls in wired]


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::TrainWorkerActor", "worker"),
        ("ray::TrainWorkerActor.step", "worker"),
        ("ray::LedgerActor.charge", "ledger"),
        ("ray::NodePlatform", None),
        ("ray::IDLE", None),
        ("TrainWorkerActor", None),
        ("python -c 'ray::LedgerActor'", None),
    ],
)
def test_a_title_names_the_role(title, role):
    assert _process(1, title).role == role


def test_only_what_runs_below_the_raylets_is_found():
    table = [_process(10, "raylet"), _process(11, "agent", parent=10), _process(12, "ray::LedgerActor", parent=11)]
    others = [_process(20, "raylet"), _process(21, "ray::LedgerActor", parent=20)]
    assert [each.pid for each in descendants([10], table + others)] == [11, 12]


def test_stopped_processes_and_the_youngest_spare_aggregator_are_left_out():
    found = victims(
        [
            _process(5, "ray::MaskedAggregatorActor", started=30),
            _process(6, "ray::MaskedAggregatorActor", started=20),
            _process(7, "ray::MaskedAggregatorActor", started=10, state="T"),
            _process(8, "ray::TrainWorkerActor.step", state="R"),
            _process(9, "ray::TrainWorkerActor", state="Z"),
        ],
        aggregators=1,
    )
    assert {role: [each.pid for each in processes] for role, processes in found.items()} == {
        "worker": [8],
        "aggregator": [6],
        "ledger": [],
        "orchestrator": [],
    }


def test_the_table_shows_a_child_of_this_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        children = {each.pid: each for each in descendants([os.getpid()], process_table())}
        assert sys.executable in children[child.pid].title
        child.communicate(b"\n")


def test_a_process_that_ends_meanwhile_is_left_out(tmp_path):
    (tmp_path / "7").mkdir()
    assert process_table(tmp_path) == ()
