"""PrivacyLedger as an actor.

A module of its own, so that the ledger's process imports nothing that only other actors need.
"""

import ray

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.coordinator.ledger.ledger import PrivacyLedger
    from raycloak.coordinator.ledger.view import LedgerView


class LedgerActor(PrivacyLedger):
    """A PrivacyLedger whose view answers during a charge."""

    def __init__(self, url: str, create: bool = True, witness: str | None = None) -> None:
        keep_memory_private()
        super().__init__(url, create, witness)

    @ray.method(concurrency_group="control")
    def view(self) -> LedgerView:  # type: ignore[override]  # Ray changes the type
        return super().view()
