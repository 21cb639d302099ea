"""The roles of the processes of a cluster."""

import pytest

from raycloak.coordinator.cluster.processes import Process
from raycloak.coordinator.cluster.relays import (
    LedgerActor,
    MaskedAggregatorActor,
    OrchestratorActor,
    TrainWorkerActor,
)
from raycloak_lab.bench.chaos.cluster import CLASSES, role, victims


def _process(pid, title, *, state="S", started=None, parent=1):
    return Process(pid, parent, 1, state, pid if started is None else started, title, 0.0)


def test_the_classes_are_those_that_are_wired():
    wired = (TrainWorkerActor, MaskedAggregatorActor, LedgerActor, OrchestratorActor)
    assert list(CLASSES) == [cls.__name__ for cls in wired]


@pytest.mark.parametrize(
    ("title", "expected"),
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
def test_a_title_names_the_role(title, expected):
    assert role(_process(1, title)) == expected


def test_a_relay_and_its_vault_are_victims_but_no_stopped_process_and_no_spare_aggregator():
    found = victims(
        [
            _process(5, "ray::MaskedAggregatorActor", started=30),
            _process(6, "ray::MaskedAggregatorActor", started=20),
            _process(7, "ray::MaskedAggregatorActor", started=10, state="T"),
            _process(8, "ray::TrainWorkerActor.step", state="R"),
            _process(9, "ray::TrainWorkerActor", state="Z"),
            _process(10, "python -m a.vault", parent=8),
            _process(11, "python -m a.vault", parent=8, state="Z"),
            _process(12, "python -m a.vault", parent=5),
            _process(13, "python -m a.childs.child", parent=10),
        ],
        aggregators=1,
    )
    assert {role: [each.pid for each in processes] for role, processes in found.items()} == {
        "worker": [8, 10],
        "aggregator": [6],
        "ledger": [],
        "orchestrator": [],
    }
