"""Correlated noise: whether a run has it, by which coefficients, in which batches, and what it gains.

Hides the comparison of factorisations at one epsilon. More bands cancel more of the noise in the weights, and cost more
noise: each unit then takes part at a higher rate, in fewer steps, and by a longer column.

Choices are made by Renyi differential privacy, whatever accountant pays: they need no account, and differ rarely.
"""

import math
from dataclasses import dataclass
from typing import Final

from raycloak.coordinator.accounting.calibration import epsilon_of, solve_noise_multiplier
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.config.sections import SCHEDULES, OptimizerConfig
from raycloak.coordinator.planning.factorisation import NoiseWorkload, error_of, factorise
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.workers.terms.mechanism import Mechanism

TRIED_BANDS: Final = (4, 8, 16, 32)
"""More gain no more in any setting that was measured, and each band is one model's worth of memory."""

LARGEST_SHARE: Final = 0.85
"""Of the error of independent noise, below which correlated noise is worth its memory: above it nothing was gained in
what models learn, in six settings that were simulated."""

LARGEST_STATE: Final = 2**32
"""Bytes that sums and releases of earlier steps may take where the plan chooses their number: of a machine of 16 GB, a
quarter."""

LEAST_BATCH: Final = 256
"""Examples of a step below which the plan chooses no batch: in a smaller one, charge, roster and masks of a small model
take as long as its gradients."""

FEWEST_STEPS: Final = 25
"""Steps below which the plan chooses no batch: the error by noise then says little of what is learned."""

BATCH_TOLERANCE: Final = 1.15
"""Of the least error, within which the smallest batch is chosen: at one error, more and smaller steps learn more. It
chose as measurements did in six settings that were simulated."""

# So many rates decide on any number of bands.
_RATES: Final = 2**14


@dataclass(frozen=True, slots=True)
class NoiseGain:
    """The worth of a run's correlated noise.

    Attributes:
        bands: b.
        share: the error of the weights by noise, over that of independent noise at the same epsilon's noise multiplier
            and number of steps.
        epsilon_independent: what independent noise of the same error would cost.
        state_bytes: memory of a worker for the sums of earlier steps, and of the object store for models and releases.
    """

    bands: int
    share: float
    epsilon_independent: float
    state_bytes: tuple[int, int]


def settled(config: RunConfig, num_examples: int, dimension: int) -> RunConfig:
    """Return the configuration with its epochs counted as steps, and with a batch where it leaves that to the plan.

    Of batches that double from ``LEAST_BATCH``, each with its own best bands and as many passes, in ``FEWEST_STEPS`` at
    least, it takes the smallest whose error of the weights is within ``BATCH_TOLERANCE`` of the least.

    Raises:
        ConfigError: as `RunConfig.sized` and :func:`chosen_coefficients`.
    """
    if config.expected_batch_size is not None or config.batch_size_per_worker is not None:
        return config.sized(num_examples)
    found: list[tuple[float, RunConfig]] = []
    batch = min(LEAST_BATCH, num_examples)
    while batch <= num_examples:
        given = config.model_dump(mode="json") | {"expected_batch_size": batch}
        candidate = parse_config(given).sized(num_examples)
        if found and candidate.planned_steps < FEWEST_STEPS:
            break
        found.append((_error_by_noise(candidate, num_examples, dimension), candidate))
        batch *= 2
    least = min(error for error, _ in found)
    return next(candidate for error, candidate in found if error <= BATCH_TOLERANCE * least)


def _error_by_noise(config: RunConfig, num_examples: int, dimension: int) -> float:
    """Return the error of the weights by noise, in a unit that is the same for all batches of as many passes."""
    dp, (bands, share) = config.dp_config, bands_and_share(config, num_examples, dimension)
    assert dp.target_epsilon is not None, "a batch is chosen for a target"
    rate, rounds = bands * config.batch_size / num_examples, -(-config.planned_steps // bands)
    noise = solve_noise_multiplier(dp.target_epsilon, dp.target_delta, rate, rounds)
    return noise * share / (config.batch_size * math.sqrt(config.planned_steps))


def bands_and_share(config: RunConfig, num_examples: int, dimension: int) -> tuple[int, float]:
    """Return the bands that a plan would have, and their error over that of one band at the same noise multiplier."""
    coefficients = chosen_coefficients(config, num_examples, dimension)
    if not coefficients:
        return 1, 1.0
    workload = workload_of(config)
    return len(coefficients), error_of(workload, coefficients) / factorise(workload, 1).error


def chosen_coefficients(config: RunConfig, num_examples: int, dimension: int) -> tuple[int, ...]:
    """Return the coefficients of a run's noise, in 2^-16; empty for noise of each step's own.

    Asked to choose, it takes the number of bands with the least error of the weights at the target epsilon, and none
    where that is above ``LARGEST_SHARE`` of the error without. It takes none for a rule that is no plain or momentum
    SGD: second moments see the noise of single steps, which is larger.

    Raises:
        ConfigError: ``bands_too_many`` or ``noise_amplified`` as `raycloak.coordinator.planning.factorisation`.
    """
    noise, dp = config.dp_config.noise, config.dp_config
    if noise.correlated == "off" or not dp.enabled:
        return ()
    workload = workload_of(config)
    if noise.bands is not None:
        return factorise(workload, noise.bands).coefficients
    if config.optimizer.name != "sgd" or dp.target_epsilon is None:
        return ()
    rate, steps = config.batch_size / num_examples, config.planned_steps
    slices = max(config.virtual_workers or 0, config.most_workers, 8)

    def error(bands: int, of_unit: float) -> float:
        assert dp.target_epsilon is not None, "asked above"
        given = bands * rate, -(-steps // bands)
        return of_unit * solve_noise_multiplier(dp.target_epsilon, dp.target_delta, *given)

    best: tuple[int, ...] = ()
    least = LARGEST_SHARE * error(1, factorise(workload, 1).error)
    for bands in TRIED_BANDS:
        fits = bands <= workload.most_bands and bands * rate <= 1 and bands * slices <= num_examples
        # The wider ring, since the width is chosen later.
        if not fits or sum(state_bytes(bands, dimension, -(-slices // config.num_workers), 64)) > LARGEST_STATE:
            continue
        found = factorise(workload, bands)
        if (reached := error(bands, found.error)) < least:
            best, least = found.coefficients, reached
    return best


def gain_of(config: RunConfig, mechanism: Mechanism, hosted: int, delta: float) -> NoiseGain | None:
    """Return what the correlated noise of a planned mechanism gains; None where there is none.

    Args:
        hosted: most virtual workers of one worker.
    """
    bands = mechanism.bands
    if bands == 1:
        return None
    workload = workload_of(config)
    share = error_of(workload, mechanism.coefficients) / factorise(workload, 1).error
    # Noise of each step's own that leaves the same error.
    noise, rate = mechanism.noise_multiplier * share, mechanism.sample_rate / bands
    rounds = mechanism.participations(mechanism.steps)
    epsilon = epsilon_of(rate, noise, mechanism.steps, delta, mechanism.accountant)
    spent = epsilon_of(mechanism.sample_rate, mechanism.noise_multiplier, rounds, delta, mechanism.accountant)
    independent = solve_noise_multiplier(spent, delta, rate, mechanism.steps, mechanism.accountant)
    return NoiseGain(
        bands, noise / independent, epsilon, state_bytes(bands, mechanism.dimension, hosted, mechanism.ring_bits)
    )


def state_bytes(bands: int, dimension: int, hosted: int, ring_bits: int) -> tuple[int, int]:
    """Return the bytes of the sums in a worker that hosts so many slices, and of earlier models and releases.

    The present sum of each slice counts: it is kept beside those of earlier steps.
    """
    return bands * ring_bits // 8 * dimension * hosted, (bands - 1) * 8 * dimension


def workload_of(config: RunConfig) -> NoiseWorkload:
    """Return how a run's optimizer adds up the noise of its steps; a schedule of the user's own counts as constant."""
    optimizer, steps = config.optimizer, min(config.planned_steps, _RATES)
    momentum = optimizer.momentum if optimizer.name == "sgd" else 0.0
    if optimizer.name in ("adam", "adamw"):
        momentum = optimizer.beta1
    return NoiseWorkload(momentum, _rates(optimizer, steps, config.planned_steps), config.epoch_steps)


def _rates(optimizer: OptimizerConfig, count: int, steps: int) -> tuple[float, ...]:
    # Its import brings torch, which a plan without correlated noise does not need.
    from raycloak.coordinator.aggregation.update_rules import learning_rate

    if optimizer.schedule not in SCHEDULES:
        return (1.0,) * count
    spec = optimizer_spec(OptimizerConfig(schedule=optimizer.schedule, warmup_steps=optimizer.warmup_steps), ".")
    return tuple(learning_rate(spec, step, steps) for step in range(count))
