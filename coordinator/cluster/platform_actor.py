"""The simulated TEE platform of one node, as an actor whose process imports nothing else of raycloak."""

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.attestation.simulators.tdx_platform import SimulatedPlatform
    from raycloak.attestation.simulators.tdx_vendor import code_measurement
    from raycloak.metrics.errors import EvidenceError


class NodePlatform:
    """The simulated TEE platform of one node.

    Its keys arrive by a method call: constructor arguments stay readable in Ray's control store.
    """

    _platform: SimulatedPlatform | None = None

    def __init__(self) -> None:
        keep_memory_private()

    def install(self, keys: bytes) -> None:
        """Take the platform's keys."""
        self._platform = SimulatedPlatform.from_bytes(keys)

    def quote(self, report_data: bytes) -> bytes:
        """Return a quote over ``report_data`` that measures the raycloak code of this node.

        Raises:
            EvidenceError: ``platform_not_ready`` before the keys have arrived.
        """
        if self._platform is None:
            raise EvidenceError("platform_not_ready", "the node's simulated platform has no keys yet")
        return self._platform.quote(report_data, code_measurement())
