"""EvidenceOrchestrator as an actor.

A module of its own, so that the orchestrator's process imports nothing that only other actors need.
"""

from collections.abc import Callable

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.attester.attester import EvidenceSource
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.coordinator.cluster.ray_calls import ReceiverBeside
    from raycloak.coordinator.cluster.run_orchestrator import RunOrchestrator


class OrchestratorActor(ReceiverBeside, RunOrchestrator):
    """A RunOrchestrator that answers calls, and its view and figures while another method runs."""

    def __init__(
        self,
        state_directory: str,
        clock: Callable[[], float],
        bind: str | None = None,
        source: EvidenceSource | None = None,
    ) -> None:
        keep_memory_private()
        super().__init__(state_directory, clock, bind, source)
