"""Frozen snapshots of the ledger, for the verdict, the budget command and the metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.accountants import Spend, accountant_of
from raycloak.coordinator.accounting.outward import sum_up
from raycloak.coordinator.accounting.renyi import ORDERS
from raycloak.coordinator.ledger.accounts import Account
from raycloak.coordinator.ledger.entries import AccountOpened, Head, RunPrepaid, RunRegistered
from raycloak.coordinator.ledger.known_data import Known, accounts_of
from raycloak.coordinator.ledger.rules import PricedRun, account_limits, epsilon_at, is_private, slack_at
from raycloak.coordinator.ledger.store import Lease
from raycloak.coordinator.ledger.witness import WitnessState
from raycloak.workers.terms.mechanism import AccountantName


@dataclass(frozen=True, slots=True)
class StepStatus:
    """The state of a step: whether it is charged, and for which parameters. It resolves a lost reply."""

    charged: bool
    input_digest: bytes | None = None
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
        prepaid: whether the registration charged all that is planned.
    """

    run_id: str
    private: bool
    planned_steps: int
    charged_steps: int
    epsilon_cap: float
    queries: tuple[QueryView, ...]
    manifest_digest: bytes
    lease: Lease | None = None
    prepaid: bool = False


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
        authority: as in `raycloak.coordinator.ledger.entries.AccountOpened`.
        data: marks of all data that it is known by.
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
    data: tuple[DataMarks, ...] = ()
    terms_hash: bytes = b""
    orders: tuple[float, ...] = ORDERS
    orders_fixed: bool = False


def account_view(
    account: Account,
    runs: Sequence[tuple[RunRegistered, Mapping[Query, int], Lease | None]],
    spent: Sequence[Spend],
    data: Sequence[DataMarks],
) -> AccountView:
    """Build an account's view from its runs, each with charges by query and lease, their spending and its data."""
    terms = account.terms
    return AccountView(
        name=terms.account,
        epsilon_cap=terms.epsilon_cap,
        delta=terms.delta,
        accountant=terms.accountant,
        spent_epsilon=epsilon_at(terms, spent),
        spent_ratio=accountant_of(terms.accountant).ratio(spent, account_limits(terms)),
        delta_slack=sum_up(slack_at(event, terms.epsilon_cap) for event, *_ in runs),
        runs=tuple(
            RunView(
                run_id=event.run_id,
                private=is_private(event),
                planned_steps=sum(each.steps for each in event.mechanisms if each.query == "gradient"),
                charged_steps=charged.get("gradient", 0),
                epsilon_cap=event.epsilon_cap,
                queries=tuple(QueryView(each.query, each.steps, charged[each.query]) for each in event.mechanisms),
                manifest_digest=event.manifest_digest,
                lease=lease,
                prepaid=isinstance(event, RunPrepaid),
            )
            for event, charged, lease in runs
        ),
        closed=account.closed,
        authority=terms.authority,
        data=tuple(data),
        terms_hash=account.changed.hash,
        orders=terms.orders,
        orders_fixed=account.fixed,
    )


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger at one moment.

    Attributes:
        fencing: number of the instance that answered.
        rollback_witness: whether that instance has a witness on other storage than the ledger's.
        witness: what that instance knows of its witness; None without one.
    """

    public_key: bytes
    fencing: int
    head: Head
    accounts: tuple[AccountView, ...]
    rollback_witness: bool = False
    witness: WitnessState | None = None

    @property
    def known(self) -> Known:
        """The data that its accounts are known by."""
        return Known({each.name: each.data for each in self.accounts})


@dataclass(frozen=True, slots=True)
class Outlook:
    """The future of one more run on an account, after all that other runs have charged; nothing is written for it.

    Attributes:
        terms: of the account once the run is registered, with the orders then in use.
        run: the registration that the ledger would write.
        prepaid: whether that charges all that the run plans.
        others: what the account's other runs have charged.
    """

    terms: AccountOpened
    run: RunRegistered
    prepaid: bool
    others: tuple[Spend, ...]

    def epsilon_after(self, charged: Mapping[Query, int]) -> float:
        """Return the account's epsilon once the run has also charged each of its mechanisms so often."""
        return epsilon_at(self.terms, [*self.others, PricedRun.of(self.run, self.prepaid).spend(charged)])


@dataclass(frozen=True, slots=True)
class DataStanding:
    """The spending of all runs on one dataset, as far as the ledger can tell: of all accounts that are known by it.

    Where an account is known by no data, it stands alone. Together these accounts claim the sum of their caps at the
    sum of their deltas (`docs/privacy.md`).

    Attributes:
        accounts: their names.
        runs: how many private runs they have registered.
        epsilon_charged: sum of what they have been charged.
        epsilon_cap, delta: sums of theirs.
    """

    accounts: tuple[str, ...]
    runs: int
    epsilon_charged: float
    epsilon_cap: float
    delta: float


def data_standing(view: LedgerView, account: str) -> DataStanding:
    """Return the standing of the data that ``account`` is about; all zero if there is no such account yet."""
    names = {account}.union(*(accounts_of(view.known, data) for data in view.known.accounts.get(account, ())))
    about = [each for each in view.accounts if each.name in names]
    return DataStanding(
        accounts=tuple(each.name for each in about),
        runs=sum(run.private for each in about for run in each.runs),
        epsilon_charged=sum_up(each.spent_epsilon for each in about),
        epsilon_cap=sum_up(each.epsilon_cap for each in about),
        delta=sum_up(each.delta for each in about),
    )
