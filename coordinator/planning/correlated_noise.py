"""Correlated noise: whether a run has it, by which coefficients, and what it gains.

Hides the comparison of factorisations at one epsilon. More bands cancel more of the noise in the weights, and cost more
noise: each unit then takes part at a higher rate, in fewer steps, and by a longer column.
"""

from dataclasses import dataclass
from typing import Final

from raycloak.coordinator.accounting.calibration import epsilon_of, solve_noise_multiplier
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import SCHEDULES, OptimizerConfig
from raycloak.coordinator.planning.factorisation import NoiseWorkload, error_of, factorise
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.workers.terms.mechanism import AccountantName, Mechanism

TRIED_BANDS: Final = (4, 8, 16, 32)
"""More gain no more in any setting that was measured, and each band is one model's worth of memory."""

LARGEST_SHARE: Final = 0.85
"""Of the error of independent noise, below which correlated noise is worth its memory: above it nothing was gained in
what models learn, in six settings that were simulated."""

LARGEST_STATE: Final = 2**32
"""Bytes that sums and releases of earlier steps may take where the plan chooses their number: of a machine of 16 GB, a
quarter."""

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


def chosen_coefficients(
    config: RunConfig, num_examples: int, dimension: int, accountant: AccountantName
) -> tuple[int, ...]:
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
        given = bands * rate, -(-steps // bands), accountant
        return of_unit * solve_noise_multiplier(dp.target_epsilon, dp.target_delta, *given)

    best: tuple[int, ...] = ()
    least = LARGEST_SHARE * error(1, factorise(workload, 1).error)
    for bands in TRIED_BANDS:
        fits = bands <= workload.most_bands and bands * rate <= 1 and bands * slices <= num_examples
        if not fits or sum(state_bytes(bands, dimension, -(-slices // config.num_workers))) > LARGEST_STATE:
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
    return NoiseGain(bands, noise / independent, epsilon, state_bytes(bands, mechanism.dimension, hosted))


def state_bytes(bands: int, dimension: int, hosted: int) -> tuple[int, int]:
    """Return the bytes of earlier sums in a worker that hosts so many slices, and of earlier models and releases."""
    return (bands - 1) * 4 * dimension * hosted, (bands - 1) * 8 * dimension


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
