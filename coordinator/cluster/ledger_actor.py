"""PrivacyLedger as an actor.

A module of its own, so that the ledger's process imports nothing that only other actors need.
"""

import ray

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.coordinator.ledger.ledger import PrivacyLedger
    from raycloak.coordinator.ledger.view import LedgerView


class LedgerActor(PrivacyLedger):
    """A PrivacyLedger whose view answers during a charge."""

    @ray.method(concurrency_group="control")
    def view(self) -> LedgerView:  # type: ignore[override]  # Ray changes the type
        return super().view()
