"""The physical batch of a run: virtual workers, micro-batches and the capacity of a draw, chosen together.

Rows beyond a draw are computed and thrown away. So the capacity is as small as privacy allows: under the ``pld``
accountant epsilon pays for draws that are cut, under ``rdp`` delta does, and on public data nobody has to.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from raycloak.coordinator.accounting.pld import cut_excess
from raycloak.coordinator.accounting.releases import (
    Releases,
    cut_at,
    least,
    least_within,
    overflow_bound,
    physical_shape,
)
from raycloak.coordinator.accounting.renyi import accountant_delta
from raycloak.coordinator.config.run import MOST_VIRTUAL_WORKERS, RunConfig
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.mechanism import AccountantName, UnitTerms

CUT_EXCESS = 1.005
"""Epsilon with cut draws over epsilon without, at most, where epsilon pays for the cut."""

OVERFLOW_SHARE = 1e-4
"""Share of delta one run may use for cut batches where delta pays: a hundred runs share the account's reserve."""

PUBLIC_OVERFLOW = 1e-9
"""Chance of a cut batch that a run on public data accepts."""

LARGEST_EPSILON = 500.0
"""Keeps e^epsilon, which divides the overflow budget, within a float64."""

PADDING_WARNING = 1.5
"""Rows computed per expected row above which a plan warns, and takes fewer virtual workers if it may choose."""

UNMEASURED_ROWS = 64
"""Most rows of a micro-batch of a model that nobody has measured."""


@dataclass(frozen=True, slots=True)
class PhysicalBatch:
    """The physical batch of every step of a run.

    Attributes:
        virtual_workers: V.
        units, batches: of one virtual worker's micro-batches; their product is the capacity of a draw.
        overflow_probability: as in the mechanism.
    """

    virtual_workers: int
    units: int
    batches: int
    overflow_probability: float

    @property
    def computed_units(self) -> int:
        """Return how many units a step computes, padding included."""
        return self.virtual_workers * self.units * self.batches


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """The numbers that a physical batch depends on besides the configuration.

    Attributes:
        releases: all planned ones, the gradient's first, without a cut; none where nothing is private.
        accountant: of the account that pays. epsilon_cap: of it.
        largest_rows: most rows of a micro-batch that memory holds.
        units: what epsilon protects of the data.
        parts: of a slice, of which a step draws from one.
    """

    num_examples: int
    sample_rate: float
    releases: Releases
    accountant: AccountantName
    epsilon_cap: float
    largest_rows: int
    units: UnitTerms
    parts: int = 1


def most_units(config: RunConfig, units: UnitTerms, largest_rows: int) -> int:
    """Return the most units of a micro-batch, all of whose rows memory holds at once.

    Raises:
        ConfigError: ``unit_too_large`` if it does not hold those of one.
    """
    rows = config.micro_batch_size or largest_rows
    if units.rows_per_unit > rows:
        raise ConfigError(
            "unit_too_large",
            f"the {units.rows_per_unit} rows of a {units.unit} are more than the {rows} that a micro-batch holds.",
            f"Let dataset.rows_per_unit times augment.copies be at most {rows}, or raise micro_batch_bytes.",
        )
    return rows // units.rows_per_unit


def choose_batch(config: RunConfig, terms: BatchTerms) -> PhysicalBatch:
    """Return the physical batch that computes few rows beyond the expected ones, as far as the configuration is open.

    Guarantee: where epsilon pays for cut draws, it is at most ``CUT_EXCESS`` times that without; where delta pays, the
    chance of any cut fits ``OVERFLOW_SHARE`` of delta at the cap. Of several numbers of virtual workers the largest
    that needs no warning is taken, else the one with the fewest units; none gives one worker a larger share of the
    noise than the most of them would. There are no fewer units than :func:`fixed_virtual_workers`, or than workers.
    """
    best: PhysicalBatch | None = None
    for virtual_workers in _candidates(config, terms.num_examples):
        found = _batch_of(config, terms, virtual_workers)
        if best is None or found.computed_units < best.computed_units:
            best = found
        if found.computed_units <= PADDING_WARNING * config.batch_size:
            break
    assert best is not None, "there is one candidate at least"
    return best


def fixed_virtual_workers(config: RunConfig) -> int | None:
    """Return the number of virtual workers if the configuration leaves no choice, else None."""
    # Sealed data has its slices, a key service its contract; and colluding workers know noise by their share of slices.
    if config.has_sealed_data or config.key_service or config.dp_config.colluding_workers:
        return config.slices
    return config.virtual_workers


def _candidates(config: RunConfig, num_examples: int) -> Iterator[int]:
    """Yield the numbers of virtual workers to try, falling."""
    fixed = fixed_virtual_workers(config)
    if fixed is not None:
        yield fixed
        return
    most = min(max(MOST_VIRTUAL_WORKERS, config.most_workers), num_examples)
    for candidate in sorted({most, 4, 2, config.most_workers}, reverse=True):
        # Fewer may give one worker a larger share of the noise than an even spread of the most would.
        share = hosted_at_most(candidate, config.num_workers) / candidate
        if config.most_workers <= candidate <= most and share <= hosted_at_most(most, config.num_workers) / most:
            yield candidate


def hosted_at_most(virtual_workers: int, workers: int) -> int:
    """Return the most virtual workers that one of ``workers`` workers hosts when they are spread evenly."""
    return -(-virtual_workers // workers)


def _batch_of(config: RunConfig, terms: BatchTerms, virtual_workers: int) -> PhysicalBatch:
    slice_size = -(-terms.num_examples // (virtual_workers * terms.parts))
    draws = config.planned_steps * virtual_workers
    by_epsilon = bool(terms.releases) and terms.accountant == "pld" and terms.sample_rate < 1
    if by_epsilon:
        capacity = _charged_capacity(config, terms, virtual_workers)
    else:
        budget = PUBLIC_OVERFLOW
        if terms.releases:
            # The chance of a cut that delta pays for, at the account's cap.
            factor = 1 + math.exp(min(terms.epsilon_cap, LARGEST_EPSILON))
            budget = OVERFLOW_SHARE * config.dp_config.target_delta / factor
        capacity = least_within(budget, slice_size, terms.sample_rate, draws)
    units, batches = physical_shape(capacity, most_units(config, terms.units, terms.largest_rows))
    return PhysicalBatch(
        virtual_workers=virtual_workers,
        units=units,
        batches=batches,
        overflow_probability=0.0
        if by_epsilon
        else overflow_bound(slice_size, terms.sample_rate, draws, units * batches),
    )


def _charged_capacity(config: RunConfig, terms: BatchTerms, virtual_workers: int) -> int:
    """Return the least capacity whose cuts cost at most ``CUT_EXCESS``; never below the expected draw."""
    training, *others = terms.releases
    delta = accountant_delta(config.dp_config.target_delta)
    slice_size = -(-terms.num_examples // (virtual_workers * terms.parts))

    def cheap(capacity: int) -> bool:
        cut = cut_at(terms.num_examples, virtual_workers, capacity, terms.parts)
        return cut is None or cut_excess((replace(training, cut=cut), *others), delta) <= CUT_EXCESS

    return least(cheap, math.ceil(terms.sample_rate * slice_size), slice_size)
