"""The measurements of a run beside its gradients: their mechanisms, their schedule, and what each costs."""

from dataclasses import dataclass

from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.calibration import affordable_rounding, composed_epsilon
from raycloak.coordinator.accounting.releases import Release, Releases, physical_shape, releases_of
from raycloak.coordinator.accounting.renyi import SMALLEST_NOISE_MULTIPLIER
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import ClassCountsConfig, PrivateEvaluationConfig
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.planning.batches import UNMEASURED_ROWS
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.loss import has_accuracy
from raycloak.workers.terms.measurement import NORM, Measurement
from raycloak.workers.terms.mechanism import Mechanism
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
    return tuple(Release(1.0, _noise(section), _count(config, section)) for section in _sections(config))


def plan_measurements(
    config: RunConfig, training: Mechanism, largest_rows: int = UNMEASURED_ROWS
) -> tuple[Measurement, ...]:
    """Return the frozen measurements of a run in the order in which they are made.

    Guarantee: a function of public numbers only. Measurements share examples, virtual workers, honest share and
    accountant with the mechanism of training.

    Raises:
        ConfigError: ``noise_too_small``, or a measurement does not fit the ring; with numbers.
    """
    rows = config.micro_batch_size or largest_rows
    return tuple(_measurement(config, section, training, rows) for section in _sections(config))


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
        return [(each.mechanism, _made(each, self.mechanism.steps, after)) for each in self.measurements]

    def releases(self, steps: int, measured: int) -> Releases:
        """Return all private releases of ``steps`` steps and of what is measured after at most ``measured`` steps."""
        return releases_of([(self.mechanism, steps), *self.measured(measured)])

    def epsilon(self, steps: int, measured: int, delta: float, orders: tuple[float, ...]) -> float:
        """Return the epsilon of :meth:`releases` at an account's ``delta``, with its Renyi ``orders`` in use."""
        return composed_epsilon(self.releases(steps, measured), delta, self.mechanism.accountant, orders)

    def reach(self, cap: float, delta: float, orders: tuple[float, ...]) -> tuple[int, int]:
        """Return how far a cap reaches: how many steps fit, and the last step whose measurements still fit.

        Raises:
            ConfigError: ``cap_too_small`` if not even one step fits.
        """
        low, high = 0, self.mechanism.steps
        middle = high  # Most plans fit whole, and one epsilon may take a second.
        while low < high:
            # A step is charged before the measurements that are due after it.
            if self.epsilon(middle, middle - 1, delta, orders) <= cap:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        if low == 0:
            raise ConfigError(
                "cap_too_small",
                f"one step, with what is measured before it, costs epsilon "
                f"{epsilon_text(self.epsilon(1, 0, delta, orders))} at delta {delta:g}, more than the cap {cap:g}.",
                "Raise the cap or the noise multiplier, or lower the batch size.",
            )
        return low, low if self.epsilon(low, low, delta, orders) <= cap else low - 1


def _made(measurement: Measurement, planned_steps: int, finished_steps: int) -> int:
    """Return how many releases of a measurement are made by the time ``finished_steps`` steps are finished."""
    count = measurement.mechanism.steps
    return sum(measurement.after(number, planned_steps) <= finished_steps for number in range(count))


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


def _sections(config: RunConfig) -> list[Section]:
    found = (config.measurements.class_counts, config.measurements.evaluation)
    return [section for section in found if section is not None]


def _count(config: RunConfig, section: Section) -> int:
    return 1 if isinstance(section, ClassCountsConfig) else -(-config.planned_steps // section.every)


def _noise(section: Section) -> float:
    if section.noise_multiplier < SMALLEST_NOISE_MULTIPLIER:
        raise ConfigError(
            "noise_too_small",
            f"a measurement's noise multiplier of {section.noise_multiplier:g} is below "
            f"{SMALLEST_NOISE_MULTIPLIER:g} and hides nothing.",
            "Raise it; 20 puts each count off by about 20 examples.",
        )
    return section.noise_multiplier


def _measurement(config: RunConfig, section: Section, training: Mechanism, largest_rows: int) -> Measurement:
    query: Query
    if isinstance(section, ClassCountsConfig):
        query, dimension, divisor = "class_counts", section.classes, 1.0
        every, loss_bound = 0, 0.0
    else:
        query, dimension, divisor = "evaluation", 2 if has_accuracy(config.loss_name) else 1, training.num_examples
        dimension += (section.classes or 0) ** 2
        every, loss_bound = section.every, section.loss_bound
    workers, noise = training.virtual_workers, _noise(section)
    slice_size = -(-training.num_examples // workers)
    # Every example contributes, so the batch holds a whole slice and none is ever cut.
    rows, batches = physical_shape(slice_size, largest_rows)
    demand = RingDemand(
        max_grad_norm=NORM,
        clamp=rows * batches * NORM,
        dimension=dimension,
        virtual_workers=workers,
        noise_multiplier=noise,
        honest_share=training.honest_share,
    )
    released = Release(1.0, noise, _count(config, section))
    ring = fit_ring(demand, affordable=affordable_rounding(released, config.dp_config.target_delta))
    own = training.model_copy(
        update={
            "query": query,
            "sample_rate": 1.0,
            "steps": _count(config, section),
            "max_grad_norm": NORM,
            "noise_multiplier": noise,
            "expected_batch_size": float(divisor),
            "dimension": dimension,
            "ring_bits": ring.bits,
            "gamma_log2": ring.gamma_log2,
            "clamp": ring.clamp,
            "sigma": ring.sigma,
            "micro_batch_size": rows,
            "micro_batches": batches,
            "overflow_probability": 0.0,
            "mask_split_probability": 0.0,
        }
    )
    return Measurement(mechanism=own, every=every, loss_bound=loss_bound)
