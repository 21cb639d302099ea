"""EvidenceOrchestrator as an actor."""

from collections.abc import Callable

import ray

from coordinator.own_process import forbid_core_dump
from coordinator.quick_imports import quickly

with quickly():
    from attestation.admissions import OrchestratorView
    from attestation.serving_orchestrator import EvidenceOrchestrator


class OrchestratorActor(EvidenceOrchestrator):
    """An EvidenceOrchestrator whose view answers while another method runs."""

    def __init__(self, state_directory: str, clock: Callable[[], float], bind: str | None = None) -> None:
        forbid_core_dump()
        super().__init__(state_directory, clock, bind)

    @ray.method(concurrency_group="control")
    def view(self) -> OrchestratorView:  # type: ignore[override]  # Ray changes the type
        return super().view()
