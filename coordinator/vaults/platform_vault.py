"""The SIMULATED platform of a machine, in a vault of its own: whoever has its keys forges evidence.

It proves nothing about the machine. It keeps apart from Ray's user what simulated evidence rests on.
"""

import time
from pathlib import Path

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.machine_name import machine_name
from raycloak.coordinator.vaults.openings import PlatformOpening
from raycloak.coordinator.vaults.settings import PlatformSettings, uid_of
from raycloak.metrics.errors import RefusedError


class PlatformVault(Hosted):
    """The platform of a machine, for one connection.

    Guarantee: it quotes for processes of the users alone that its settings name as those of vaults.
    """

    OPENING = PlatformOpening

    def __init__(self, opening: PlatformOpening, inside: Inside) -> None:
        settings = inside.settings
        assert isinstance(settings, PlatformSettings), "no child hosts a platform"
        self._quotes = inside.peer.uid in {uid_of(each) for each in settings.vaults}
        self._vendor = SimulatedVendor.load_or_create(Path(settings.state))

    def root(self) -> bytes:
        """Return the vendor's root certificate in DER, which a policy names."""
        return self._vendor.root_der

    def collateral(self) -> CollateralBundle:
        """Return what the vendor publishes now."""
        return self._vendor.collateral(int(time.time()))

    def quote(self, report_data: bytes) -> bytes:
        """Return a quote over ``report_data`` that measures the installed raycloak.

        Raises:
            RefusedError: ``vault_peer`` if the process at the other end is no vault's.
        """
        if not self._quotes:
            raise RefusedError("vault_peer", "the platform quotes for vaults alone.", "Name their users in vaults.")
        return self._vendor.platform(machine_name(self, None)).quote(report_data, code_measurement())
