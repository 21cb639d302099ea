"""PrivacyLedger as an actor.

A module of its own, so that the ledger's process imports nothing that only other actors need.
"""

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.coordinator.cluster.ray_calls import ReceiverBeside
    from raycloak.coordinator.ledger.ledger import PrivacyLedger


class LedgerActor(ReceiverBeside, PrivacyLedger):
    """A PrivacyLedger that answers calls, and its view during a charge."""

    def __init__(self, url: str, create: bool = True, witness: str | None = None) -> None:
        keep_memory_private()
        super().__init__(url, create, witness)
