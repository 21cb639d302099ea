"""The simulated TEE platform of one node, as an actor, and the evidence source that asks it for quotes."""

from collections.abc import Mapping
from typing import Any

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.attester.attester import CpuEvidence
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.attestation.simulators.tdx_pki import new_key, public_bytes
    from raycloak.attestation.simulators.tdx_platform import PlatformCertificate, SimulatedPlatform
    from raycloak.attestation.simulators.tdx_vendor import code_measurement
    from raycloak.coordinator.cluster.calls import Receiver
    from raycloak.coordinator.cluster.processes import own_node
    from raycloak.coordinator.cluster.ray_calls import ask, fetch
    from raycloak.metrics.errors import EvidenceError

QUOTE_DEADLINE_S = 30.0


class NodePlatform(Receiver):
    """The simulated TEE platform of one node.

    It makes its keys itself, so no argument and no message has them.
    """

    _platform: SimulatedPlatform | None = None

    def __init__(self) -> None:
        keep_memory_private()
        self._key = new_key()

    def public_key(self) -> bytes:
        """Return the key to certify, in DER."""
        return public_bytes(self._key)

    def install(self, certificate: PlatformCertificate) -> None:
        """Take the vendor's certificate of the key; ProtocolError ``malformed`` if it is another's."""
        self._platform = SimulatedPlatform.certified(self._key, certificate)

    def quote(self, report_data: bytes) -> bytes:
        """Return a quote over ``report_data`` that measures the raycloak code of this node.

        Raises:
            EvidenceError: ``platform_not_ready`` before its key is certified.
        """
        if self._platform is None:
            raise EvidenceError("platform_not_ready", "the node's simulated platform has no certificate yet")
        return self._platform.quote(report_data, code_measurement())


class NodeEvidenceSource:
    """The evidence source that asks the simulated platform of the caller's node.

    Args:
        platforms: NodePlatform actors by node id.
    """

    def __init__(self, platforms: Mapping[str, Any]) -> None:
        self._platforms = platforms

    def collect(self, report_data: bytes) -> CpuEvidence:
        """Return a quote over ``report_data``, made by the node's simulated platform."""
        asked = ask(self._platforms[own_node(self)], NodePlatform.quote, report_data)
        return CpuEvidence(fetch(asked, QUOTE_DEADLINE_S))
