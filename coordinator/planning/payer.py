"""The account that pays for a run: its own or a named one, its cap and its accountant."""

from dataclasses import dataclass

from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.releases import Releases
from raycloak.coordinator.accounting.renyi import ORDERS
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.ledger.view import LedgerView
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.mechanism import AccountantName


@dataclass(frozen=True, slots=True)
class PayingAccount:
    """The facts of a named account that a plan needs.

    Attributes:
        orders: its Renyi orders in use, or if ``orders_fixed`` is not set those that its first private run fixes one
            of.
    """

    epsilon_cap: float
    accountant: AccountantName
    orders: tuple[float, ...] = ORDERS
    orders_fixed: bool = False


def account_cap(config: RunConfig) -> float:
    """Return the epsilon cap of the run's own account; 0 where privacy is switched off."""
    dp = config.dp_config
    if not dp.enabled:
        return 0.0
    cap = dp.epsilon_cap if dp.epsilon_cap is not None else dp.target_epsilon
    assert cap is not None
    return cap


def paying_account(view: LedgerView, config: RunConfig, run_id: str = "") -> PayingAccount:
    """Return the account that the configuration names, with the cap at which ``run_id`` was registered, if it was.

    A run is planned once. A cap that changes later may end it sooner, but does not change its plan.

    Raises:
        BudgetError: ``account_unknown``, ``account_closed`` for a new run, or ``account_mismatch`` if its delta or its
            accountant is not the configuration's: every epsilon of the run is stated at one delta, and planned with
            what holds the cap.
    """
    name, delta = config.ledger.account, config.dp_config.target_delta
    account = next((account for account in view.accounts if account.name == name), None)
    if account is None:
        raise BudgetError("account_unknown", f"there is no account '{name}'.", f"Open it: raycloak budget open {name}")
    if account.delta != delta:
        raise BudgetError(
            "account_mismatch",
            f"account '{name}' is open with delta {account.delta:g}, the configuration says {delta:g}.",
            f"Set dp_config.target_delta to {account.delta:g}.",
        )
    asked = config.dp_config.accountant
    if config.dp_config.enabled and asked not in ("auto", account.accountant):
        raise BudgetError(
            "account_mismatch",
            f"account '{name}' is held with the {account.accountant} accountant, the configuration says {asked}.",
            "Set dp_config.accountant to auto, or name another account.",
        )
    planned = next((run.epsilon_cap for run in account.runs if run.run_id == run_id), None)
    if planned is None and account.closed:
        raise BudgetError(
            "account_closed", f"account '{name}' is closed: no new run may charge to it.", "Name another account."
        )
    cap = account.epsilon_cap if planned is None else planned
    return PayingAccount(cap, account.accountant, account.orders, account.orders_fixed)


def orders_for(
    account: PayingAccount | None, accountant: AccountantName, plan: Releases, limits: AccountLimits
) -> tuple[float, ...]:
    """Return the Renyi orders in use when the account has registered ``plan``: its own, or those that the plan fixes.

    Args:
        account: the named one, if it is not the run's own.
        limits: the cap that the plan is made for, and the accountant's share of delta.
    """
    if account is not None and account.orders_fixed:
        return account.orders
    return accountant_of(accountant).fixed_orders(plan, limits)


def cap_for(config: RunConfig, account: PayingAccount | None) -> float:
    """Return the epsilon cap of the account that pays: the named one, else the run's own."""
    return account_cap(config) if account is None else account.epsilon_cap


def accountant_for(config: RunConfig, account: PayingAccount | None) -> AccountantName:
    """Return the named account's accountant; for the run's own account the configured one, by default the tight one."""
    if account is not None:
        return account.accountant
    if config.dp_config.accountant != "auto":
        return config.dp_config.accountant
    return "pld" if config.dp_config.enabled else "rdp"
