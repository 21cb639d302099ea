"""The plan of a run: its mechanism, what it will spend, and whether it can run at all. Nothing is charged for it.

A plan is made in one pass. Each stage uses only what the stages before it found, and refuses what it cannot serve:

    data facts -> sampling -> noise -> batch shape -> ring       the mechanism, `plan_mechanism`
        -> measurements -> slack of delta -> reach of the cap    what the account pays, `make_plan`
        -> other adversaries -> bytes -> warnings                what a reader should know

The batch shape comes after the noise, because it decides what a cut batch costs; where epsilon pays for cut batches,
the noise is then raised by that little.

A plan depends only on public numbers: the configuration, the number of examples and the number of parameters.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raycloak.attestation.core.mask_graph import SPLIT_PROBABILITY
from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.calibration import (
    affordable_rounding,
    composed_curve,
    composed_epsilon,
    epsilon_against,
    fitting_cap,
    noise_with_cut,
    rounding_cost,
    solve_noise_multiplier,
)
from raycloak.coordinator.accounting.releases import Release, Releases, cut_at, releases_of
from raycloak.coordinator.accounting.renyi import (
    ORDERS,
    SLACK_SHARE,
    DeltaSlack,
    accountant_delta,
    slack_reserve,
    total_slack,
)
from raycloak.coordinator.config.run import RunConfig, require_config
from raycloak.coordinator.config.sections import Kept
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.planning.batches import (
    PADDING_WARNING,
    UNMEASURED_ROWS,
    BatchTerms,
    PhysicalBatch,
    choose_batch,
    fixed_virtual_workers,
    hosted_at_most,
)
from raycloak.coordinator.planning.correlated_noise import NoiseGain, chosen_coefficients, gain_of, settled, state_bytes
from raycloak.coordinator.planning.masks import MaskPlan, plan_masks
from raycloak.coordinator.planning.measurements import (
    MechanismCost,
    Schedule,
    enough_noise,
    mechanism_costs,
    plan_measurements,
    planned_measurements,
)
from raycloak.coordinator.planning.payer import PayingAccount, accountant_for, cap_for, orders_for
from raycloak.metrics.errors import ConfigError, DatasetError, ModelError, RefusedError
from raycloak.metrics.proof_bounds import require_assertions
from raycloak.workers.terms.built_in_rules import RULES
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.terms.mechanism import (
    EXAMPLE,
    MAX_DIMENSION,
    AccountantName,
    Mechanism,
    UnitTerms,
    honest_share_of,
)
from raycloak.workers.vectors.noise import decompose
from raycloak.workers.vectors.ring import RingDemand, RingFit, fit_ring

if TYPE_CHECKING:
    from raycloak.coordinator.planning.outlook import AccountOutlook

PUBLIC_GRADIENT_BOUND = 2.0**16
"""Bound of one coordinate of one example's gradient on public data, where nothing is clipped."""

CURVE_POINTS = 40
"""Most points of a plan's epsilon curve."""

SPARE_CLAMP = 4
"""How far below the largest possible coordinate the clamp may be where that keeps the ring at 32 bits.

In a run of the SST-2 recipe (eps8) and in 20 steps of the Shakespeare recipe no coordinate came above 0.1 of the
largest possible one. Their models have fewer trained coordinates than those whose ring this concerns.
"""

_OWN_STATE_TENSORS = 2  # assumed of a rule of the user's own: most keep one or two moments


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned run: its mechanism, what it costs and what it needs.

    Attributes:
        mechanism, measurements: what will run.
        releases: all releases within the cap, as the accountants count them.
        mechanism_costs: what each mechanism would cost alone, the gradient's first.
        epsilon_cap, delta: of the account.
        steps_within_cap: steps the cap allows, at most the planned ones, if nothing else is charged to the account.
        measured_within_cap: the last finished step whose measurements the cap allows.
        orders: Renyi orders in use by the account once this plan is registered; empty under ``pld``.
        orders_fixed: whether an earlier run has fixed them.
        fitting_cap: the cap at which this run alone states least, where the cap is so generous that its order states
            over half as much again; None elsewhere.
        epsilon: what the ledger will have charged after those steps, measurements included; it holds even if the
            noise of ``colluding_workers`` is known.
        epsilon_outsiders: for outsiders and the aggregator, who know no worker's noise.
        epsilon_one_worker: for the aggregator together with any one worker of ``num_workers``, each on a machine of its
            own; None if that leaves no guarantee. Workers on one machine count as one: the verdict has their figure.
        rows_per_expected_row: rows that a step computes, over the expected batch size.
        delta_terms: what delta covers besides the accountant, all runs of the account together at most 1 % of it.
        sensitivity_inflation: C'/C - 1, what rounding to the grid adds to the gradient's sensitivity.
        rounding_cost: the share of epsilon that this takes; 0 where nothing is private.
        base_draws: base draws of the gradient's noise for each coordinate; 0 where nothing is private.
        bytes_per_step: masked payload of all workers in one attempt.
        object_store_bytes: most that parameters, optimizer state and masked vectors of two attempts need at once, and
            what is kept of earlier steps where noise is correlated.
        epsilon_by_accountant: of ``releases``, by five accountants; ``accountants_not_computed`` says why one is not
            there. Both are empty until `raycloak.coordinator.planning.cross_check.checked` has compared them.
        features: what an example's features are, with the names of their columns; empty in the plan that a run is made
            from.
        account: the account that will pay, as `raycloak plan` finds it; None in the plan that a run is made from.
        masks: graph of the masks; None if all pairs mask.
        exact: False if operations without a deterministic kernel may run.
        data_sealed: whether the examples are encrypted for the run's policy, so that the driver cannot read them.
        data_check: digest of the owner's check that this very data passed; None if none is recorded.
        groups: what the update rule does otherwise for some tensors, in words; not part of a run's plan.
        gpu_bytes: of parameters and sums on each GPU of a worker; empty on CPUs, and in a run's plan.
        evaluation_data: how the evaluation split is kept; None without one.
        key_service: address of the data owner's key service, which gives the second half of every virtual-worker key.
        noise_gain: what correlated noise gains; None where each step has noise of its own.
        warnings: sentences for the reader; nothing here stops a run.
    """

    mechanism: Mechanism
    measurements: tuple[Measurement, ...]
    releases: Releases
    mechanism_costs: tuple[MechanismCost, ...]
    epsilon_cap: float
    delta: float
    steps_within_cap: int
    measured_within_cap: int
    orders: tuple[float, ...]
    orders_fixed: bool
    fitting_cap: float | None
    epsilon: float
    epsilon_outsiders: float
    epsilon_one_worker: float | None
    rows_per_expected_row: float
    delta_terms: DeltaSlack
    sensitivity_inflation: float
    rounding_cost: float
    base_draws: int
    bytes_per_step: int
    object_store_bytes: int
    masks: MaskPlan | None
    exact: bool
    data_sealed: bool
    evaluation_data: Kept | None
    key_service: str | None
    warnings: tuple[str, ...]
    noise_gain: NoiseGain | None = None
    data_check: str | None = None
    groups: tuple[str, ...] = ()
    gpu_bytes: tuple[int, ...] = ()
    features: str = ""
    epsilon_by_accountant: dict[str, float] = field(default_factory=dict)
    accountants_not_computed: dict[str, str] = field(default_factory=dict)
    account: "AccountOutlook | None" = None

    @property
    def aggregator_bytes(self) -> int:
        """The most that an aggregator of all parameters takes of its node, the object store included."""
        earlier = self.noise_gain.state_bytes[1] if self.noise_gain else 0
        released = (self.object_store_bytes - earlier) // 2 - self.bytes_per_step
        return self.object_store_bytes + reduce_bytes(self.mechanism.dimension, self.bytes_per_step, released)

    @property
    def epsilon_curve(self) -> tuple[tuple[int, float], ...]:
        """Up to `CURVE_POINTS` pairs of steps done and epsilon, measurements included; the last at
        ``steps_within_cap``; none where nothing is private. Computed for its reader: a run would wait for it."""
        if not self.mechanism.private:
            return ()
        run, steps = Schedule(self.mechanism, self.measurements), self.steps_within_cap
        points = sorted({max(1, round(steps * point / CURVE_POINTS)) for point in range(1, CURVE_POINTS + 1)})
        releases = [run.releases(step, min(step, self.measured_within_cap)) for step in points]
        values = composed_curve(releases, self.delta, self.mechanism.accountant, self.orders)
        return tuple(zip(points, values, strict=True))

    def as_json(self) -> dict[str, Any]:
        """Return one flat object for ``raycloak plan --json``: the mechanism's fields, gamma, and the plan's."""
        own = asdict(self)
        del own["mechanism"]
        if own["account"] is not None:
            del own["account"]["charged"]
        own["measurements"] = [measurement.model_dump(mode="json") for measurement in self.measurements]
        return {
            **self.mechanism.model_dump(mode="json"),
            "gamma": self.mechanism.gamma,
            "accountant_version": accountant_of(self.mechanism.accountant).version(),
            "accountant_delta": accountant_delta(self.delta),
            "epsilon_curve": self.epsilon_curve,
            **own,
        }


def make_plan(
    config: RunConfig,
    num_examples: int,
    dimension: int,
    account: PayingAccount | None = None,
    largest_rows: int = UNMEASURED_ROWS,
    sparse_masks: bool | None = None,
    units: UnitTerms | None = None,
    coefficients: tuple[int, ...] | None = None,
) -> Plan:
    """Return the mechanism of a run and all that follows from it; arguments as :func:`plan_mechanism`.

    Raises:
        ConfigError, DatasetError, ModelError, RefusedError: as :func:`plan_mechanism`; also ``assertions_off``,
            ``delta_slack`` and ``cap_too_small``. The last also if not all of a plan fits the cap that must: a prepaid
            one, or one that `raycloak.coordinator.accounting.accountants.PrivacyLossAccountant.needs_whole_plan` names.
    """
    require_assertions()
    require_config(config)
    config = settled(config, num_examples, dimension)
    as_recorded = sparse_masks, units, coefficients
    mechanism = plan_mechanism(config, num_examples, dimension, account, largest_rows, *as_recorded)
    run = Schedule(mechanism, plan_measurements(config, mechanism, largest_rows))
    cap, delta = cap_for(config, account), config.dp_config.target_delta
    slack = _slack(run, cap, delta)
    planned = releases_of((each, each.steps) for each in run.mechanisms)
    limits = AccountLimits(cap, accountant_delta(delta), account.orders if account else ORDERS)
    orders = orders_for(account, mechanism.accountant, planned, limits)
    steps, measured = run.reach(cap, delta, orders)
    whole = config.ledger.prepaid or accountant_of(mechanism.accountant).needs_whole_plan(planned)
    if whole and (steps, measured) != (mechanism.steps, mechanism.steps):
        raise _only_a_part(run, measured, cap, delta, orders, config.ledger.prepaid)
    beside = run.measured(measured)
    hosted = hosted_at_most(mechanism.virtual_workers, config.num_workers)
    one_worker = epsilon_against(mechanism, hosted, delta, steps, beside)
    epsilon = run.epsilon(steps, measured, delta, orders)
    releases = run.releases(steps, measured)
    masked_bytes = config.num_workers * mechanism.dimension * mechanism.ring_bits // 8
    rule = RULES.get(config.optimizer.name)
    state_tensors = (rule.state_tensors if rule else _OWN_STATE_TENSORS) + config.optimizer.averaged_weights
    # Only the first private run of an account that others may share fixes its order.
    fixes = mechanism.accountant == "rdp" and releases and not (account is not None and account.orders_fixed)
    fitting = fitting_cap(releases, epsilon, delta) if fixes else None
    generous = () if fitting is None else (_generous_cap(cap, orders, epsilon, fitting),)
    return Plan(
        mechanism=mechanism,
        measurements=run.measurements,
        releases=releases,
        mechanism_costs=mechanism_costs(run, delta),
        epsilon_cap=cap,
        delta=delta,
        steps_within_cap=steps,
        measured_within_cap=measured,
        orders=orders if mechanism.accountant == "rdp" and mechanism.private else (),
        orders_fixed=account is not None and account.orders_fixed,
        fitting_cap=fitting,
        epsilon=epsilon,
        # Who knows no noise learns no more than who knows some; the two may differ by a rounding error.
        epsilon_outsiders=min(epsilon, epsilon_against(mechanism, 0, delta, steps, beside)),
        epsilon_one_worker=one_worker if math.isfinite(one_worker) else None,
        rows_per_expected_row=rows_per_expected_row(mechanism),
        delta_terms=slack,
        sensitivity_inflation=mechanism.inflation,
        rounding_cost=_rounding_cost(mechanism, delta),
        base_draws=decompose(mechanism.sigma).draws if mechanism.private else 0,
        bytes_per_step=masked_bytes,
        # Of parameters and state, and of the vectors, two attempts.
        # Beside them, a model and a release of each earlier step that is mixed.
        object_store_bytes=2 * (4 * mechanism.dimension * (1 + state_tensors) + masked_bytes)
        + state_bytes(mechanism.bands, mechanism.dimension, hosted, mechanism.ring_bits)[1],
        masks=plan_masks(config, run.mechanisms, keys_per_machine(config, mechanism.virtual_workers)),
        exact=not config.allow_nondeterministic,
        data_sealed=config.dataset is not None and config.dataset.kind == "sealed",
        evaluation_data=config.evaluation.kept if config.evaluation else None,
        key_service=config.key_service.address if config.key_service else None,
        noise_gain=gain_of(config, mechanism, hosted, delta),
        warnings=(*_warnings(config, mechanism, steps), *generous),
    )


def reduce_bytes(dimension: int, masked_bytes: int, released_bytes: int) -> int:
    """Return what the vault of an aggregator holds at once, beside the object store.

    It has a copy of what it is given, which is the masked vectors of one attempt, parameters and state. It makes the
    average, and parameters and state anew, and copies these once more to answer.

    Args:
        dimension: number of parameters.
        masked_bytes: of the vectors of all workers.
        released_bytes: of parameters and state.
    """
    return masked_bytes + 4 * dimension + 3 * released_bytes


def plan_mechanism(
    config: RunConfig,
    num_examples: int,
    dimension: int,
    account: PayingAccount | None = None,
    largest_rows: int = UNMEASURED_ROWS,
    sparse_masks: bool | None = None,
    units: UnitTerms | None = None,
    coefficients: tuple[int, ...] | None = None,
) -> Mechanism:
    """Return the frozen mechanism of a run.

    Guarantee: a function of public numbers only, and of none that may differ between two executions of one run. With
    ``virtual_workers`` given, the number of workers enters only through ``batch_size_per_worker``; else the number of
    virtual workers is chosen with it, and a resume takes it from the manifest.

    Args:
        num_examples: N; of data that a client sends, the most examples of one step. How many will ever come is not
            known, and enters nothing.
        dimension: d, number of trainable parameters.
        account: the named one that pays, if it is not the run's own.
        largest_rows: most rows of a micro-batch that memory holds, see `raycloak.workers.gradients.row_memory`; used
            where the configuration does not say.
        sparse_masks: whether some pairs of workers may not mask, as the manifest of a run that is repeated has it; as
            the configuration says, if None.
        units: what epsilon protects of the data; as the configuration says, if None.
        coefficients: of correlated noise, as the manifest of a run that is repeated has them; chosen if None. The
            choice depends on numerical libraries in its last bits.

    Raises:
        ConfigError, DatasetError, ModelError: the configuration does not fit the data or the ring; with numbers.
        RefusedError: ``not_public``.
    """
    config = settled(config, num_examples, dimension)
    check_public(config)
    _check_sizes(config, num_examples, dimension)
    private, accountant = config.dp_config.enabled, accountant_for(config, account)
    _sample_rate(config, num_examples, 1)
    if coefficients is None:
        coefficients = chosen_coefficients(config, num_examples, dimension)
    bands = max(1, len(coefficients))
    sample_rate = _sample_rate(config, num_examples, bands)
    if sparse_masks is None:
        sparse_masks = config.masks.colluding_workers is not None
    releases = _noised_releases(config, sample_rate, accountant, bands) if private else ()
    cap = cap_for(config, account)
    units = units or config.unit_terms
    terms = BatchTerms(num_examples, sample_rate, releases, accountant, cap, largest_rows, units, bands)
    batch = choose_batch(config, terms)
    _check_parts(bands, num_examples, batch.virtual_workers)
    noise = _noise_with_cut(config, releases, batch, num_examples, accountant, bands) if private else 0.0
    honest_share = _honest_share(config, batch.virtual_workers)
    # The cut counts for little beside the rounding's share, and would take seconds.
    release = Release(sample_rate, noise, _charged_steps(config, bands)) if private else None
    ring = _ring(config, dimension, batch, release, honest_share, coefficients)
    return Mechanism(
        private=private,
        **units._asdict(),
        num_examples=num_examples,
        virtual_workers=batch.virtual_workers,
        sample_rate=sample_rate,
        steps=config.planned_steps,
        max_grad_norm=config.dp_config.max_grad_norm,
        clipping=config.dp_config.clipping,
        noise_multiplier=noise,
        honest_share=honest_share,
        expected_batch_size=config.batch_size,
        dimension=dimension,
        ring_bits=ring.bits,
        gamma_log2=ring.gamma_log2,
        clamp=ring.clamp,
        sigma=ring.sigma,
        micro_batch_size=batch.units,
        micro_batches=batch.batches,
        overflow_probability=batch.overflow_probability,
        mask_split_probability=SPLIT_PROBABILITY if private and sparse_masks else 0.0,
        accountant=accountant,
        max_participations=config.max_participations,
        coefficients=coefficients,
    )


def check_public(config: RunConfig) -> None:
    """Refuse to train without noise on data that is not declared public; RefusedError ``not_public``."""
    if not config.dp_config.enabled and (config.dataset is None or not config.dataset.public):
        raise RefusedError(
            "not_public",
            "dp_config.enabled is false, but the dataset is not declared public.",
            "Set dataset.public: true if the data needs no protection, else switch privacy on.",
        )


def _check_sizes(config: RunConfig, num_examples: int, dimension: int) -> None:
    if num_examples <= 0:
        raise DatasetError("dataset_empty", "the dataset has no examples.", "Name a dataset with examples.")
    least = fixed_virtual_workers(config) or config.most_workers
    if num_examples < least:
        raise DatasetError(
            "dataset_too_small",
            f"{num_examples} examples cannot be spread over {least} virtual workers.",
            "Lower virtual_workers to at most the number of examples.",
        )
    if dimension <= 0:
        raise ModelError(
            "no_parameters", "the model has no trainable parameters.", "Set requires_grad on some of them."
        )
    if dimension > MAX_DIMENSION:
        raise ModelError(
            "model_too_large",
            f"the model has {dimension:,} trainable parameters, over 2^34, for which the sensitivity is proved.",
            "Train fewer of them, for example adapters, and set requires_grad = False on the others.",
        )


def _sample_rate(config: RunConfig, num_examples: int, parts: int) -> float:
    """Return q, of one of so many parts of the data; 1 for data that a client sends, which is all used."""
    sent = config.max_participations is not None
    if config.batch_size > num_examples:
        raise ConfigError(
            "batch_too_large",
            f"an expected batch of {config.batch_size:g} is more than the {num_examples} examples"
            f"{' of one step' if sent else ''}.",
            f"Lower expected_batch_size or batch_size_per_worker{', or raise max_examples_per_step' if sent else ''}.",
        )
    if config.batch_size * parts > num_examples:
        raise ConfigError(
            "batch_too_large",
            f"an expected batch of {config.batch_size:g} is more than one of {parts} parts of {num_examples} examples.",
            "Lower expected_batch_size or dp_config.noise.bands: with correlated noise a step draws from one part.",
        )
    return 1.0 if sent else parts * config.batch_size / num_examples


def _check_parts(bands: int, num_examples: int, virtual_workers: int) -> None:
    """Refuse bands of which a slice would have an empty part, that a step draws nobody from."""
    if bands > 1 and bands * virtual_workers > num_examples:
        raise ConfigError(
            "bands_too_many",
            f"noise of {bands} bands cuts {virtual_workers} slices of {num_examples} examples into parts without any.",
            f"Lower virtual_workers, or dp_config.noise.bands to {num_examples // virtual_workers} at most.",
        )


def _charged_steps(config: RunConfig, bands: int) -> int:
    """Return how many of the planned steps the account pays for: those that one example can take part in."""
    bound, rounds = config.max_participations, -(-config.planned_steps // bands)
    return rounds if bound is None else min(rounds, bound)


def keys_per_machine(config: RunConfig, virtual_workers: int) -> int | None:
    """Return how many virtual workers' keys of one epoch a machine may get; None if no worker is assumed to collude.

    A colluding worker is a machine: it has what any process on it was ever given.
    """
    if not config.dp_config.enabled or config.dp_config.colluding_workers == 0:
        return None
    return hosted_at_most(virtual_workers, config.fewest_workers)


def _honest_share(config: RunConfig, virtual_workers: int) -> float:
    colluding = config.dp_config.colluding_workers
    known = colluding * (keys_per_machine(config, virtual_workers) or 0)
    if known >= virtual_workers:
        raise ConfigError(
            "colluding_workers",
            f"{colluding} colluding workers of {config.fewest_workers} may host {known} of "
            f"{virtual_workers} virtual workers, so no noise could be counted on.",
            "Lower colluding_workers, or raise min_workers.",
        )
    return honest_share_of(virtual_workers, known)


def _noised_releases(config: RunConfig, sample_rate: float, accountant: AccountantName, bands: int) -> Releases:
    """Return all planned releases, the gradient's first, with the noise that is configured or solved for."""
    dp, steps = config.dp_config, _charged_steps(config, bands)
    if dp.noise_multiplier is not None:
        noise = enough_noise(dp.noise_multiplier, "a", "Raise it, or give target_epsilon instead.")
        return (Release(sample_rate, noise, steps), *planned_measurements(config))
    assert dp.target_epsilon is not None
    others = planned_measurements(config)
    spent = composed_epsilon(others, dp.target_delta, accountant) if others else 0.0
    if not math.isfinite(spent) or spent >= dp.target_epsilon:
        raise ConfigError(
            "measurements_too_costly",
            f"the measurements alone cost epsilon {epsilon_text(spent)} at delta {dp.target_delta:g}; the target for "
            f"all is {dp.target_epsilon:g}.",
            "Raise their noise_multiplier, or measure less often.",
        )
    noise = solve_noise_multiplier(dp.target_epsilon, dp.target_delta, sample_rate, steps, accountant, others)
    return (Release(sample_rate, noise, steps), *others)


def _noise_with_cut(
    config: RunConfig,
    releases: Releases,
    batch: PhysicalBatch,
    num_examples: int,
    accountant: AccountantName,
    bands: int,
) -> float:
    """Return the noise multiplier of training, raised for a target by what the cut costs where epsilon pays for it."""
    training, *others = releases
    dp, cut = config.dp_config, cut_at(num_examples, batch.virtual_workers, batch.units * batch.batches, bands)
    if dp.target_epsilon is None or dp.noise_multiplier is not None or batch.overflow_probability or cut is None:
        return training.noise_multiplier
    charged = replace(training, cut=cut)
    return noise_with_cut(dp.target_epsilon, dp.target_delta, charged, accountant, tuple(others))


def rows_per_expected_row(mechanism: Mechanism) -> float:
    """Return how many rows a step computes for each that it expects to draw."""
    rows = mechanism.virtual_workers * mechanism.micro_batch_size * mechanism.micro_batches
    return rows / mechanism.expected_batch_size


def _ring(
    config: RunConfig,
    dimension: int,
    batch: PhysicalBatch,
    release: Release | None,
    honest_share: float,
    coefficients: tuple[int, ...],
) -> RingFit:
    """Return the ring; by default no batch of a virtual worker can reach its clamp, or none does in practice.

    Args:
        release: the gradients, as the accountant counts them; None for data that is public.
    """
    norm = config.dp_config.max_grad_norm
    # All examples of the batch with their whole norm in one coordinate, and with one sign.
    largest = batch.units * batch.batches * (norm if release else PUBLIC_GRADIENT_BOUND)
    clamp = config.ring.clamp or largest
    demand = RingDemand(
        max_grad_norm=norm,
        clamp=clamp,
        dimension=dimension,
        virtual_workers=batch.virtual_workers,
        noise_multiplier=release.noise_multiplier if release else 0.0,
        honest_share=honest_share,
        coefficients=coefficients,
    )
    return fit_ring(
        demand,
        bits=64 if config.ring.bits == "auto" and release is None else config.ring.bits,
        least_clamp=clamp if config.ring.clamp else largest / SPARE_CLAMP,
        affordable=affordable_rounding(release, config.dp_config.target_delta) if release else None,
    )


def _rounding_cost(mechanism: Mechanism, delta: float) -> float:
    if not mechanism.private:
        return 0.0
    charged = mechanism.participations(mechanism.steps)
    release = Release(mechanism.sample_rate, mechanism.noise_multiplier, charged)
    return rounding_cost(release, mechanism.inflation, delta)


def _slack(run: Schedule, cap: float, delta: float) -> DeltaSlack:
    """Return what delta covers besides the accountant at the cap; ConfigError ``delta_slack`` if that is too much."""
    slack = total_slack(run.mechanisms, cap)
    if slack.total > slack_reserve(delta):
        numbers = ", ".join(f"{name} {value:.2g}" for name, value in asdict(slack).items())
        raise ConfigError(
            "delta_slack",
            f"at the cap {cap:g}, slack takes {slack.total:.2g} of delta {delta:g}, over {SLACK_SHARE:.0%} "
            f"({numbers}).",
            "Lower the cap, the steps, the virtual workers or the size of the model"
            f"{', or leave masks.colluding_workers out' if slack.mask_split else ''}.",
        )
    return slack


def _only_a_part(
    run: Schedule, reach: int, cap: float, delta: float, orders: tuple[float, ...], prepaid: bool
) -> ConfigError:
    steps = run.mechanism.steps
    together = "under the pld accountant a cap holds steps and measurements together only if all of them fit"
    return ConfigError(
        "cap_too_small",
        f"{steps} steps, with what is measured, cost epsilon "
        f"{epsilon_text(run.epsilon(steps, steps, delta, orders))} at delta {delta:g}, more than the cap "
        f"{cap:g}; {'a prepaid run pays for all at once' if prepaid else together}.",
        f"Lower the steps (about {reach} fit), or raise the noise multiplier or the cap"
        f"{'' if prepaid else ', or set dp_config.accountant: rdp'}.",
    )


def with_notes(plan: Plan, notes: tuple[str, ...], left_out: tuple[str, ...] = ()) -> Plan:
    """Return ``plan`` with sentences for its reader about how the model was built, and what is left out of the data."""
    said = (*(f"The model: {note}" for note in notes), *(f"The data: {each}." for each in left_out))
    return replace(plan, warnings=(*plan.warnings, *said))


def _generous_cap(cap: float, orders: tuple[float, ...], stated: float, fitting: float) -> str:
    """Return what a generous cap costs."""
    return (
        f"the cap {cap:g} is generous: it fixes Renyi order {orders[0]:g}, at which this run states epsilon "
        f"{epsilon_text(stated)}. A cap of {fitting:g} would hold this run alone, and state no more than that. Choose "
        "the cap that all runs of the account need together."
    )


def _warnings(config: RunConfig, mechanism: Mechanism, steps: int) -> tuple[str, ...]:
    warnings = []
    delta, sent = config.dp_config.target_delta, mechanism.max_participations is not None
    # N of a dataset; of data that a client sends, the most different examples that could ever come.
    most = mechanism.num_examples * (mechanism.steps if sent else 1)
    if not mechanism.private:
        warnings.append("NOT PRIVATE: privacy is switched off; the data is declared public.")
    elif delta >= 1 / most:
        warnings.append(
            f"delta {delta:g} is not below 1/N = {1 / most:.3g}: a mechanism that publishes whole "
            "examples at random would pass as well. Set dp_config.target_delta well below 1/N."
        )
    if (computed := rows_per_expected_row(mechanism)) > PADDING_WARNING:
        lower = ", or lower dataset.max_examples_per_step" if sent else ""
        # There are never fewer virtual workers than workers.
        if not sent and mechanism.virtual_workers > config.most_workers:
            lower = ", or lower virtual_workers"
        warnings.append(
            f"a step computes {computed:.3g} rows for each that it expects{'' if sent else ' to draw'}. Raise "
            f"expected_batch_size{lower}."
        )
    split = None if config.evaluation is None else config.evaluation.dataset
    if mechanism.unit != EXAMPLE and split is not None and config.dataset is not None:
        if split.unit is None:
            warnings.append(
                f"nobody tells whether a {mechanism.unit} is in both splits: set evaluation.dataset.unit to the column."
            )
        elif "sealed" in (split.kind, config.dataset.kind):
            warnings.append(
                f"sealed data names no {mechanism.unit}, so no run tells whether one is in both splits. 'raycloak data "
                "seal' refuses it where both are in the clear."
            )
    if config.allow_nondeterministic:
        warnings.append("NOT EXACT: operations without a deterministic kernel are allowed; a repeat may differ.")
    if steps < mechanism.steps:
        warnings.append(f"the cap allows {steps} of {mechanism.steps} steps; the run will end there.")
    return tuple(warnings)
