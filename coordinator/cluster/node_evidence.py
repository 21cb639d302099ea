"""The evidence source of workers and aggregators: the simulated platform of the node they run on."""

from collections.abc import Mapping
from typing import Any

from raycloak.attestation.attester.attester import CpuEvidence
from raycloak.coordinator.cluster.platform_actor import NodePlatform
from raycloak.coordinator.cluster.processes import own_node
from raycloak.coordinator.cluster.ray_calls import ask, fetch

QUOTE_DEADLINE_S = 30.0


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
