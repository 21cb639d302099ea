"""What a run will spend, and whether it can run at all: from configuration to mechanism, before anything is charged.

A plan depends only on public numbers: the configuration, the number of examples and the number of parameters.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from coordinator.accountants import accountant_of
from coordinator.accounting import (
    SLACK_SHARE,
    SMALLEST_NOISE_MULTIPLIER,
    DeltaTerms,
    accountant_delta,
    total_slack,
)
from coordinator.calibration import composed_epsilon, epsilon_against, solve_noise_multiplier
from coordinator.capacity import overflow_bound, physical_shape
from coordinator.config import RunConfig
from coordinator.config_sections import Kept
from coordinator.measurements import (
    MechanismCost,
    check_affordable,
    made,
    mechanism_costs,
    plan_measurements,
    planned_measurements,
    releases_within,
    scaled,
)
from coordinator.payer import NamedAccount, account_cap, accountant_for, epsilon_curve, steps_within
from coordinator.releases import Release, Releases
from metrics.errors import ConfigError, DatasetError, ModelError, RefusedError
from workers.measurement import Measurement
from workers.mechanism import AccountantName, Mechanism
from workers.ring import fit_ring

OVERFLOW_SHARE = 1e-5
"""Share of delta one run may use for cut batches; the reserve of an account then lasts for a thousand runs."""

PUBLIC_OVERFLOW = 1e-9
"""Chance of a cut batch that a run on public data accepts."""

PUBLIC_GRADIENT_BOUND = 2.0**16
"""Bound of one coordinate of one example's gradient on public data, where nothing is clipped."""

STATED_EPSILON_MARGIN = 20.0
_STATE_TENSORS = {"sgd": 1, "adam": 2, "adamw": 2, "adafactor": 1}


@dataclass(frozen=True, slots=True)
class Plan:
    """What `raycloak plan` shows.

    Attributes:
        mechanism, measurements: what will run.
        releases: all of them within the cap, as the accountants count them.
        mechanism_costs: each mechanism, the gradient's first, with what it would cost alone.
        epsilon_cap, delta: of the account.
        steps_within_cap: steps the cap allows, at most the planned ones, if nothing else is charged to the account.
        epsilon: what the ledger will have charged after those steps, measurements included; it holds even if the
            noise of ``colluding_workers`` is known.
        epsilon_outsiders: for whoever knows no worker's noise, the aggregator included.
        epsilon_one_worker: for the aggregator together with any one worker of ``num_workers``; None if that leaves
            no guarantee.
        delta_terms: what delta covers besides the accountant, all runs of the account together at most 1 % of it.
        epsilon_curve: (steps done, epsilon) pairs, the last at ``steps_within_cap``.
        sensitivity_inflation: C'/C - 1, what rounding to the grid costs.
        bytes_per_step: masked payload of all workers in one attempt.
        object_store_bytes: most that parameters, optimizer state and masked vectors of two attempts need at once.
        epsilon_by_accountant: of ``releases``, by four accountants; ``accountants_not_computed`` says why one is not
            there. Both are empty until `coordinator.crosscheck.checked` has compared them.
        exact: False if operations without a deterministic kernel may run.
        data_sealed: whether the examples are encrypted for the run's policy, so that the driver cannot read them.
        evaluation_data: how the evaluation split is kept; None without one.
        key_service: address of the data owner's key service, which gives the second half of every virtual-worker key.
        warnings: sentences for the reader; nothing here stops a run.
    """

    mechanism: Mechanism
    measurements: tuple[Measurement, ...]
    releases: Releases
    mechanism_costs: tuple[MechanismCost, ...]
    epsilon_cap: float
    delta: float
    steps_within_cap: int
    epsilon: float
    epsilon_outsiders: float
    epsilon_one_worker: float | None
    delta_terms: DeltaTerms
    epsilon_curve: tuple[tuple[int, float], ...]
    sensitivity_inflation: float
    bytes_per_step: int
    object_store_bytes: int
    exact: bool
    data_sealed: bool
    evaluation_data: Kept | None
    key_service: str | None
    warnings: tuple[str, ...]
    epsilon_by_accountant: dict[str, float] = field(default_factory=dict)
    accountants_not_computed: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """One flat object for ``raycloak plan --json``: the mechanism's fields, gamma, and the plan's."""
        own = asdict(self)
        del own["mechanism"]
        own["measurements"] = [measurement.model_dump(mode="json") for measurement in self.measurements]
        return {
            **self.mechanism.model_dump(mode="json"),
            "gamma": self.mechanism.gamma,
            "accountant_version": accountant_of(self.mechanism.accountant).version(),
            "accountant_delta": accountant_delta(self.delta),
            **own,
        }


def plan_mechanism(
    config: RunConfig, num_examples: int, dimension: int, account: NamedAccount | None = None
) -> Mechanism:
    """The frozen mechanism of a run.

    Guarantee: a function of public numbers only, and of none that may differ between two executions of one run: the
    number of workers enters only through ``batch_size_per_worker``.

    Args:
        num_examples: N. dimension: d, number of trainable parameters.
        account: the named one that pays, if it is not the run's own.

    Raises:
        ConfigError, DatasetError, ModelError: the configuration does not fit the data or the ring; with numbers.
        RefusedError: ``not_public``.
    """
    check_public(config)
    _check_sizes(config, num_examples, dimension)
    sample_rate = _sample_rate(config, num_examples)
    honest = _honest_share(config)
    accountant = accountant_for(config, account)
    noise = _noise_multiplier(config, sample_rate, accountant)
    slice_size = -(-num_examples // config.virtual_workers)
    draws = config.steps * config.virtual_workers
    budget = _overflow_budget(config, sample_rate, noise, honest, account)
    rows, batches = physical_shape(slice_size, sample_rate, draws, budget, config.micro_batch_size)
    capacity = rows * batches
    private = config.dp_config.enabled
    norm = config.dp_config.max_grad_norm
    ring = fit_ring(
        max_grad_norm=norm,
        clamp=config.ring.clamp or capacity * (norm if private else PUBLIC_GRADIENT_BOUND),
        dimension=dimension,
        virtual_workers=config.virtual_workers,
        noise_multiplier=noise,
        honest_share=honest,
        bits=64 if config.ring.bits == "auto" and not private else config.ring.bits,
    )
    return Mechanism(
        private=private,
        num_examples=num_examples,
        virtual_workers=config.virtual_workers,
        sample_rate=sample_rate,
        steps=config.steps,
        max_grad_norm=norm,
        noise_multiplier=noise,
        honest_share=honest,
        expected_batch_size=config.batch_size,
        dimension=dimension,
        ring_bits=ring.bits,
        gamma_log2=ring.gamma_log2,
        clamp=ring.clamp,
        sigma=ring.sigma,
        micro_batch_size=rows,
        micro_batches=batches,
        overflow_probability=overflow_bound(slice_size, sample_rate, draws, capacity),
        accountant=accountant,
    )


def make_plan(config: RunConfig, num_examples: int, dimension: int, account: NamedAccount | None = None) -> Plan:
    """The mechanism and all that follows from it; arguments and errors as :func:`plan_mechanism`.

    Raises:
        ConfigError: also ``delta_slack`` and ``cap_too_small``.
    """
    mechanism = plan_mechanism(config, num_examples, dimension, account)
    cap = account_cap(config) if account is None else account.epsilon_cap
    delta = config.dp_config.target_delta
    measurements = plan_measurements(config, mechanism)
    terms = total_slack((mechanism, *(each.mechanism for each in measurements)), cap)
    if terms.total > SLACK_SHARE * delta:
        raise ConfigError("delta_slack", _slack_message(terms, cap, delta), "Lower the cap, the steps or the size.")

    def releases(finished: int, last: int) -> Releases:
        return releases_within(mechanism, measurements, finished, last)

    def spent(finished: int, last: int) -> float:
        return composed_epsilon(releases(finished, last), delta, mechanism.accountant)

    steps = steps_within(mechanism.steps, lambda step: spent(step, step - 1), cap)
    if steps == 0:
        raise ConfigError(
            "cap_too_small",
            f"one step, with what is measured before it, costs epsilon {spent(1, 0):.4g} at delta {delta:g}, more than "
            f"the cap {cap:g}.",
            "Raise the cap or the noise multiplier, or lower the batch size.",
        )
    last = steps if spent(steps, steps) <= cap else steps - 1
    counts = [(each.mechanism, made(each, mechanism.steps, last)) for each in measurements]
    one_worker = epsilon_against(mechanism, hosted_at_most(config, config.num_workers), delta, steps, counts)
    return Plan(
        mechanism=mechanism,
        measurements=measurements,
        releases=releases(steps, last),
        mechanism_costs=mechanism_costs(mechanism, measurements, delta),
        epsilon_cap=cap,
        delta=delta,
        steps_within_cap=steps,
        epsilon=spent(steps, last),
        epsilon_outsiders=epsilon_against(mechanism, 0, delta, steps, counts),
        epsilon_one_worker=one_worker if math.isfinite(one_worker) else None,
        delta_terms=terms,
        epsilon_curve=epsilon_curve(steps, lambda step: releases(step, min(step, last)), delta, mechanism.accountant),
        sensitivity_inflation=mechanism.sensitivity / mechanism.max_grad_norm - 1,
        bytes_per_step=_masked_bytes(config, mechanism),
        object_store_bytes=_object_store_bytes(config, mechanism),
        exact=not config.allow_nondeterministic,
        data_sealed=config.dataset is not None and config.dataset.kind == "sealed",
        evaluation_data=config.evaluation.kept if config.evaluation else None,
        key_service=config.key_service.address if config.key_service else None,
        warnings=_warnings(config, mechanism, steps),
    )


def hosted_at_most(config: RunConfig, workers: int) -> int:
    """Most virtual workers that one of ``workers`` workers hosts when they are spread evenly."""
    return -(-config.virtual_workers // workers)


def _overflow_budget(
    config: RunConfig, sample_rate: float, noise: float, honest: float, account: NamedAccount | None
) -> float:
    """eta: small enough for the cap and for the epsilon that will be stated against one worker."""
    dp = config.dp_config
    if not dp.enabled:
        return PUBLIC_OVERFLOW
    cap = account_cap(config) if account is None else account.epsilon_cap
    # The worst case of two workers, whatever the configuration has: the mechanism must not depend on their number.
    unknown = config.virtual_workers - hosted_at_most(config, 2)
    releases = (Release(sample_rate, noise, config.steps), *planned_measurements(config))
    remaining = scaled(releases, math.sqrt(unknown / (config.virtual_workers * honest))) if unknown else ()
    stated = cap
    if min((each.noise_multiplier for each in remaining), default=0.0) >= SMALLEST_NOISE_MULTIPLIER:
        stated = max(cap, composed_epsilon(remaining, dp.target_delta))
    stated = min(stated, cap + STATED_EPSILON_MARGIN, 500.0)
    return OVERFLOW_SHARE * dp.target_delta / (1 + math.exp(stated))


def check_public(config: RunConfig) -> None:
    """Without noise only what is declared public may be trained on; RefusedError ``not_public`` otherwise."""
    if not config.dp_config.enabled and (config.dataset is None or not config.dataset.public):
        raise RefusedError(
            "not_public",
            "dp_config.enabled is false, but the dataset is not declared public.",
            "Set dataset.public: true if the data needs no protection, else switch privacy on.",
        )


def _check_sizes(config: RunConfig, num_examples: int, dimension: int) -> None:
    if num_examples <= 0:
        raise DatasetError("dataset_empty", "the dataset has no examples.", "Name data that has some.")
    if num_examples < config.virtual_workers:
        raise DatasetError(
            "dataset_too_small",
            f"{num_examples} examples cannot be spread over {config.virtual_workers} virtual workers.",
            "Lower virtual_workers to at most the number of examples.",
        )
    if dimension <= 0:
        raise ModelError(
            "no_parameters", "the model has no trainable parameters.", "Let some of them have requires_grad."
        )


def _sample_rate(config: RunConfig, num_examples: int) -> float:
    if config.batch_size > num_examples:
        raise ConfigError(
            "batch_too_large",
            f"an expected batch of {config.batch_size:g} is more than the {num_examples} examples.",
            "Lower expected_batch_size or batch_size_per_worker.",
        )
    return config.batch_size / num_examples


def _honest_share(config: RunConfig) -> float:
    colluding = config.dp_config.colluding_workers if config.dp_config.enabled else 0
    known = colluding * hosted_at_most(config, config.fewest_workers)
    if known >= config.virtual_workers:
        raise ConfigError(
            "colluding_workers",
            f"{colluding} colluding workers of {config.fewest_workers} may host {known} of "
            f"{config.virtual_workers} virtual workers, so no noise could be counted on.",
            "Lower colluding_workers, or raise min_workers.",
        )
    return 1 - known / config.virtual_workers


def _noise_multiplier(config: RunConfig, sample_rate: float, accountant: AccountantName) -> float:
    dp = config.dp_config
    if not dp.enabled:
        return 0.0
    if dp.target_epsilon is not None:
        others = planned_measurements(config)
        check_affordable(others, dp.target_epsilon, dp.target_delta, accountant)
        return solve_noise_multiplier(dp.target_epsilon, dp.target_delta, sample_rate, config.steps, accountant, others)
    assert dp.noise_multiplier is not None
    if dp.noise_multiplier < SMALLEST_NOISE_MULTIPLIER:
        raise ConfigError(
            "noise_too_small",
            f"a noise multiplier of {dp.noise_multiplier:g} is below {SMALLEST_NOISE_MULTIPLIER:g} and hides nothing.",
            "Raise it, or give target_epsilon instead.",
        )
    return dp.noise_multiplier


def _masked_bytes(config: RunConfig, mechanism: Mechanism) -> int:
    return config.num_workers * mechanism.dimension * mechanism.ring_bits // 8


def _object_store_bytes(config: RunConfig, mechanism: Mechanism) -> int:
    tensors = 1 + _STATE_TENSORS[config.optimizer.name]
    return 2 * (tensors * 4 * mechanism.dimension + _masked_bytes(config, mechanism))


def _slack_message(terms: DeltaTerms, cap: float, delta: float) -> str:
    numbers = ", ".join(f"{name} {value:.2g}" for name, value in asdict(terms).items())
    return f"at the cap {cap:g}, slack takes {terms.total:.2g} of delta {delta:g}, over {SLACK_SHARE:.0%} ({numbers})."


def _warnings(config: RunConfig, mechanism: Mechanism, steps: int) -> tuple[str, ...]:
    warnings = []
    delta = config.dp_config.target_delta
    if not mechanism.private:
        warnings.append("NOT PRIVATE: privacy is switched off; the data is declared public.")
    elif delta >= 1 / mechanism.num_examples:
        warnings.append(
            f"delta {delta:g} is not below 1/N = {1 / mechanism.num_examples:.3g}: a mechanism that publishes whole "
            "examples at random would pass as well. Set dp_config.target_delta well below 1/N."
        )
    if config.allow_nondeterministic:
        warnings.append("NOT EXACT: operations without a deterministic kernel are allowed; a repeat may differ.")
    if steps < mechanism.steps:
        warnings.append(f"the cap allows {steps} of {mechanism.steps} steps; the run will end there.")
    return tuple(warnings)
