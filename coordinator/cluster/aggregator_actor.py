"""MaskedAggregator as an actor, whose process can be started before it is needed."""

from raycloak.coordinator.quick_imports import quickly

with quickly():
    from raycloak.attestation.attester.attester import EvidenceSource
    from raycloak.attestation.core.private_memory import keep_memory_private
    from raycloak.coordinator.aggregation.aggregator import MaskedAggregator
    from raycloak.coordinator.cluster.calls import Receiver


class MaskedAggregatorActor(Receiver, MaskedAggregator):
    """A MaskedAggregator that is not a member and holds no key until :meth:`take_part`."""

    def __init__(self, source: EvidenceSource) -> None:
        keep_memory_private()
        # The rest is built by `take_part`: which member it becomes is known when it is needed.
        self._source = source

    def take_part(self, member_id: str) -> None:
        """Become the member ``member_id``."""
        super().__init__(member_id, self._source)
