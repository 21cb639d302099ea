"""EvidenceOrchestrator as an actor.

A module of its own, so that the orchestrator's process imports nothing that only other actors need.
"""

from collections.abc import Callable

import ray

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.attestation.orchestrator.admissions import OrchestratorView
    from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
    from raycloak.metrics.collectors import ServiceFigures


class OrchestratorActor(EvidenceOrchestrator):
    """An EvidenceOrchestrator whose view and figures answer while another method runs."""

    def __init__(self, state_directory: str, clock: Callable[[], float], bind: str | None = None) -> None:
        keep_memory_private()
        super().__init__(state_directory, clock, bind)

    @ray.method(concurrency_group="control")
    def view(self) -> OrchestratorView:  # type: ignore[override]  # Ray changes the type
        return super().view()

    @ray.method(concurrency_group="control")
    def service_figures(self) -> ServiceFigures | None:  # type: ignore[override]  # Ray changes the type
        return super().service_figures()
