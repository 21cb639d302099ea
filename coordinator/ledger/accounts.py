"""Changes of accounts between their opening and their closing: what may change, and the account after each change.

Pure functions of events. The ledger calls them before it writes an entry, the audit after it has read one. So both hold
an entry to the same rules. None of them can give a person's data more epsilon than somebody promised.
Lowering a cap takes away. Raising one needs the signature of the account's authority. A transfer takes from one account
of a dataset what it gives to another of the same dataset.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from raycloak.attestation.core.data_marks import NO_MARKS, DataMarks
from raycloak.coordinator.accounting.accountants import Spend
from raycloak.coordinator.accounting.renyi import ORDERS
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.cap_authority import CapAuthorisation, SignedCap, check_authorisation
from raycloak.coordinator.ledger.entries import (
    AccountClosed,
    AccountEvent,
    AccountOpened,
    CapChanged,
    CapTransferred,
    DataKnown,
    Head,
    RunRegistered,
)
from raycloak.coordinator.ledger.known_data import Known, check_run_data
from raycloak.coordinator.ledger.rules import (
    OpeningTerms,
    check_admission,
    check_reserve,
    epsilon_at,
    is_private,
    now,
)
from raycloak.metrics.errors import BudgetError, ConfigError

_TERMS: Final = "A cap is a finite number from 0 on; a delta lies between 0 and 1."


@dataclass(frozen=True, slots=True)
class Account:
    """An account, as its entries define it.

    Attributes:
        opened: the opening event. ``opened_at`` is the position of its entry.
        terms: the opening's terms, with the cap that holds now and, once ``fixed``, the orders in use.
        changed: the entry that last set the cap.
        fixed: whether the orders in use are fixed, which the first private run does.
        unit: of all its runs; empty before the first.
    """

    opened: AccountOpened
    opened_at: int
    terms: AccountOpened
    changed: Head
    closed: bool = False
    fixed: bool = False
    unit: str = ""

    @classmethod
    def of(cls, event: AccountOpened, at: Head) -> "Account":
        """Return the account that ``event`` opens."""
        return cls(event, at.sequence, event, at)

    def after(self, event: AccountEvent, at: Head) -> "Account":
        """Return the account after one of its events, which is the entry ``at``."""
        if isinstance(event, CapTransferred):
            cap = event.source_cap if self.opened.account == event.source else event.target_cap
        else:
            cap = event.epsilon_cap
        terms = self.terms.model_copy(update={"epsilon_cap": cap})
        return replace(self, changed=at, terms=terms, closed=isinstance(event, AccountClosed))

    def with_run(self, event: RunRegistered) -> "Account":
        """Return the account after a registration: the first fixes the unit, the first private one the orders."""
        known = replace(self, unit=event.unit)
        if self.fixed or not is_private(event):
            return known
        return replace(known, fixed=True, terms=self.terms.model_copy(update={"orders": event.orders}))

    def require_unit(self, event: RunRegistered) -> None:
        """Raise BudgetError ``unit_mismatch`` if runs of the account count epsilon for something else."""
        if self.unit not in ("", event.unit):
            raise BudgetError(
                "unit_mismatch",
                f"account '{event.account}' counts epsilon for one {self.unit}, and run {event.run_id} for one "
                f"{event.unit}.",
                "Name an account of this unit: the two numbers cannot be added.",
            )

    def require_open(self) -> None:
        """Raise BudgetError ``account_closed`` if the account is closed."""
        if self.closed:
            raise BudgetError(
                "account_closed",
                f"account '{self.opened.account}' was closed by entry {self.changed.sequence}.",
                "What it spent stays spent; another account is another promise to the people in the data.",
            )


@dataclass(frozen=True, slots=True)
class Standing:
    """An account with the charges of each of its runs, their registrations, and what data it is known by."""

    account: Account
    spent: Sequence[Spend]
    registered: Sequence[RunRegistered]
    data: Sequence[DataMarks] = ()


def admitted(standing: Standing, known: Known, event: RunRegistered) -> Account:
    """Return the account after the registration of a run, if it may pay for it.

    Args:
        known: the data that each account of the ledger is known by.

    Raises:
        BudgetError: ``account_closed``, ``unit_mismatch``, or as
            `raycloak.coordinator.ledger.known_data.check_run_data` and
            `raycloak.coordinator.ledger.rules.check_admission`.
    """
    account = standing.account
    account.require_open()
    account.require_unit(event)
    check_run_data(event.run_id, event.mechanisms, event.data, account.opened, known)
    after = account.with_run(event)
    check_admission(after.terms, standing.registered, standing.spent, event)
    return after


def named(event: AccountOpened | DataKnown | AccountEvent | RunRegistered) -> tuple[str, ...]:
    """Return the accounts that an event is about."""
    return (event.source, event.target) if isinstance(event, CapTransferred) else (event.account,)


def opening(
    name: str, terms: OpeningTerms, authority: bytes = b"", data: DataMarks = NO_MARKS, also: bool = False
) -> AccountOpened:
    """Build the event that opens an account; ConfigError ``account_terms`` if a value makes no sense."""
    epsilon_cap, delta = terms.epsilon_cap, terms.delta
    if not (name.strip() and name.isprintable()):
        raise ConfigError("account_terms", f"{name!r} is not a name for an account.", "Use printable characters.")
    if not (0 <= epsilon_cap < math.inf and 0 < delta < 1):
        raise ConfigError(
            "account_terms",
            f"account '{name}' cannot have epsilon cap {epsilon_cap} and delta {delta}.",
            _TERMS,
        )
    if len(authority) not in (0, 32):
        raise ConfigError(
            "account_terms", f"the authority of account '{name}' has 32 bytes, or none.", "Make it: budget keygen."
        )
    return AccountOpened(
        recorded_at=now(),
        account=name,
        epsilon_cap=float(epsilon_cap),
        delta=float(delta),
        accountant=terms.accountant,
        orders=ORDERS,
        authority=authority,
        data=data,
        also=also,
    )


def check_same_terms(account: Account, event: AccountOpened) -> None:
    """Refuse to open an account again with other terms than it was opened with.

    Raises:
        BudgetError: ``account_mismatch``.
    """
    known = account.opened
    differing = [
        name
        for name in ("epsilon_cap", "delta", "accountant", "authority", "data", "also")
        if getattr(known, name) != getattr(event, name)
    ]
    if differing:
        raise BudgetError(
            "account_mismatch",
            f"account '{known.account}' was opened with epsilon cap {known.epsilon_cap:g}, delta {known.delta:g} and "
            f"accountant {known.accountant}, not {event.epsilon_cap:g}, {event.delta:g} and {event.accountant}; it "
            f"differs in {', '.join(differing)}.",
            "Use its own terms, or another account name.",
        )


def cap_change(
    standing: Standing, epsilon_cap: float, authorisation: SignedCap | None, ledger_key: bytes
) -> CapChanged | None:
    """Build the event that sets a new cap; None if the cap is already that, and no authorisation came with it.

    Raises:
        ConfigError: ``account_terms``.
        BudgetError: as :func:`check_cap_change`; ``authorisation_mismatch`` if one came with a lower cap.
    """
    terms = standing.account.terms
    if not 0 <= epsilon_cap < math.inf:
        raise ConfigError("account_terms", f"account '{terms.account}' cannot have epsilon cap {epsilon_cap}.", _TERMS)
    if epsilon_cap == terms.epsilon_cap and authorisation is None:
        return None
    # Nothing would check it. So who comes with one may change a cap by its signature alone.
    if epsilon_cap < terms.epsilon_cap and authorisation is not None:
        raise BudgetError(
            "authorisation_mismatch",
            f"the cap of '{terms.account}' is {terms.epsilon_cap:g}, and an authorisation raises one.",
            "Lower it without a signature.",
        )
    event = CapChanged(
        recorded_at=now(),
        account=terms.account,
        old_cap=terms.epsilon_cap,
        epsilon_cap=float(epsilon_cap),
        authorisation=authorisation,
    )
    check_cap_change(standing, event, ledger_key)
    return event


def check_cap_change(standing: Standing, event: CapChanged, ledger_key: bytes) -> None:
    """Check whether ``event`` may follow.

    Guarantee: passes only if the account is open and its spending stays within the new cap. A cap that is not lower
    needs the signature of the account's authority over exactly this change, from the entry that set the present cap.

    Raises:
        BudgetError: ``account_closed``, ``cap_mismatch``, ``cap_below_spent``, ``delta_exceeded``, or a code of
            `raycloak.coordinator.ledger.cap_authority.check_authorisation`.
    """
    account, terms = standing.account, standing.account.terms
    account.require_open()
    if event.old_cap != terms.epsilon_cap:
        raise BudgetError(
            "cap_mismatch",
            f"the cap of '{terms.account}' is {terms.epsilon_cap:g}.",
            "It was just changed: read it again, then repeat.",
        )
    if event.epsilon_cap >= event.old_cap:
        expected = CapAuthorisation(
            account=terms.account,
            ledger_key=ledger_key,
            old_cap=event.old_cap,
            new_cap=event.epsilon_cap,
            follows=account.changed.hash,
            expires_at=0,  # not compared
        )
        check_authorisation(event.authorisation, expected, account.opened.authority, event.recorded_at)
    _check_fits(standing, event.epsilon_cap)


def transfer(source: Standing, target: Standing, amount: float) -> CapTransferred:
    """Build the event that moves ``amount`` of epsilon between two caps. Their sum never grows, not even by rounding.

    Raises:
        ConfigError: ``account_terms`` if the amount is not above zero, or both are one account.
        BudgetError: as :func:`check_transfer`.
    """
    giver, taker = source.account.terms, target.account.terms
    if not 0 < amount < math.inf or giver.account == taker.account:
        raise ConfigError(
            "account_terms",
            f"an epsilon of {amount} cannot be moved from '{giver.account}' to '{taker.account}'.",
            "Move a number above 0 between two accounts.",
        )
    lower, higher = giver.epsilon_cap - amount, taker.epsilon_cap + amount
    total = Fraction(giver.epsilon_cap) + Fraction(taker.epsilon_cap)
    # Floats round. Exact fractions keep the sum of both caps from growing by a last bit.
    while Fraction(lower) + Fraction(higher) > total:
        higher = math.nextafter(higher, 0.0)
    event = CapTransferred(
        recorded_at=now(), source=giver.account, target=taker.account, source_cap=lower, target_cap=higher
    )
    check_transfer(source, target, event)
    return event


def check_transfer(source: Standing, target: Standing, event: CapTransferred) -> None:
    """Check whether ``event`` may follow.

    Guarantee: passes only if both accounts are open and about the same people under the same rules. The sum of their
    caps does not grow, and each has spent no more than its new cap. So the promise to the people in the data stays the
    same: the sum of the epsilons at the sum of the deltas, whichever order each account is held at
    (`docs/proofs/004-renyi-filter.md`, section 5).

    Raises:
        BudgetError: ``account_closed``, ``transfer_mismatch``, ``transfer_grows``, ``cap_below_spent`` or
            ``delta_exceeded``.
    """
    for each in (source, target):
        each.account.require_open()
    giver, taker = source.account.terms, target.account.terms
    differing = [name for name in ("delta", "accountant", "authority") if getattr(giver, name) != getattr(taker, name)]
    # Who is in one dataset alone was promised the cap of its account: more rows, or data without a key, may be others.
    # Each has all data that an account was opened for, is known by, or has registered private runs on.
    datasets = [
        {data.fingerprint for data in (*each.data, *(run.data for run in each.registered if is_private(run)))}
        for each in (source, target)
    ]
    if datasets[0] != datasets[1]:
        differing.append("fingerprint")
    if differing or len(datasets[0]) != 1 or b"" in datasets[0] or giver.accountant != "rdp":
        raise BudgetError(
            "transfer_mismatch",
            f"'{giver.account}' and '{taker.account}' must be bound to one dataset, with one delta, authority and the "
            f"rdp accountant; they differ in {', '.join(differing) or 'nothing, but are not'}.",
            "Epsilon of one dataset says nothing about the people in another.",
        )
    before = Fraction(giver.epsilon_cap) + Fraction(taker.epsilon_cap)
    gives = event.source_cap < giver.epsilon_cap and event.target_cap > taker.epsilon_cap
    if not gives or Fraction(event.source_cap) + Fraction(event.target_cap) > before:
        raise BudgetError("transfer_grows", "a transfer takes from one account what it gives to the other.")
    _check_fits(source, event.source_cap)
    _check_fits(target, event.target_cap)


def _check_fits(standing: Standing, epsilon_cap: float) -> None:
    """Check that an account's past fits another cap: its spending, and at that cap the slack of its runs."""
    terms = standing.account.terms.model_copy(update={"epsilon_cap": epsilon_cap})
    spent = epsilon_at(terms, standing.spent)
    if epsilon_cap < 0 or spent > epsilon_cap:
        raise BudgetError(
            "cap_below_spent",
            f"account '{terms.account}' has spent epsilon {epsilon_text(spent)}, more than {epsilon_cap:g}.",
            "What is spent cannot be taken back; the cap can be lowered to it.",
        )
    check_reserve(terms, standing.registered)
