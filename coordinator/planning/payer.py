"""The account that pays for a run: the named one or its data's, its cap and its accountant."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.data_marks import DataMarks, joined
from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.releases import Releases
from raycloak.coordinator.accounting.renyi import ORDERS
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.known_data import accounts_of
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.ledger.view import LedgerView
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.vaults.machine_ledger import MachineLedger, ledger_to_read
from raycloak.metrics.errors import BudgetError, ConfigError
from raycloak.workers.terms.mechanism import AccountantName

LEAST_EPSILON = 0.1
"""A rule of thumb: below it, no odds about a person change by more than a tenth, and hardly a model learns anything."""


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


def data_name(dataset: DatasetConfig | None, base: Path | str) -> str:
    """Return the name of the account that a run opens for data without a fingerprint; empty for none, or if public.

    The name tells the file, but not its folder: manifests are shown to people who need not know that.

    Args:
        base: folder that relative paths start from.
    """
    if dataset is None or dataset.public:
        return ""
    if dataset.kind == "sent":
        # It has no place and no fingerprint, and its ids are keyed: all of it that names no account shares one.
        return "data-sent"
    if dataset.kind == "digits":
        return f"data-digits-{dataset.split}"
    if dataset.path is not None:
        shown = PurePosixPath(dataset.path.partition("?")[0]).name
    else:
        assert dataset.function is not None, "data without a path comes from a function"
        shown = dataset.function.partition(":")[2]
    # An account's name is printable, and a file's need not be.
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", shown)
    place = digest(length_prefixed("raycloak/data-name/v1", named_marks(dataset, base).places))
    return f"data-{readable}-{place.hex()[:12]}"


def named_marks(dataset: DatasetConfig, base: Path | str) -> DataMarks:
    """Return what data is known by before it is opened: the places that its configuration names."""
    return DataMarks(places=joined(descriptor(dataset).named_places(base)))


@contextmanager
def payers_ledger(config: RunConfig) -> Iterator[PrivacyLedger | MachineLedger | None]:
    """Open the run's ledger and create nothing; None if there is none, and the configuration names no account in it.

    Raises:
        ConfigError: ``ledger_missing`` for a named account, or as `ledger_to_read`.
    """
    with ExitStack() as opened:
        try:
            ledger = opened.enter_context(ledger_to_read(config))
        except ConfigError as error:
            if error.code != "ledger_missing" or config.ledger.account is not None:
                raise
            yield None
            return
        yield ledger


def account_of(view: LedgerView, config: RunConfig, data: DataMarks, name: str, run_id: str = "") -> str:
    """Return the name of the account that pays: the configuration's, the one of an earlier execution, or the data's.

    The ledger decides whether it may. Of the accounts that are known by the data, the one that is known best pays.

    Args:
        data: marks, from whoever opened it.
        name: of an account to open, from :func:`data_name`. Each run on public data opens its own.
        run_id: of a run that may be registered already, and then stays where it is.

    Raises:
        BudgetError: ``account_ambiguous`` if several accounts are known by the data as well, and none is named.
    """
    if config.ledger.account is not None:
        return config.ledger.account
    registered = [each.name for each in view.accounts for run in each.runs if run_id and run.run_id == run_id]
    if registered:
        return registered[0]
    own = f"run-{run_id or 'ID'}"
    if config.dataset is not None and config.dataset.public:
        return own
    reasons = accounts_of(view.known, data)
    if not reasons:
        return f"data-{data.fingerprint.hex()[:16]}" if data.fingerprint else name or own
    best = max(reasons.values())
    known = [each for each in view.accounts if reasons.get(each.name) is best]
    usable = [each.name for each in known if not each.closed] or [each.name for each in known]
    if len(usable) > 1:
        raise BudgetError(
            "account_ambiguous",
            f"the accounts {', '.join(usable)} all pay for this data, and the configuration names none.",
            "Name the one that pays: ledger.account.",
        )
    return usable[0]


def require_meant(config: RunConfig, account: PayingAccount | None, meant: bool) -> None:
    """Ask whether a very small cap is meant, before a run opens an account that its data is known by from then on.

    Args:
        account: the one that is open; None if the run opens it.
        meant: the answer.

    Raises:
        ConfigError: ``epsilon_small``.
    """
    if not meant and (warning := small_cap(config, account)) is not None:
        raise ConfigError(
            "epsilon_small",
            warning,
            "If it is meant, say so: raycloak run CONFIG --yes, or small_epsilon=True in Python.",
        )


def small_cap(config: RunConfig, account: PayingAccount | None) -> str | None:
    """Return a sentence if a run is to open an account for its data with a cap that is rarely meant; else None."""
    cap, public = account_cap(config), config.dataset is not None and config.dataset.public
    if account is not None or public or not config.dp_config.enabled or cap >= LEAST_EPSILON:
        return None
    return (
        f"the first run on this data opens its account, whose cap cannot be raised, and {cap:g} is below "
        f"{LEAST_EPSILON:g}, where hardly a model learns anything."
    )


def existing_account(view: LedgerView, config: RunConfig, name: str, run_id: str = "") -> PayingAccount | None:
    """Return the account ``name``, as :func:`paying_account`; None if the run is to open it."""
    if config.ledger.account is None and all(each.name != name for each in view.accounts):
        return None
    return paying_account(view, config, run_id, name)


def paying_account(view: LedgerView, config: RunConfig, run_id: str = "", name: str | None = None) -> PayingAccount:
    """Return the account ``name``, or the configuration's, with the cap at which ``run_id`` was registered, if it was.

    A run is planned once. A cap that changes later may end it sooner, but does not change its plan.

    Raises:
        BudgetError: ``account_unknown``, ``account_closed`` or ``account_not_shared`` for a new run, or
            ``account_mismatch`` if its delta or its accountant is not the configuration's: every epsilon of the run is
            stated at one delta, and planned with what holds the cap.
    """
    name, delta = name or config.ledger.account, config.dp_config.target_delta
    account = next((account for account in view.accounts if account.name == name), None)
    if account is None:
        raise BudgetError(
            "account_unknown",
            f"there is no account '{name}'.",
            f"Open it: raycloak budget open {name} --epsilon-cap E --delta {delta:g}",
        )
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
    earlier = [run for run in account.runs if run.private]
    if planned is None and earlier and config.dp_config.enabled and not accountant_of(account.accountant).shareable:
        raise BudgetError(
            "account_not_shared",
            f"account '{name}' is held with {account.accountant}, for the plan of run {earlier[0].run_id} alone, which "
            f"has charged epsilon {epsilon_text(account.spent_epsilon)} of {account.epsilon_cap:g}.",
            "Resume that run if it has not ended; or open one more budget for the people in this data, raycloak budget "
            f"open NAME --epsilon-cap E --delta {delta:g} --also, and name it in ledger.account.",
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


def opening_terms(config: RunConfig, account: PayingAccount | None, accountant: AccountantName) -> OpeningTerms | None:
    """Return the terms of the account that a run is to open; None if it is open."""
    if account is not None:
        return None
    return OpeningTerms(account_cap(config), config.dp_config.target_delta, accountant)


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
