"""What a run measures beside its gradients: mechanisms, how often each is released, and what all of it costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attestation.roster import Query
from coordinator.accounting import SMALLEST_NOISE_MULTIPLIER
from coordinator.calibration import composed_epsilon, epsilon_of
from coordinator.capacity import physical_shape
from coordinator.config import RunConfig
from coordinator.config_sections import ClassCountsConfig, PrivateEvaluationConfig
from coordinator.releases import Release, Releases
from metrics.errors import ConfigError
from workers.measurement import Measurement
from workers.mechanism import AccountantName, Mechanism
from workers.ring import fit_ring

NORM = 1.0
"""l2 bound of one example's contribution to a measurement."""


@dataclass(frozen=True, slots=True)
class MechanismCost:
    """One mechanism of a plan.

    Attributes:
        releases: how often it is planned to be released.
        epsilon_alone: of those releases, if nothing else were released; they do not add up to the total.
    """

    query: Query
    releases: int
    sample_rate: float
    noise_multiplier: float
    epsilon_alone: float


def planned_measurements(config: RunConfig) -> Releases:
    """All releases of the configured measurements, in the order of :func:`plan_measurements`.

    Raises:
        ConfigError: ``noise_too_small``.
    """
    return tuple(Release(1.0, _noise(section), _count(config, section)) for section in _sections(config))


def plan_measurements(config: RunConfig, training: Mechanism) -> tuple[Measurement, ...]:
    """The frozen measurements of a run, in the order in which they are made; a function of public numbers only.

    They share examples, virtual workers, honest share and accountant with the mechanism of training.

    Raises:
        ConfigError: ``noise_too_small``, or a measurement does not fit the ring; with numbers.
    """
    return tuple(_measurement(config, section, training) for section in _sections(config))


def releases_within(mechanism: Mechanism, measurements: Sequence[Measurement], steps: int, last: int) -> Releases:
    """All private releases of a run of ``steps`` training steps that measures after at most ``last`` of them."""
    if not mechanism.private:
        return ()
    training = (Release(mechanism.sample_rate, mechanism.noise_multiplier, steps),) if steps else ()
    return training + tuple(
        Release(each.mechanism.sample_rate, each.mechanism.noise_multiplier, count)
        for each in measurements
        if (count := made(each, mechanism.steps, last))
    )


def made(measurement: Measurement, planned_steps: int, finished_steps: int) -> int:
    """How many releases of a measurement are made until ``finished_steps`` are finished, that moment included."""
    count = measurement.mechanism.steps
    return sum(measurement.after(number, planned_steps) <= finished_steps for number in range(count))


def mechanism_costs(
    mechanism: Mechanism, measurements: Sequence[Measurement], delta: float
) -> tuple[MechanismCost, ...]:
    """Each mechanism with what it would cost alone; nothing where nothing is private."""
    mechanisms = (mechanism, *(measurement.mechanism for measurement in measurements))
    return tuple(
        MechanismCost(
            query=each.query,
            releases=each.steps,
            sample_rate=each.sample_rate,
            noise_multiplier=each.noise_multiplier,
            epsilon_alone=epsilon_of(each.sample_rate, each.noise_multiplier, each.steps, delta, mechanism.accountant),
        )
        for each in mechanisms
        if each.private
    )


Section = ClassCountsConfig | PrivateEvaluationConfig


def _sections(config: RunConfig) -> list[Section]:
    found = (config.measurements.class_counts, config.measurements.evaluation)
    return [section for section in found if section is not None]


def _count(config: RunConfig, section: Section) -> int:
    return 1 if isinstance(section, ClassCountsConfig) else -(-config.steps // section.every)


def _noise(section: Section) -> float:
    if section.noise_multiplier < SMALLEST_NOISE_MULTIPLIER:
        raise ConfigError(
            "noise_too_small",
            f"a measurement's noise multiplier of {section.noise_multiplier:g} is below "
            f"{SMALLEST_NOISE_MULTIPLIER:g} and hides nothing.",
            "Raise it; 20 puts each count off by about 20 examples.",
        )
    return section.noise_multiplier


def _measurement(config: RunConfig, section: Section, training: Mechanism) -> Measurement:
    query: Query
    if isinstance(section, ClassCountsConfig):
        query, dimension, divisor, every, loss_bound = "class_counts", section.classes, 1.0, 0, 0.0
    else:
        dimension = 2 if config.loss == "cross_entropy" else 1
        query, divisor, every, loss_bound = (
            "evaluation",
            float(training.num_examples),
            section.every,
            section.loss_bound,
        )
    workers, noise = training.virtual_workers, _noise(section)
    slice_size = -(-training.num_examples // workers)
    rows, batches = physical_shape(slice_size, 1.0, workers, 0.0, config.micro_batch_size)
    ring = fit_ring(
        max_grad_norm=NORM,
        clamp=rows * batches * NORM,
        dimension=dimension,
        virtual_workers=workers,
        noise_multiplier=noise,
        honest_share=training.honest_share,
    )
    own = training.model_copy(
        update={
            "query": query,
            "sample_rate": 1.0,
            "steps": _count(config, section),
            "max_grad_norm": NORM,
            "noise_multiplier": noise,
            "expected_batch_size": divisor,
            "dimension": dimension,
            "ring_bits": ring.bits,
            "gamma_log2": ring.gamma_log2,
            "clamp": ring.clamp,
            "sigma": ring.sigma,
            "micro_batch_size": rows,
            "micro_batches": batches,
            "overflow_probability": 0.0,
        }
    )
    return Measurement(mechanism=own, every=every, loss_bound=loss_bound)


def scaled(releases: Releases, factor: float) -> Releases:
    """The same releases with a share of their noise."""
    return tuple(Release(each.sample_rate, each.noise_multiplier * factor, each.count) for each in releases)


def check_affordable(others: Releases, target_epsilon: float, delta: float, accountant: AccountantName) -> None:
    """Refuse measurements that leave nothing for training; ConfigError ``measurements_too_costly``."""
    spent = composed_epsilon(others, delta, accountant) if others else 0.0
    if not math.isfinite(spent) or spent >= target_epsilon:
        raise ConfigError(
            "measurements_too_costly",
            f"the measurements alone cost epsilon {spent:.4g} at delta {delta:g}; the target for all is "
            f"{target_epsilon:g}.",
            "Raise their noise_multiplier, or measure less often.",
        )
