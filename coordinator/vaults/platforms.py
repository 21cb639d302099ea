"""The platform under a vault: its guest's, or the simulated one of its relay's node.

A module of its own: what collects evidence takes a quarter of a second to import, and a ledger collects none.
"""

from typing import Final

from raycloak.attestation.attester.attester import CpuEvidence, EvidenceSource
from raycloak.attestation.core.messages import parse
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.evidence.sources import GuestEvidence
from raycloak.coordinator.vaults.calls import ActorRefusal
from raycloak.coordinator.vaults.hosted import Inside

QUOTE_DEADLINE_S: Final = 60.0
"""For the simulated platform of a busy node."""


def platform_under(inside: Inside, simulated: bool) -> EvidenceSource:
    """Return the guest that a vault runs in, or SIMULATED the platform of its relay's node."""
    return _RelayedPlatform(inside) if simulated else GuestEvidence()


class _RelayedPlatform:
    """The platform of the relay's node, which Ray alone reaches."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside

    def collect(self, report_data: bytes) -> CpuEvidence:
        """Return SIMULATED evidence over ``report_data``; raises as the platform."""
        try:
            (quote,) = self._inside.ask_relay("collect", 1, (report_data,), QUOTE_DEADLINE_S)
        except ActorRefusal as refusal:
            raise parse(Failed, refusal.args[0]).raised() from None
        return CpuEvidence(quote)
