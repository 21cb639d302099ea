"""The rules by which the ledger admits a run and a charge; pure functions of events."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from attestation.roster import Query
from coordinator.accounting import (
    SLACK_SHARE,
    SMALLEST_NOISE_MULTIPLIER,
    accountant_delta,
    accountant_version,
    delta_slack,
    effective_noise_multiplier,
    epsilon,
    step_rdp,
)
from coordinator.ledger_entries import AccountOpened, RunRegistered
from metrics.errors import BudgetError
from workers.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class Priced:
    """A mechanism with its digest and what one step of it costs."""

    mechanism: Mechanism
    digest: bytes
    step_rdp: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PricedRun:
    """What of a registration a charge needs, parsed once."""

    registered: RunRegistered
    priced: Mapping[Query, Priced]

    @classmethod
    def of(cls, event: RunRegistered) -> Self:
        """The parsed form of ``event``."""
        each = zip(event.mechanisms, event.step_rdp, strict=True)
        return cls(event, {m.query: Priced(m, m.digest(), np.asarray(cost)) for m, cost in each})


def registration(
    run_id: str, terms: AccountOpened, mechanisms: tuple[Mechanism, ...], manifest_digest: bytes
) -> RunRegistered:
    """The event of a new run, with what it costs; refuses a mechanism whose noise is not what it says."""
    if len({mechanism.query for mechanism in mechanisms}) != len(mechanisms) or not mechanisms:
        raise BudgetError("mechanism_inconsistent", f"run {run_id} does not name each of its mechanisms once.")
    return RunRegistered(
        recorded_at=now(),
        run_id=run_id,
        account=terms.account,
        mechanisms=mechanisms,
        manifest_digest=manifest_digest,
        step_rdp=tuple(_cost(run_id, mechanism, terms) for mechanism in mechanisms),
        delta_slack=min(sum(delta_slack(mechanism, terms.epsilon_cap).total for mechanism in mechanisms), 1.0),
        accountant_version=accountant_version(),
    )


def _cost(run_id: str, mechanism: Mechanism, terms: AccountOpened) -> tuple[float, ...]:
    """RDP of one release, after a check that the noise shares add up to what the mechanism claims."""
    if not mechanism.private:
        return (0.0,) * len(terms.orders)
    counted = effective_noise_multiplier(mechanism, mechanism.virtual_workers * (1 - mechanism.honest_share))
    claimed = mechanism.noise_multiplier
    usable = 0 < mechanism.sample_rate <= 1 and claimed >= SMALLEST_NOISE_MULTIPLIER and mechanism.honest_share > 0
    if not usable or not mechanism.honest_share <= 1 or counted < claimed * (1 - 1e-9):
        raise BudgetError(
            "mechanism_inconsistent",
            f"mechanism {mechanism.query} of run {run_id} claims noise multiplier {claimed:g} at sampling rate "
            f"{mechanism.sample_rate:g}, but its shares add up to {counted:g}.",
        )
    return step_rdp(mechanism.sample_rate, claimed, terms.orders)


def check_slack(terms: AccountOpened, registered: list[RunRegistered], event: RunRegistered) -> None:
    """Refuse a run whose slack, with that of all others, would not fit the reserve of delta."""
    total = event.delta_slack + sum(other.delta_slack for other in registered)
    if total > SLACK_SHARE * terms.delta:
        raise BudgetError(
            "delta_exceeded",
            f"with run {event.run_id} the slack of account '{terms.account}' would take {total:.2g} of its delta "
            f"{terms.delta:g}; {SLACK_SHARE:.0%} is set aside for it.",
            "Plan the run for this account's cap, or use another account.",
        )


def check_cap(terms: AccountOpened, spent: NDArray[np.float64]) -> None:
    """Refuse a charge after which ``spent`` would exceed the cap."""
    after = epsilon_at(terms, spent)
    if after > terms.epsilon_cap:
        raise BudgetError(
            "cap_exceeded",
            f"the step would bring account '{terms.account}' to epsilon {after:.4g}, over its cap "
            f"{terms.epsilon_cap:g} at delta {terms.delta:g}.",
            "The budget of this data is spent; another account is another promise to the people in it.",
        )


def epsilon_at(terms: AccountOpened, spent: NDArray[np.float64]) -> float:
    """Epsilon of an RDP vector under an account's terms."""
    return epsilon(spent, accountant_delta(terms.delta), terms.orders)


def run_mismatch(run_id: str) -> BudgetError:
    """The refusal of a run id that is already taken by something else."""
    return BudgetError(
        "run_mismatch",
        f"run {run_id} is registered for another account, mechanism or manifest.",
        "Resume it with its own configuration, or start a run with a new secret.",
    )


def now() -> int:
    """Unix time in whole seconds."""
    return int(time.time())
