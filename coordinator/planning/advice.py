"""Advice on batch, steps and bands: choices that compute as many rows for one epsilon, and the noise of each.

Utility follows the ratio of noise to batch only where there are steps enough to use it: two passes over MNIST at
epsilon 3 gave 97.98 % in 59 steps, which that ratio prefers, and 98.21 % in 234. So a choice needs `LEAST_STEPS`.
Where noise may be correlated the rule is that of `raycloak.coordinator.planning.correlated_noise.settled`.

Only the plan is read: no example, and nothing that was learned from one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from raycloak.coordinator.accounting.calibration import solve_noise_multiplier
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.planning.correlated_noise import BATCH_TOLERANCE, FEWEST_STEPS, LEAST_BATCH, bands_and_share
from raycloak.coordinator.planning.plan import Plan
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.mechanism import Mechanism

LEAST_STEPS = 200
"""Steps below which the ratio of noise to batch is no guide, by the measurement above."""

# Halvings and doublings of the plan's batch that are shown.
_DOUBLINGS = range(-3, 4)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """A choice of batch and steps.

    Attributes:
        bands: b of its correlated noise; 1 without.
        noise_multiplier: at which these steps cost what the plan costs, if no draw is cut.
        noise_to_batch: standard deviation of the noise in each coordinate of an average gradient, in units of C; of
            correlated noise, what independent noise of the same error in the weights would have.
        is_planned: whether it is the plan's own.
        is_advised: whether it has the least noise of the choices of at least `LEAST_STEPS` steps; where noise may be
            correlated, whether it is the smallest batch that nearly has the least error.
    """

    expected_batch_size: float
    steps: int
    bands: int
    noise_multiplier: float
    noise_to_batch: float
    is_planned: bool
    is_advised: bool


def batch_choices(plan: Plan, config: RunConfig) -> tuple[BatchChoice, ...]:
    """Return choices of other batches that compute as many rows for the plan's epsilon, the smallest batch first.

    Measurements cost what they cost in the plan.

    Raises:
        ConfigError: ``nothing_to_advise`` if the run is not private, or its client chooses the batches.
    """
    mechanism = plan.mechanism
    if not mechanism.private or mechanism.max_participations is not None:
        raise ConfigError(
            "nothing_to_advise",
            "batch and steps are weighed for a private run on a dataset of its own.",
            "Leave --advise out.",
        )
    found = list(_candidates(plan, config))
    correlates = config.dp_config.noise.correlated == "auto"
    # Where noise may be correlated, by the error of the weights at equal passes; else by the ratio of noise to batch.
    error = [each.noise_to_batch / math.sqrt(each.steps) if correlates else each.noise_to_batch for each in found]
    fits = [
        each.expected_batch_size >= LEAST_BATCH and each.steps >= FEWEST_STEPS
        if correlates
        else each.steps >= LEAST_STEPS
        for each in found
    ]
    least = min((own for own, fit in zip(error, fits, strict=True) if fit), default=0.0)
    most = BATCH_TOLERANCE * least if correlates else least
    advised = next((each for each, own, fit in zip(found, error, fits, strict=True) if fit and own <= most), None)
    return tuple(replace(each, is_advised=each is advised) for each in found)


def _candidates(plan: Plan, config: RunConfig) -> Iterator[BatchChoice]:
    """Yield each choice, the smallest batch first."""
    mechanism, (_, *others) = plan.mechanism, plan.releases
    rows = mechanism.expected_batch_size * plan.steps_within_cap
    orders = plan.orders if plan.orders_fixed else None
    for doublings in _DOUBLINGS:
        batch = mechanism.expected_batch_size * 2.0**doublings
        steps, rate = round(rows / batch), batch / mechanism.num_examples
        least = config.dp_config.noise.bands or 1
        if batch < 1 or least * rate > 1 or steps < least:
            continue
        bands, share = _bands(config, batch, steps, mechanism)
        noise = solve_noise_multiplier(
            plan.epsilon, plan.delta, bands * rate, -(-steps // bands), mechanism.accountant, tuple(others), orders
        )
        is_planned = batch == mechanism.expected_batch_size
        yield BatchChoice(batch, steps, bands, noise, noise * share / batch, is_planned, is_advised=False)


def _bands(config: RunConfig, batch: float, steps: int, mechanism: Mechanism) -> tuple[int, float]:
    """Return what `bands_and_share` does of such batches;"""
    given = config.model_dump(mode="json") | {"expected_batch_size": batch, "batch_size_per_worker": None}
    of_choice = parse_config(given | {"steps": steps, "epochs": None})
    return bands_and_share(of_choice, mechanism.num_examples, mechanism.dimension)
