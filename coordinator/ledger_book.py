"""The accounts and runs that a charge needs: read from signed entries, parsed once.

Guarantee: terms, caps and costs come from entries whose signature was checked. The tables only say where they are.
"""

from dataclasses import replace

from attestation.keys import IdentityKey
from attestation.roster import Query
from coordinator.accountants import Spend
from coordinator.ledger_accounts import Account, Standing, named
from coordinator.ledger_entries import (
    AccountClosed,
    AccountOpened,
    CapChanged,
    CapTransferred,
    Event,
    Head,
    LedgerEntry,
    RunRegistered,
    StepCharged,
    broken,
    check_chain,
    make_entry,
)
from coordinator.ledger_rules import PricedRun
from coordinator.ledger_store import AccountRow, Rows, RunRow
from metrics.errors import BudgetError

AccountEvent = AccountOpened | CapChanged | CapTransferred | AccountClosed


class Book:
    """One instance's memory of a ledger. Every method runs inside the caller's transaction."""

    def __init__(self, key: IdentityKey) -> None:
        self._key = key
        self._accounts: dict[tuple[str, int], Account] = {}
        self._runs: dict[int, PricedRun] = {}

    def account(self, rows: Rows, name: str) -> Account | None:
        """Return an account as it is now; None if it was never opened."""
        row = rows.account(name)
        return self.account_of(rows, row) if row else None

    def known(self, rows: Rows, name: str) -> Account:
        """Return an account like :meth:`account`; BudgetError ``account_unknown`` if there is none."""
        account = self.account(rows, name)
        if account is None:
            raise BudgetError(
                "account_unknown", f"there is no account '{name}'.", f"Open it: raycloak budget open {name}"
            )
        return account

    def account_of(self, rows: Rows, row: AccountRow) -> Account:
        """Return the account of a row, from the entry that opened it and the one that changed it last."""
        # Keyed by the last change, so that an account is read again once it has changed.
        key = row.name, row.changed
        if key not in self._accounts:
            if row.changed == row.sequence:
                self._accounts[key] = self._opened(rows, row)
            else:
                opened = self.account_of(rows, replace(row, changed=row.sequence))
                self._accounts[key] = self._changed(rows, row, opened)
        return self._accounts[key]

    def run(self, rows: Rows, row: RunRow) -> PricedRun:
        """Return a run's registration."""
        if row.sequence not in self._runs:
            event = self._signed(rows, row.sequence).event
            if not isinstance(event, RunRegistered) or event.run_id != row.run_id:
                raise broken(row.sequence, f"it does not register run {row.run_id}")
            self._runs[row.sequence] = PricedRun.of(event)
        return self._runs[row.sequence]

    def spent(self, rows: Rows, runs: list[RunRow], and_one: tuple[str, Query] | None = None) -> list[Spend]:
        """Return the charges of each run, with one more of ``and_one``, a run's query."""
        spent = []
        for row in runs:
            run = self.run(rows, row)
            if row.charged.keys() != run.priced.keys():
                raise broken(row.sequence, f"the table of charges does not have the mechanisms of run {row.run_id}")
            charged = {query: count + ((row.run_id, query) == and_one) for query, count in row.charged.items()}
            spent.append(run.spend(charged))
        return spent

    def standing(self, rows: Rows, name: str) -> Standing:
        """Return an account with its runs and their charges; BudgetError ``account_unknown``."""
        account, runs = self.known(rows, name), rows.runs(name)
        registered = [self.run(rows, row).registered for row in runs]
        return Standing(account, self.spent(rows, runs), registered)

    def append(self, rows: Rows, event: Event) -> LedgerEntry:
        """Append ``event`` as the newest entry, and file it under its charge or its accounts."""
        entry = make_entry(rows.head(), event, self._key)
        rows.append(entry, (event.run_id, event.query, event.step) if isinstance(event, StepCharged) else None)
        if isinstance(event, AccountOpened):
            rows.add_account(AccountRow(event.account, entry.sequence, entry.sequence))
        elif isinstance(event, AccountEvent):
            for name in named(event):
                rows.change_account(name, entry.sequence)
        return entry

    def _opened(self, rows: Rows, row: AccountRow) -> Account:
        opened = self._signed(rows, row.sequence)
        event = opened.event
        if not isinstance(event, AccountOpened) or event.account != row.name:
            raise broken(row.sequence, f"it does not open account '{row.name}'")
        return Account.of(event, Head(opened.sequence, opened.hash))

    def _changed(self, rows: Rows, row: AccountRow, account: Account) -> Account:
        """Return the account after its last change. Each change states everything that may change."""
        last = self._signed(rows, row.changed)
        event = last.event
        if not isinstance(event, CapChanged | CapTransferred | AccountClosed) or row.name not in named(event):
            raise broken(row.changed, f"it does not change account '{row.name}'")
        return account.after(event, Head(last.sequence, last.hash))

    def _signed(self, rows: Rows, sequence: int) -> LedgerEntry:
        entry = rows.entry(sequence)
        if entry is None:
            raise broken(sequence, "it is missing")
        check_chain([entry], self._key.public, Head(sequence - 1, entry.previous))
        return entry
