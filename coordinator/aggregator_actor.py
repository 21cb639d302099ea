"""`coordinator.aggregator.MaskedAggregator` as an actor, whose process can be started before anybody needs it."""

from typing import Any

from coordinator.quick_imports import quickly

with quickly():
    from attestation.attester import EvidenceSource
    from coordinator.aggregator import MaskedAggregator


class MaskedAggregatorActor(MaskedAggregator):
    """MaskedAggregator that is nobody, and holds no key, until `take_part`."""

    def __init__(self, source: EvidenceSource) -> None:
        self._source = source

    def take_part(self, member_id: str) -> None:
        """Become a member of this id."""
        super().__init__(member_id, self._source)

    def after(self, _: Any, method: str, *args: Any) -> Any:
        """Call ``method``; Ray delivers this once what it comes after is there, without asking the driver again."""
        return getattr(self, method)(*args)
