"""The rules by which the ledger admits a run and a charge. Pure functions of events."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.data_marks import NO_MARKS, DataMarks
from raycloak.attestation.core.lineage import Lineage
from raycloak.attestation.core.messages import checked
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.accountants import AccountLimits, Quote, Spend, accountant_of
from raycloak.coordinator.accounting.outward import sum_up, weighted_sum_up
from raycloak.coordinator.accounting.releases import Releases, overflow_bound, release_of
from raycloak.coordinator.accounting.renyi import (
    SLACK_SHARE,
    SMALLEST_NOISE_MULTIPLIER,
    accountant_delta,
    release_rdp,
    slack_reserve,
    total_slack,
)
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.entries import AccountOpened, Event, RunPrepaid, RunRegistered, VectorsBound
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.mechanism import EXAMPLE, ROW, AccountantName, Mechanism, check_together


@dataclass(frozen=True, slots=True)
class Priced:
    """A mechanism, with its digest and the cost of one of its steps."""

    mechanism: Mechanism
    digest: bytes
    step_rdp: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PricedRun:
    """The parts of a registration that a charge needs, parsed once.

    Attributes:
        prepaid: whether the registration charged all that the run plans.
    """

    registered: RunRegistered
    priced: Mapping[Query, Priced]
    quote: Quote
    prepaid: bool

    @classmethod
    def of(cls, event: RunRegistered, prepaid: bool = False) -> Self:
        """Parse ``event``, which is a prepaid run's also by its own type."""
        each = zip(event.mechanisms, event.step_rdp, strict=True)
        priced = {m.query: Priced(m, m.digest(), np.asarray(cost)) for m, cost in each}
        quote = Quote(event.quote_counts, event.quote_epsilon)
        return cls(event, priced, quote, prepaid or isinstance(event, RunPrepaid))

    def spend(self, charged: Mapping[Query, int]) -> Spend:
        """Return the cost of so many releases of each mechanism, or of all that a prepaid run plans.

        Guarantee: of data that a client sends, the releases beyond the bound on participations cost nothing.

        Public ones cost nothing and are not counted.
        """
        if self.prepaid:
            charged = {query: each.mechanism.steps for query, each in self.priced.items()}
        private = [
            (each.mechanism.participations(charged[query]), each)
            for query, each in self.priced.items()
            if each.mechanism.private
        ]
        orders = len(self.registered.step_rdp[0])
        rdp = weighted_sum_up([(count, each.step_rdp) for count, each in private], orders)
        releases = tuple(release_of(each.mechanism, charged[each.mechanism.query]) for count, each in private if count)
        return Spend(tuple(map(float, rdp)), tuple(count for count, _ in private), releases, self.quote)


@dataclass(frozen=True, slots=True)
class OpeningTerms:
    """The promise of an account: its cap, at its delta, and the accountant that holds it."""

    epsilon_cap: float
    delta: float
    accountant: AccountantName = "rdp"


@dataclass(frozen=True, slots=True)
class RegistrationTerms:
    """All that a run is registered with.

    Attributes:
        account: that pays.
        mechanisms: all that the run may release. Each has a query of its own, and is paid for release by release.
        data: marks of its data, as its workers state them.
        public: whether the data is declared to need no protection.
        prepaid: whether all that the run plans is charged with its registration, and stays charged if it does less.
        opens: terms of the account if it is not open yet, and the run is to open it; None if somebody has opened it.
        lineage: by which each charge is held to the model before; None where the run's caller makes the updates.
            Workers take no receipt under another one than their manifest's.
    """

    run_id: str
    account: str
    mechanisms: tuple[Mechanism, ...]
    manifest_digest: bytes
    data: DataMarks = NO_MARKS
    public: bool = False
    prepaid: bool = False
    opens: OpeningTerms | None = None
    lineage: Lineage | None = None


PLANNED: Final = Lineage(orchestrator_key=bytes(32), initial_parameters=bytes(32))
"""Stands for the lineage of a run that is only planned: it has no manifest yet."""


def unit_of(mechanisms: Sequence[Mechanism]) -> str:
    """Return what epsilon is for the presence of; the mechanisms of a run share it."""
    unit = mechanisms[0].unit
    return ROW if unit == EXAMPLE else unit


def registration(run: RegistrationTerms, terms: AccountOpened, fixed: bool) -> RunRegistered:
    """Build the event of a new run, with its cost.

    Args:
        terms: of the account.
        fixed: whether its orders in use are fixed. If not, a private run fixes them.

    Raises:
        BudgetError: a flaw of a mechanism: ``mechanism_inconsistent`` or ``accountant_mismatch``.
        ProtocolError: ``mechanism_bounds`` or ``malformed`` if no proof covers one of them, or all of them together.
        ConfigError: ``delta_too_small`` for the accountant.
    """
    # They came as objects, which nothing has checked.
    run_id, mechanisms = run.run_id, tuple(checked(Mechanism, each) for each in run.mechanisms)
    check_together(mechanisms)
    check_order(run_id, mechanisms, run.lineage)
    for mechanism in mechanisms:
        # First, because the price follows from what the mechanism claims.
        if mechanism.private:
            check_claims(run_id, mechanism)
            check_accountant(run_id, mechanism, terms)
    plan, accountant = planned(mechanisms), accountant_of(terms.accountant)
    orders: tuple[float, ...] = ()
    if plan:
        orders = terms.orders if fixed else accountant.fixed_orders(plan, account_limits(terms))
    quote = quoted(terms, mechanisms)
    event = (RunPrepaid if run.prepaid else RunRegistered)(
        recorded_at=now(),
        run_id=run_id,
        account=terms.account,
        mechanisms=mechanisms,
        unit=unit_of(mechanisms),
        manifest_digest=run.manifest_digest,
        data=run.data,
        public=run.public,
        orders=orders,
        step_rdp=tuple(mechanism_rdp(mechanism, orders) for mechanism in mechanisms),
        quote_counts=quote.counts,
        quote_epsilon=quote.epsilon,
        epsilon_cap=terms.epsilon_cap,
        delta_slack=0.0,  # set below, because it follows from the event
        accountant_version=accountant.version(),
        lineage=run.lineage,
    )
    return event.model_copy(update={"delta_slack": slack_at(event, terms.epsilon_cap)})


def quoted(terms: AccountOpened, mechanisms: Sequence[Mechanism]) -> Quote:
    """Return what the account's accountant says beforehand about a run of these mechanisms."""
    plan = planned(mechanisms)
    return accountant_of(terms.accountant).quote(plan, account_limits(terms)) if plan else Quote()


def planned(mechanisms: Sequence[Mechanism]) -> Releases:
    """Return all that a run of these mechanisms plans to release with noise."""
    return tuple(release_of(each, each.steps) for each in mechanisms if each.private)


def is_private(event: RunRegistered) -> bool:
    """Return whether a run releases anything private."""
    return any(mechanism.private for mechanism in event.mechanisms)


def account_limits(terms: AccountOpened) -> AccountLimits:
    """Return the part of an account's terms that its accountant needs."""
    return AccountLimits(terms.epsilon_cap, accountant_delta(terms.delta), terms.orders)


def mechanism_rdp(mechanism: Mechanism, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Return the RDP of one release of a mechanism at each order."""
    if not mechanism.private:
        return (0.0,) * len(orders)
    return tuple(float(each) for each in release_rdp(release_of(mechanism, 1), orders))


def check_order(run_id: str, mechanisms: Sequence[Mechanism], lineage: Lineage | None) -> None:
    """Refuse a run with correlated noise whose steps nothing holds to their order; BudgetError ``lineage_missing``.

    Of steps that are charged out of order one unit could be in more than are counted.
    """
    if lineage is None and any(each.bands > 1 for each in mechanisms):
        raise BudgetError(
            "lineage_missing",
            f"run {run_id} has correlated noise, and no aggregator that signs its models.",
            "Let the run make the updates, or set dp_config.noise.correlated: off.",
        )


def check_claims(run_id: str, mechanism: Mechanism) -> None:
    """Refuse a private mechanism with too little noise to account for, or one that claims too few cut batches.

    Guarantee: passes only if a release's cost, and its part of delta, follow from the rest of the mechanism. That its
    shares add up to the noise that it claims, every mechanism guarantees by itself.

    Raises:
        BudgetError: ``mechanism_inconsistent``.
    """
    if mechanism.noise_multiplier < SMALLEST_NOISE_MULTIPLIER:
        raise BudgetError(
            "mechanism_inconsistent",
            f"mechanism {mechanism.query} of run {run_id} has a noise multiplier of {mechanism.noise_multiplier:g}, "
            f"which hides nothing; the least is {SMALLEST_NOISE_MULTIPLIER:g}.",
        )
    capacity = mechanism.micro_batch_size * mechanism.micro_batches
    largest_part = mechanism.largest_part
    if mechanism.overflow_probability == 0:
        if mechanism.sample_rate == 1 and capacity < largest_part:
            raise BudgetError(
                "mechanism_inconsistent",
                f"mechanism {mechanism.query} of run {run_id} cuts batches to {capacity} examples, which no accountant "
                "computes at its sampling rate.",
            )
        return
    cut = overflow_bound(largest_part, mechanism.sample_rate, mechanism.steps * mechanism.virtual_workers, capacity)
    if mechanism.overflow_probability < cut * (1 - 1e-6):
        raise BudgetError(
            "mechanism_inconsistent",
            f"mechanism {mechanism.query} of run {run_id} claims that a batch is cut with probability "
            f"{mechanism.overflow_probability:.3g} at most; its sizes imply {cut:.3g}.",
        )


def check_accountant(run_id: str, mechanism: Mechanism, terms: AccountOpened) -> None:
    """Refuse a mechanism that was planned with another accountant than the one that holds its account."""
    if mechanism.accountant != terms.accountant:
        raise BudgetError(
            "accountant_mismatch",
            f"mechanism {mechanism.query} of run {run_id} was planned with the {mechanism.accountant} accountant, but "
            f"account '{terms.account}' is held with {terms.accountant}.",
            "Set dp_config.accountant to auto, or name another account.",
        )


def require_same_sums(mechanism: Mechanism, step: int, sums: Sequence[bytes], earlier: Sequence[Event | None]) -> None:
    """Refuse vectors that mix another sum of an earlier step than that step was bound with.

    How many of them a step mixes depends on its key epoch, which aggregators know.

    Args:
        sums: of the step and of those before it, the newest first.
        earlier: how these were bound, in the same order.

    Raises:
        BudgetError: ``not_reproducible``.
    """
    query, most = mechanism.query, mechanism.bands if mechanism.bands > 1 else 0
    if not min(most, 1) <= len(sums) <= most:
        raise BudgetError("not_reproducible", f"{query} step {step} names {len(sums)} sums, and mixes {most} at most.")
    for age, (own, bound) in enumerate(zip(sums[1:], earlier, strict=True), 1):
        if not isinstance(bound, VectorsBound) or bound.sums[:1] != (own,):
            raise BudgetError(
                "not_reproducible",
                f"{query} step {step} mixes another sum of step {step - age} than that step was bound with.",
                "Use the kind of machine and the library versions of the first time, or start a new run.",
            )


def check_shareable(terms: AccountOpened, registered: Sequence[RunRegistered]) -> None:
    """Refuse a second private run on an account whose accountant holds only one fixed plan, or beside mixed sums.

    Of a run with correlated noise the filter bounds rounds, and no step alone: other charges between those of a round
    would need a proof of their own (docs/proofs/013-correlated-noise.md).
    """
    private = [run.run_id for run in registered if is_private(run)]
    mixing = [run.run_id for run in registered for each in run.mechanisms if each.bands > 1]
    if len(private) > 1 and mixing:
        raise BudgetError(
            "account_not_shared",
            f"run {mixing[0]} has correlated noise, and account '{terms.account}' may then have no other run.",
            "Open another account for one of them, or set dp_config.noise.correlated: off.",
        )
    if len(private) > 1 and not accountant_of(terms.accountant).shareable:
        raise BudgetError(
            "account_not_shared",
            f"account '{terms.account}' is held with {terms.accountant}, for the plan of run {private[0]} alone.",
            "Open an account with the rdp accountant, and name it in ledger.account.",
        )


def check_admission(
    terms: AccountOpened, registered: Sequence[RunRegistered], spent: Sequence[Spend], event: RunRegistered
) -> None:
    """Refuse a run that an account has no room for, beside those registered in it and what they have charged.

    Guarantee: a prepaid run, and one whose accountant needs it, is registered only if all that it plans fits the cap,
    beside all that was charged before.

    Args:
        terms: of the account once ``event`` has registered the run.

    Raises:
        BudgetError: ``delta_exceeded``, ``account_not_shared``, or ``cap_exceeded`` if not even one release of each
            mechanism is left, or less than such a run plans.
    """
    check_reserve(terms, [*registered, event])
    if is_private(event):
        check_shareable(terms, [*registered, event])
        run, mechanisms = PricedRun.of(event), event.mechanisms
        whole = run.prepaid or accountant_of(terms.accountant).needs_whole_plan(planned(mechanisms))
        # A run that could not afford one release of each mechanism is refused before it starts.
        least = run.spend({each.query: each.steps if whole else 1 for each in mechanisms})
        check_cap(terms, [*spent, least], "all that the run plans" if whole else "the step")


def slack_at(registered: RunRegistered, epsilon_cap: float) -> float:
    """Return the part of delta that a run's slack takes if epsilon may reach ``epsilon_cap``; at most 1."""
    return min(total_slack(registered.mechanisms, epsilon_cap).total, 1.0)


def check_reserve(terms: AccountOpened, registered: Sequence[RunRegistered]) -> None:
    """Refuse runs whose slack together, at the cap of ``terms``, would not fit the reserve of delta."""
    total = sum_up(slack_at(each, terms.epsilon_cap) for each in registered)
    if total > slack_reserve(terms.delta):
        raise BudgetError(
            "delta_exceeded",
            f"with run {registered[-1].run_id} and cap {terms.epsilon_cap:g} the slack of account '{terms.account}' "
            f"would take {total:.2g} of its delta {terms.delta:g}; {SLACK_SHARE:.0%} is set aside for it.",
            "Plan the run for this account's cap, or use another account.",
        )


def check_cap(terms: AccountOpened, spent: Sequence[Spend], what: str = "the step") -> float:
    """Return epsilon once all of ``spent`` is charged; BudgetError ``cap_exceeded`` if it is over the cap.

    Args:
        what: is charged last, for the refusal.
    """
    after = epsilon_at(terms, spent)
    if after > terms.epsilon_cap:
        raise BudgetError(
            "cap_exceeded",
            f"{what} would bring account '{terms.account}' to epsilon {epsilon_text(after)}, over its cap "
            f"{terms.epsilon_cap:g} at delta {terms.delta:g}.",
            "The budget of this data is spent; another account is another promise to the people in it.",
        )
    return after


def epsilon_at(terms: AccountOpened, spent: Sequence[Spend]) -> float:
    """Return epsilon of the spending of all runs of an account, under its terms."""
    return accountant_of(terms.accountant).spent(spent, account_limits(terms))


def run_mismatch(run_id: str) -> BudgetError:
    """Build the refusal of a run id that something else already has."""
    return BudgetError(
        "run_mismatch",
        f"run {run_id} is registered for another account, mechanism or manifest.",
        "Resume it with its own configuration, or start a run with a new secret.",
    )


def now() -> int:
    """Return Unix time in whole seconds."""
    return int(time.time())
