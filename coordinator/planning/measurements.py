"""The measurements of a run beside its gradients: their mechanisms, their schedule, and what each costs."""

from collections.abc import Callable
from dataclasses import dataclass

from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.calibration import affordable_rounding, composed_epsilon
from raycloak.coordinator.accounting.releases import Release, Releases, least, physical_shape, releases_of
from raycloak.coordinator.accounting.renyi import SMALLEST_NOISE_MULTIPLIER
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import ClassCountsConfig, PrivateEvaluationConfig
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.planning.batches import UNMEASURED_ROWS, most_units
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.loss import has_accuracy
from raycloak.workers.terms.measurement import NORM, Measurement
from raycloak.workers.terms.mechanism import Mechanism, UnitTerms
from raycloak.workers.vectors.ring import RingDemand, fit_ring


@dataclass(frozen=True, slots=True)
class MechanismCost:
    """The cost of one mechanism of a plan.

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
    """Return all releases of the configured measurements, in the order of :func:`plan_measurements`.

    Raises:
        ConfigError: ``noise_too_small``.
    """
    return tuple(release for _, release in _sections(config))


def plan_measurements(
    config: RunConfig, training: Mechanism, largest_rows: int = UNMEASURED_ROWS
) -> tuple[Measurement, ...]:
    """Return the frozen measurements of a run in the order in which they are made.

    Guarantee: a function of public numbers only. Measurements share units, virtual workers, honest share and
    accountant with the mechanism of training.

    Raises:
        ConfigError: ``noise_too_small``, or a measurement does not fit the ring; with numbers.
    """
    units = UnitTerms(training.unit, training.rows_per_unit, training.copies)
    most = most_units(config, units, largest_rows)
    return tuple(_measurement(config, *each, training, most) for each in _sections(config))


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that a run is planned to release: a gradient in every step, and measurements between the steps.

    A moment of a run is given by two numbers of steps: how many steps are charged, and after how many of them the
    newest charged measurement was made. A step is charged before what is measured after it, so they may differ by one.
    """

    mechanism: Mechanism
    measurements: tuple[Measurement, ...]

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Every mechanism, the gradient's first."""
        return (self.mechanism, *(each.mechanism for each in self.measurements))

    def measured(self, after: int) -> list[tuple[Mechanism, int]]:
        """Return each measurement's mechanism, and how often it was released once ``after`` steps were finished."""
        planned = self.mechanism.steps
        return [
            (each.mechanism, sum(each.after(number, planned) <= after for number in range(each.mechanism.steps)))
            for each in self.measurements
        ]

    def releases(self, steps: int, measured: int) -> Releases:
        """Return all private releases of ``steps`` steps and of what is measured after at most ``measured`` steps."""
        return releases_of([(self.mechanism, steps), *self.measured(measured)])

    def epsilon(self, steps: int, measured: int, delta: float, orders: tuple[float, ...]) -> float:
        """Return the epsilon of :meth:`releases` at an account's ``delta``, with its Renyi ``orders`` in use."""
        return composed_epsilon(self.releases(steps, measured), delta, self.mechanism.accountant, orders)

    def reach(self, cap: float, delta: float, orders: tuple[float, ...]) -> tuple[int, int]:
        """Return how far the cap of an empty account reaches, as :meth:`reach_by`.

        Raises:
            ConfigError: ``cap_too_small`` if not even one step fits.
        """
        found = self.reach_by(cap, lambda steps, measured: self.epsilon(steps, measured, delta, orders))
        if found[0] == 0:
            raise ConfigError(
                "cap_too_small",
                f"one step, with what is measured before it, costs epsilon "
                f"{epsilon_text(self.epsilon(1, 0, delta, orders))} at delta {delta:g}, more than the cap {cap:g}.",
                "Raise the cap or the noise multiplier, or lower the batch size.",
            )
        return found

    def reach_by(self, cap: float, epsilon: Callable[[int, int], float]) -> tuple[int, int]:
        """Return how many steps fit a cap, and the last step whose measurements still fit.

        Args:
            epsilon: of an account once this many steps are charged, and measured after so many of them.
        """
        # A step is charged before the measurements that are due after it.
        steps = most_within(cap, self.mechanism.steps, lambda count: epsilon(count, count - 1))
        return steps, steps if epsilon(steps, steps) <= cap else max(steps - 1, 0)


def most_within(cap: float, most: int, epsilon: Callable[[int], float]) -> int:
    """Return the largest number, of ``most`` at most, whose epsilon is within the cap; 0 if none is."""
    # Most plans fit whole, and one epsilon may take a second.
    if epsilon(most) <= cap:
        return most
    return least(lambda count: epsilon(count + 1) > cap, 0, most - 1)


def mechanism_costs(run: Schedule, delta: float) -> tuple[MechanismCost, ...]:
    """Return each mechanism with what it would cost alone; nothing where nothing is private."""
    return tuple(
        MechanismCost(
            query=each.query,
            releases=each.steps,
            sample_rate=each.sample_rate,
            noise_multiplier=each.noise_multiplier,
            epsilon_alone=composed_epsilon(releases_of([(each, each.steps)]), delta, run.mechanism.accountant),
        )
        for each in run.mechanisms
        if each.private
    )


Section = ClassCountsConfig | PrivateEvaluationConfig


def _sections(config: RunConfig) -> list[tuple[Section, Release]]:
    """Return the configured measurements, each with its releases."""
    found = (config.measurements.class_counts, config.measurements.evaluation)
    return [(section, _release(config, section)) for section in found if section is not None]


def _release(config: RunConfig, section: Section) -> Release:
    remedy = "Raise it; 20 puts each count off by about 20 examples."
    noise = enough_noise(section.noise_multiplier, "a measurement's", remedy)
    return Release(
        1.0, noise, 1 if isinstance(section, ClassCountsConfig) else -(-config.planned_steps // section.every)
    )


def enough_noise(noise_multiplier: float, whose: str, remedy: str) -> float:
    """Return the noise multiplier; ConfigError ``noise_too_small`` if it hides nothing."""
    if noise_multiplier < SMALLEST_NOISE_MULTIPLIER:
        raise ConfigError(
            "noise_too_small",
            f"{whose} noise multiplier of {noise_multiplier:g} is below {SMALLEST_NOISE_MULTIPLIER:g} and hides "
            "nothing.",
            remedy,
        )
    return noise_multiplier


def _measurement(config: RunConfig, section: Section, release: Release, training: Mechanism, most: int) -> Measurement:
    query: Query
    if isinstance(section, ClassCountsConfig):
        query, dimension, divisor = "class_counts", section.classes, 1.0
        every, loss_bound = 0, 0.0
    else:
        query, dimension, divisor = "evaluation", 2 if has_accuracy(config.loss_name) else 1, training.num_examples
        dimension += (section.classes or 0) ** 2
        every, loss_bound = section.every, section.loss_bound
    # Every unit contributes, so the batch holds a whole slice and none is ever cut.
    units, batches = physical_shape(-(-training.num_examples // training.virtual_workers), most)
    demand = RingDemand(
        max_grad_norm=NORM,
        clamp=units * batches * NORM,
        dimension=dimension,
        virtual_workers=training.virtual_workers,
        noise_multiplier=release.noise_multiplier,
        honest_share=training.honest_share,
    )
    ring = fit_ring(demand, affordable=affordable_rounding(release, config.dp_config.target_delta))
    own = training.model_copy(
        update={
            "query": query,
            "sample_rate": 1.0,
            "steps": release.count,
            "max_grad_norm": NORM,
            "clipping": "norm",
            # Rows are counted as they are.
            "rows_per_unit": training.rows_chosen,
            "copies": 1,
            "noise_multiplier": release.noise_multiplier,
            "expected_batch_size": float(divisor),
            "dimension": dimension,
            "ring_bits": ring.bits,
            "gamma_log2": ring.gamma_log2,
            "clamp": ring.clamp,
            "sigma": ring.sigma,
            "micro_batch_size": units,
            "micro_batches": batches,
            "overflow_probability": 0.0,
            "mask_split_probability": 0.0,
        }
    )
    return Measurement(mechanism=own, every=every, loss_bound=loss_bound)
