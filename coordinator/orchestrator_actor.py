"""`attestation.serving_orchestrator.ServingOrchestrator` as an actor."""

import ray

from coordinator.quick_imports import quickly

with quickly():
    from attestation.admissions import OrchestratorView
    from attestation.serving_orchestrator import ServingOrchestrator


class OrchestratorActor(ServingOrchestrator):
    """ServingOrchestrator whose view answers while another method runs."""

    @ray.method(concurrency_group="control")
    def view(self) -> OrchestratorView:  # type: ignore[override]  # Ray changes the type
        return super().view()
