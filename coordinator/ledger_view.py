"""What the ledger says about itself: frozen snapshots for the verdict, the budget command and the metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attestation.roster import Query
from coordinator.accounting import accountant_delta, epsilon, order_caps
from coordinator.ledger_entries import AccountOpened, Head, RunRegistered
from metrics.collectors import spent_ratio


@dataclass(frozen=True, slots=True)
class StepStatus:
    """Whether a step is charged, and for which parameters; the way to resolve a lost reply."""

    charged: bool
    parameter_digest: bytes | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class QueryView:
    """Planned and charged releases of one mechanism of a run."""

    query: Query
    planned: int
    charged: int


@dataclass(frozen=True, slots=True)
class RunView:
    """A run's share of an account: planned and charged training steps, and the same of every mechanism."""

    run_id: str
    private: bool
    planned_steps: int
    charged_steps: int
    queries: tuple[QueryView, ...]
    manifest_digest: bytes


@dataclass(frozen=True, slots=True)
class AccountView:
    """An account: its terms, what is spent, and by which runs.

    Attributes:
        spent_epsilon: epsilon of all charges at ``delta``, slack included.
        spent_ratio: share of the Renyi budget that is spent, at the order that admits most; linear in steps.
        delta_slack: part of delta that the runs' slack takes, at most 1 % of it.
    """

    name: str
    epsilon_cap: float
    delta: float
    accountant: str
    spent_epsilon: float
    spent_ratio: float
    delta_slack: float
    runs: tuple[RunView, ...]


def account_view(
    terms: AccountOpened, runs: Sequence[tuple[RunRegistered, Mapping[Query, int]]], spent: NDArray[np.float64]
) -> AccountView:
    """The view of an account with these runs, each with its charges by query, and ``spent`` RDP in all."""
    caps = order_caps(terms.epsilon_cap, accountant_delta(terms.delta), terms.orders)
    return AccountView(
        name=terms.account,
        epsilon_cap=terms.epsilon_cap,
        delta=terms.delta,
        accountant=terms.accountant,
        spent_epsilon=epsilon(spent, accountant_delta(terms.delta), terms.orders),
        spent_ratio=spent_ratio(spent.tolist(), caps),
        delta_slack=sum(event.delta_slack for event, _ in runs),
        runs=tuple(_run_view(event, charged) for event, charged in runs),
    )


def _run_view(event: RunRegistered, charged: Mapping[Query, int]) -> RunView:
    return RunView(
        run_id=event.run_id,
        private=any(mechanism.private for mechanism in event.mechanisms),
        planned_steps=sum(each.steps for each in event.mechanisms if each.query == "gradient"),
        charged_steps=charged.get("gradient", 0),
        queries=tuple(QueryView(each.query, each.steps, charged[each.query]) for each in event.mechanisms),
        manifest_digest=event.manifest_digest,
    )


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger at one moment. ``fencing`` is the number of the instance that was asked."""

    public_key: bytes
    fencing: int
    head: Head
    accounts: tuple[AccountView, ...]
