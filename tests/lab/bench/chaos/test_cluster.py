"""The roles of the processes of a cluster."""

import pytest

from raycloak.coordinator.cluster.aggregator_actor import MaskedAggregatorActor
from raycloak.coordinator.cluster.ledger_actor import LedgerActor
from raycloak.coordinator.cluster.orchestrator_actor import OrchestratorActor
from raycloak.coordinator.cluster.processes import Process
from raycloak.coordinator.cluster.worker_actor import TrainWorkerActor
from raycloak_lab.bench.chaos.cluster import CLASSES, role, victims


def _process(pid, title, *, state="S", started=None):
    return Process(pid, 1, 1, state, pid if started is None else started, title, 0.0)


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
