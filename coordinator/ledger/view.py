"""Frozen snapshots of the ledger, for the verdict, the budget command and the metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.accountants import Spend, accountant_of
from raycloak.coordinator.accounting.renyi import ORDERS
from raycloak.coordinator.ledger.accounts import Account
from raycloak.coordinator.ledger.entries import Head, RunRegistered
from raycloak.coordinator.ledger.leases import Lease
from raycloak.coordinator.ledger.rules import account_limits, epsilon_at, slack_at
from raycloak.workers.terms.mechanism import AccountantName


@dataclass(frozen=True, slots=True)
class StepStatus:
    """The state of a step: whether it is charged, and for which parameters. It resolves a lost reply."""

    charged: bool
    parameter_digest: bytes | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class QueryView:
    """The planned and charged releases of one mechanism of a run."""

    query: Query
    planned: int
    charged: int


@dataclass(frozen=True, slots=True)
class RunView:
    """A run's share of an account: planned and charged training steps, and the same for every mechanism.

    Attributes:
        epsilon_cap: the account's cap at the registration. The run is planned for it.
        lease: the lease of the instance that owns the run.
    """

    run_id: str
    private: bool
    planned_steps: int
    charged_steps: int
    epsilon_cap: float
    queries: tuple[QueryView, ...]
    manifest_digest: bytes
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class AccountView:
    """An account: its terms, its spending, and the runs that spent it.

    Attributes:
        spent_epsilon: epsilon of all charges at ``delta``, slack included.
        accountant: the accountant that holds the cap.
        orders: its Renyi orders: those in use, or if ``orders_fixed`` is not set those that its first private run
            fixes one of.
        spent_ratio: spent share of the account's budget, linear in the steps of a run.
        delta_slack: part of delta that the runs' slack takes, at most 1 % of it.
        closed: whether nothing more can be charged to it.
        authority, fingerprint: as in `raycloak.coordinator.ledger.entries.AccountOpened`.
        terms_hash: hash of the entry that set the cap. An authorisation to raise the cap names it.
    """

    name: str
    epsilon_cap: float
    delta: float
    accountant: AccountantName
    spent_epsilon: float
    spent_ratio: float
    delta_slack: float
    runs: tuple[RunView, ...]
    closed: bool = False
    authority: bytes = b""
    fingerprint: bytes = b""
    terms_hash: bytes = b""
    orders: tuple[float, ...] = ORDERS
    orders_fixed: bool = False


def account_view(
    account: Account,
    runs: Sequence[tuple[RunRegistered, Mapping[Query, int], Lease | None]],
    spent: Sequence[Spend],
) -> AccountView:
    """Build an account's view from its runs, each with charges by query and lease, and their spending."""
    terms = account.terms
    return AccountView(
        name=terms.account,
        epsilon_cap=terms.epsilon_cap,
        delta=terms.delta,
        accountant=terms.accountant,
        spent_epsilon=epsilon_at(terms, spent),
        spent_ratio=accountant_of(terms.accountant).ratio(spent, account_limits(terms)),
        delta_slack=sum(slack_at(event, terms.epsilon_cap) for event, *_ in runs),
        runs=tuple(_run_view(*each) for each in runs),
        closed=account.closed,
        authority=terms.authority,
        fingerprint=terms.fingerprint,
        terms_hash=account.changed.hash,
        orders=terms.orders,
        orders_fixed=account.fixed,
    )


def _run_view(event: RunRegistered, charged: Mapping[Query, int], lease: Lease | None) -> RunView:
    return RunView(
        run_id=event.run_id,
        private=any(mechanism.private for mechanism in event.mechanisms),
        planned_steps=sum(each.steps for each in event.mechanisms if each.query == "gradient"),
        charged_steps=charged.get("gradient", 0),
        epsilon_cap=event.epsilon_cap,
        queries=tuple(QueryView(each.query, each.steps, charged[each.query]) for each in event.mechanisms),
        manifest_digest=event.manifest_digest,
        lease=lease,
    )


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger at one moment.

    Attributes:
        fencing: number of the instance that answered.
        rollback_witness: whether that instance has a witness on other storage than the ledger's.
    """

    public_key: bytes
    fencing: int
    head: Head
    accounts: tuple[AccountView, ...]
    rollback_witness: bool = False
