"""The simulated TEE platform of one node, as an actor whose process imports nothing else of raycloak."""

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.attestation.simulators.tdx_pki import new_key, public_bytes
    from raycloak.attestation.simulators.tdx_platform import PlatformCertificate, SimulatedPlatform
    from raycloak.attestation.simulators.tdx_vendor import code_measurement
    from raycloak.coordinator.vaults.calls import Receiver
    from raycloak.metrics.errors import EvidenceError


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
