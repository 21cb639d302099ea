"""Relays of vaults that are the tests' own. They import none of what the vaults do."""

from raycloak.coordinator.cluster.relays import OrchestratorActor, TrainWorkerActor


class SearchingWorkerActor(TrainWorkerActor):
    TARGET = "tests.ray.searching:SearchingWorkerVault"


class AgedOrchestratorActor(OrchestratorActor):
    TARGET = "tests.ray.aged:AgedOrchestratorVault"


class LaidWorkerActor(TrainWorkerActor):
    TARGET = "tests.ray.laid:LaidWorkerVault"
