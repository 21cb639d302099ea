"""The orchestrator of a run as its callers see it: an EvidenceOrchestrator whose contract is the run's manifest.

A module of its own, because `attestation` knows no manifest, and the orchestrator's process needs nothing of
`raycloak.coordinator.cluster.control`.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.orchestrator.documents import DOCUMENTS_FILE
from raycloak.attestation.orchestrator.revocations import count_revocations
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.orchestrator.state import state_file
from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
from raycloak.workers.terms.manifest import Manifest


class RunOrchestrator(EvidenceOrchestrator):
    """The methods of an EvidenceOrchestrator, with the types by which calls travel."""

    _exported: Path | None = None

    def begin(self, terms: RunTerms[Manifest], session: str) -> None:  # type: ignore[override]  # of a run alone
        """Begin or resume a session; see `EvidenceOrchestrator.begin`."""
        super().begin(terms, session)

    def exported_log(self) -> NDArray[np.uint8]:
        """Return the bytes of the log that a vault of the machine exported last."""
        assert self._exported is not None, "a vault of the machine has exported a log"
        return np.fromfile(self._exported, np.uint8)

    def exported_documents(self) -> NDArray[np.uint8]:
        """Return the bytes of the documents beside that log."""
        assert self._exported is not None, "a vault of the machine has exported a log"
        return np.fromfile(self._exported.with_name(DOCUMENTS_FILE), np.uint8)

    def revocations(self) -> int:
        """Count the revocations of the run so far."""
        return count_revocations(state_file(Path(self._directory), self._open.run_id))
