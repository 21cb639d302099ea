"""What the ledger says about itself: frozen snapshots for the verdict, the budget command and the metrics."""

from dataclasses import dataclass

from coordinator.ledger_entries import Head


@dataclass(frozen=True, slots=True)
class StepStatus:
    """Whether a step is charged, and for which parameters; the way to resolve a lost reply."""

    charged: bool
    parameter_digest: bytes | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run's share of an account: planned and charged steps."""

    run_id: str
    private: bool
    planned_steps: int
    charged_steps: int
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


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger at one moment. ``fencing`` is the number of the instance that was asked."""

    public_key: bytes
    fencing: int
    head: Head
    accounts: tuple[AccountView, ...]
