"""MaskedAggregator in a vault, which can be started before it is needed."""

from raycloak.coordinator.aggregation.aggregator import MaskedAggregator
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.openings import AggregatorOpening
from raycloak.coordinator.vaults.platforms import platform_under
from raycloak.workers.vectors.threads import WordThreads


class AggregatorVault(Hosted, MaskedAggregator):
    """A MaskedAggregator that is not a member and holds no key until :meth:`take_part`."""

    OPENING = AggregatorOpening

    def __init__(self, opening: AggregatorOpening, inside: Inside) -> None:
        # The rest is built by `take_part`: which member it becomes is known when it is needed.
        self._of_vault = platform_under(inside, opening.simulated), WordThreads.of_share(opening.cpus)

    def take_part(self, member_id: str) -> None:
        """Become the member ``member_id``."""
        MaskedAggregator.__init__(self, member_id, *self._of_vault)
