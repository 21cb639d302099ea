"""The plan of the masks: how many neighbours each worker of a large run has, or why all pairs should mask."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from raycloak.attestation.core.mask_graph import least_reach, most_circles, split_bound
from raycloak.coordinator.config.run import RunConfig
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """A mask graph in which each worker masks with some others only.

    Attributes:
        colluding_workers: number of workers that it withstands, of those fixed before a circle is drawn.
        degree: neighbours of each of ``num_workers`` workers. With fewer workers it may be another number.
        others: workers that each would mask with otherwise.
        split_log2: over all attempts of the run, bound on the probability that the honest workers split, as a power of
            2; None if that is impossible.
    """

    colluding_workers: int
    degree: int
    others: int
    split_log2: float | None

    @property
    def text(self) -> str:
        """One sentence on what the masks withstand."""
        odds = "" if self.split_log2 is None else f", but for a chance of 2^{self.split_log2:.1f} over the run"
        return (
            f"{self.degree} of {self.others:,} others for each worker; they withstand the aggregator with "
            f"{self.colluding_workers:,} workers chosen before the circle was drawn{odds}"
        )


def plan_masks(config: RunConfig, mechanisms: Iterable[Mechanism], keys_per_machine: int | None) -> MaskPlan | None:
    """Return the mask graph of the configured number of workers; None where all pairs are to mask.

    Args:
        mechanisms: all of the run.
        keys_per_machine: most virtual workers of a colluding machine; None if the noise counts on every worker.

    Raises:
        ConfigError: ``mask_graph`` if each worker would need nearly all others, or if the noise withstands more.
    """
    colluding, workers = config.masks.colluding_workers, config.num_workers
    if colluding is None:
        return None
    helpers = config.dp_config.colluding_workers * (keys_per_machine or 0)
    if helpers > colluding:
        raise ConfigError(
            "mask_graph",
            f"dp_config.colluding_workers counts on machines that may host {helpers} workers, and the masks withstand "
            f"{colluding}.",
            f"Set masks.colluding_workers to {helpers} or more, or leave it out.",
        )
    releases = sum(mechanism.steps for mechanism in mechanisms)
    reach = least_reach(workers, colluding, releases)
    if reach is None:
        raise ConfigError(
            "mask_graph",
            f"to withstand {colluding} colluding workers, each of {workers} would mask with all others.",
            "Leave masks.colluding_workers out: all pairs then mask, which withstands any number that leaves two.",
        )
    chance = most_circles(releases) * split_bound(workers, colluding, reach)
    # Not of the quotient, which may be too small for a float.
    log2 = math.log2(chance.numerator) - math.log2(chance.denominator) if chance else None
    return MaskPlan(colluding, 2 * reach, workers - 1, log2)
