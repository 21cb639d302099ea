"""The cost of a hyper-parameter search: every trial is a run of its own on one shared account, and pays in full.

Trials are chosen after earlier ones were seen. So the Renyi filter of a shared account composes them, whatever
accountant holds a single run. On a new account, the plan of the first trial fixes its order. Trials whose results are
thrown away cost the same: the one who chose has seen them.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.calibration import composed_epsilon, fitting_cap, solve_noise_multiplier
from raycloak.coordinator.accounting.releases import Release, Releases, releases_of, uncut
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta, slack_reserve
from raycloak.coordinator.planning.batches import OVERFLOW_SHARE
from raycloak.coordinator.planning.measurements import Schedule, most_within
from raycloak.coordinator.planning.plan import Plan
from raycloak.metrics.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SearchCost:
    """The cost of ``trials`` runs of one plan together, on a shared account.

    Attributes:
        epsilon: of all trials, at the account's delta and Renyi order.
        epsilon_one: of one trial, as the account states it.
        trials_within_cap: how many fit the cap beside what the account has been charged; of ``trials`` at most.
        noise_multiplier: of training, at which all trials together fit the cap so; None if none is enough, or if the
            reserve of delta does not last for so many trials.
        fitting_cap: the cap at which a new account states least for all trials, where this one's is so generous that
            its order states over half as much again; None elsewhere.
        slack_share: share of the account's reserve of delta that all trials take.
    """

    trials: int
    epsilon_cap: float
    epsilon: float
    epsilon_one: float
    trials_within_cap: int
    noise_multiplier: float | None
    fitting_cap: float | None
    slack_share: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the JSON of ``plan --trials``."""
        shown = {"accountant": "rdp", **asdict(self)}
        # The plan's JSON has it.
        del shown["epsilon_cap"]
        return shown


def search_cost(
    training: Release,
    others: Releases,
    trials: int,
    epsilon_cap: float,
    delta: float,
    slack: float,
    orders: tuple[float, ...] = (),
    before: Releases = (),
) -> SearchCost:
    """Return the cost of ``trials`` runs that each release ``training`` and ``others``.

    Args:
        training: the steps of one trial. others: what else it releases.
        epsilon_cap, delta: of the account that all trials share.
        slack: part of delta that one trial's slack takes.
        orders: the account's in use; empty if its first trial fixes them.
        before: what other runs have released on it.

    Raises:
        ConfigError: ``trials`` if there is none.
    """
    if trials < 1:
        raise ConfigError("trials", f"a search has at least one trial, not {trials}.", "Give --trials 1 or more.")
    one = (training, *others)
    limits = AccountLimits(epsilon_cap, accountant_delta(delta), ORDERS)
    in_use = orders or accountant_of("rdp").fixed_orders(one, limits)
    slack_share = trials * slack / slack_reserve(delta)
    epsilon = _epsilon(one, trials, delta, in_use)
    noise = None
    if slack_share <= 1:
        beside = (*before, *_times(others, trials))
        steps = training.count * trials
        with suppress(ConfigError):
            # Other noise is another plan, which fixes its own order if none is fixed yet.
            noise = solve_noise_multiplier(
                epsilon_cap, delta, training.sample_rate, steps, "rdp", beside, orders or None
            )
    return SearchCost(
        trials=trials,
        epsilon_cap=epsilon_cap,
        epsilon=epsilon,
        epsilon_one=_epsilon(one, 1, delta, in_use),
        trials_within_cap=most_within(epsilon_cap, trials, lambda few: _epsilon(one, few, delta, in_use, before)),
        noise_multiplier=noise,
        # The order of an account that has one stays, whatever its cap.
        fitting_cap=fitting_cap(_times(one, trials), epsilon, delta) if not orders and epsilon <= epsilon_cap else None,
        slack_share=slack_share,
    )


def search_of(plan: Plan, trials: int) -> SearchCost:
    """Return the cost of ``trials`` runs of a plan, at its account's cap and delta.

    Raises:
        ConfigError: ``trials``, or ``not_private`` for a plan that charges nothing.
    """
    if not plan.mechanism.private:
        raise ConfigError("not_private", "a search on public data costs no privacy.", "Leave --trials out.")
    mechanisms = Schedule(plan.mechanism, plan.measurements).mechanisms
    # A shared account has its own capacity, at which delta pays for cut batches and not epsilon.
    training, *others = uncut(releases_of((each, each.steps) for each in mechanisms))
    cut = 0.0 if plan.mechanism.overflow_probability else OVERFLOW_SHARE * plan.delta
    return search_cost(
        training,
        tuple(others),
        trials,
        plan.epsilon_cap,
        plan.delta,
        plan.delta_terms.total + cut,
        plan.orders if plan.orders_fixed else (),
        plan.account.charged if plan.account and plan.orders_fixed else (),
    )


def _times(releases: Releases, trials: int) -> Releases:
    return tuple(replace(release, count=release.count * trials) for release in releases)


def _epsilon(one: Releases, trials: int, delta: float, orders: tuple[float, ...], before: Releases = ()) -> float:
    return composed_epsilon((*before, *_times(one, trials)), delta, "rdp", orders)
