"""The platform under a vault: its guest's, or the simulated one of its relay's node.

A module of its own: what collects evidence takes a quarter of a second to import, and a ledger collects none.
"""

from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from raycloak.attestation.attester.attester import CpuEvidence, EvidenceSource
from raycloak.attestation.attester.guest import GuestEvidence
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.messages import parse
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.vaults.calls import ActorRefusal
from raycloak.coordinator.vaults.hosted import Inside
from raycloak.coordinator.vaults.machine_vault import MachineVault
from raycloak.coordinator.vaults.openings import PlatformOpening
from raycloak.coordinator.vaults.platform_vault import PlatformVault
from raycloak.coordinator.vaults.settings import EvidencedSettings

P = ParamSpec("P")
T = TypeVar("T")

QUOTE_DEADLINE_S: Final = 60.0
"""For the simulated platform of a busy node."""


def platform_under(inside: Inside, simulated: bool) -> EvidenceSource:
    """Return what gives evidence of a vault: the guest that it runs in, or a SIMULATED platform.

    A vault of the machine has that of its settings, whatever ``simulated`` says; a child has that of its relay's node.
    """
    settings = inside.settings
    if isinstance(settings, EvidencedSettings):
        return GuestEvidence() if settings.platform is None else MachinePlatform(settings.platform)
    return _RelayedPlatform(inside) if simulated else GuestEvidence()


class MachinePlatform:
    """The SIMULATED platform of the machine, at its socket."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    @property
    def root_der(self) -> bytes:
        """The vendor's root certificate, which a policy names as anchor of class ``simulated``."""
        return self._ask(PlatformVault.root)

    def published(self) -> CollateralBundle:
        """Return what the vendor publishes now."""
        return self._ask(PlatformVault.collateral)

    def collect(self, report_data: bytes) -> CpuEvidence:
        """Return SIMULATED evidence over ``report_data``; raises as the platform."""
        return CpuEvidence(self._ask(PlatformVault.quote, report_data))

    def _ask(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> T:
        with MachineVault(self._socket, PlatformOpening()) as platform:
            return platform.ask(method, *args, **keywords)


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
