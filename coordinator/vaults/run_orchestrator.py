"""The orchestrator of a run as its callers see it: an EvidenceOrchestrator whose contract is the run's manifest.

A module of its own, because `attestation` knows no manifest, and the orchestrator's process needs nothing of
`raycloak.coordinator.cluster.control`.
"""

from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
from raycloak.workers.terms.manifest import Manifest


class RunOrchestrator(EvidenceOrchestrator):
    """The methods of an EvidenceOrchestrator, with the types by which calls travel."""

    def begin(self, terms: RunTerms[Manifest], session: str) -> None:  # type: ignore[override]  # of a run alone
        """Begin or resume a session; see `EvidenceOrchestrator.begin`."""
        super().begin(terms, session)
