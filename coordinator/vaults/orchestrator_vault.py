"""EvidenceOrchestrator in a vault."""

import time

from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.openings import OrchestratorOpening
from raycloak.coordinator.vaults.platforms import platform_under
from raycloak.coordinator.vaults.run_orchestrator import RunOrchestrator


class OrchestratorVault(Hosted, RunOrchestrator):
    """A RunOrchestrator that answers calls."""

    OPENING = OrchestratorOpening
    BESIDE = True

    def __init__(self, opening: OrchestratorOpening, inside: Inside) -> None:
        source = platform_under(inside, opening.simulated)
        RunOrchestrator.__init__(self, opening.state_directory, time.time, opening.bind, source)
