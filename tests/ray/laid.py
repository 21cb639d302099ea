"""A worker whose model lies over several devices, as many as its name says; they are tags on the host's memory."""

from contextlib import ExitStack

from raycloak.coordinator.vaults.hosted import Inside
from raycloak.coordinator.vaults.openings import WorkerOpening
from raycloak.coordinator.vaults.worker_vault import WorkerVault
from tests.workers.gradients.tagged_devices import workers_over

COUNTS = (1, 2, 4, 3)
"""Of the workers in turn; a fourth one replaces another."""


class LaidWorkerVault(WorkerVault):
    """A worker over its devices, from its first call to the end of its process."""

    def __init__(self, opening: WorkerOpening, inside: Inside) -> None:
        self._over = ExitStack()
        self._over.enter_context(workers_over(COUNTS[int(opening.member_id.rpartition("-")[2]) % len(COUNTS)]))
        super().__init__(opening, inside)
