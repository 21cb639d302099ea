"""An orchestrator's vault whose time passes as a test says."""

import time
from pathlib import Path

from raycloak.coordinator.vaults.hosted import Inside
from raycloak.coordinator.vaults.openings import OrchestratorOpening
from raycloak.coordinator.vaults.orchestrator_vault import OrchestratorVault

PASSED = "passed"
"""The file in the state folder that says how many seconds have passed."""


class AgedOrchestratorVault(OrchestratorVault):
    def __init__(self, opening: OrchestratorOpening, inside: Inside) -> None:
        super().__init__(opening, inside)
        file = Path(opening.state_directory).with_name(PASSED)
        self._clock = lambda: time.time() + int(file.read_text())
