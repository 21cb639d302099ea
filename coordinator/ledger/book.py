"""The reading of one instance of a ledger: the tables say where something is, the signed entries say what it is.

Also the two checks that the tables agree with the chain. The newest entry's signature covers its hash and so, link by
link, every entry before it, whichever key signed that. Checking the links is cheap enough for every start of a run. The
full check, `raycloak.coordinator.ledger.audit.audit`, takes twenty times as long.

Guarantee: terms, caps and costs come from entries whose signature was checked; the tables say only where they are.
"""

import json
from collections import Counter

from raycloak.attestation.core.messages import parse
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.accountants import Spend
from raycloak.coordinator.ledger.accounts import Account, Standing, named, opening
from raycloak.coordinator.ledger.audit import AuditedChain
from raycloak.coordinator.ledger.entries import (
    AccountEvent,
    AccountOpened,
    DataBound,
    DataKnown,
    Event,
    Head,
    LedgerEntry,
    LedgerKeys,
    RunPrepaid,
    RunRegistered,
    StepCharged,
    VectorsBound,
    broken,
    check_entry,
    check_link,
    make_entry,
)
from raycloak.coordinator.ledger.known_data import Known, StatesData
from raycloak.coordinator.ledger.rules import PricedRun, RegistrationTerms
from raycloak.coordinator.ledger.store import AccountRow, LedgerStore, Rows, RunRow
from raycloak.metrics.errors import BudgetError

_STATING_DATA = {kind.DOMAIN for kind in (AccountOpened, DataKnown, RunRegistered, RunPrepaid)}


class Book:
    """One instance's memory of a ledger. Every method runs inside the caller's transaction.

    Args:
        store: has the key that entries are signed with.
    """

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self.forget()

    def forget(self) -> None:
        """Forget everything: a transaction that was undone may have been remembered."""
        self._read: dict[int, tuple[Head, Event]] = {}
        self._runs: dict[int, PricedRun] = {}
        self._keys: LedgerKeys | None = None

    def keys(self, rows: Rows) -> LedgerKeys:
        """Return the ledger's keys, read again once another instance has rotated the one that signs."""
        current = rows.public_key()
        if self._keys is None or self._keys.current != current:
            self._keys = LedgerKeys.of(rows.rotations(), current)
        return self._keys

    def account(self, rows: Rows, name: str) -> Account | None:
        """Return an account as it is now, but without its runs; None if it was never opened."""
        row = rows.account(name)
        return self.account_of(rows, row) if row else None

    def with_runs(self, rows: Rows, account: Account, runs: list[RunRow]) -> Account:
        """Return an account with the orders in use, which its first private run has fixed."""
        # Not remembered: the registration that fixes them may be undone with its transaction.
        for row in runs:
            account = account.with_run(self.run(rows, row).registered)
        return account

    def known(self, rows: Rows, name: str) -> Account:
        """Return an account like :meth:`account`; BudgetError ``account_unknown`` if there is none."""
        account = self.account(rows, name)
        if account is None:
            raise BudgetError(
                "account_unknown",
                f"there is no account '{name}'.",
                f"Open it: raycloak budget open {name} --epsilon-cap E",
            )
        return account

    def known_data(self, rows: Rows) -> Known:
        """Return the data that each account is known by, in the order of the chain."""
        found = Known()
        for sequence, account in rows.known():
            _, event = self._signed(rows, sequence)
            if not isinstance(event, StatesData) or event.account != account:
                raise broken(sequence, f"it states no data of account '{account}'")
            found.put(account, event.data)
        return found

    def account_of(self, rows: Rows, row: AccountRow) -> Account:
        """Return the account of a row, from the entry that opened it and the one that changed it last."""
        at, event = self._signed(rows, row.sequence)
        if not isinstance(event, AccountOpened) or event.account != row.name:
            raise broken(row.sequence, f"it does not open account '{row.name}'")
        account = Account.of(event, at)
        if row.changed == row.sequence:
            return account
        # Each change states everything that may change.
        at, event = self._signed(rows, row.changed)
        if not isinstance(event, AccountEvent) or row.name not in named(event):
            raise broken(row.changed, f"it does not change account '{row.name}'")
        return account.after(event, at)

    def run(self, rows: Rows, row: RunRow) -> PricedRun:
        """Return a run's registration."""
        if (run := self._runs.get(row.sequence)) is None:
            _, event = self._signed(rows, row.sequence)
            if not isinstance(event, RunRegistered) or event.run_id != row.run_id:
                raise broken(row.sequence, f"it does not register run {row.run_id}")
            run = self._runs[row.sequence] = PricedRun.of(event)
        return run

    def data_root(self, rows: Rows, row: RunRow) -> bytes | None:
        """Return the data root that a run is bound to; None if it is not yet."""
        if row.data is None:
            return None
        _, event = self._signed(rows, row.data)
        if not isinstance(event, DataBound) or event.run_id != row.run_id:
            raise broken(row.data, f"it does not bind the data of run {row.run_id}")
        return event.data_root

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
        runs = rows.runs(name)
        account = self.with_runs(rows, self.known(rows, name), runs)
        registered = [self.run(rows, row).registered for row in runs]
        return Standing(account, self.spent(rows, runs), registered, self.known_data(rows).accounts.get(name, ()))

    def standing_for(self, rows: Rows, run: RegistrationTerms) -> Standing:
        """Return the account of a run as :meth:`standing`, or as the run is to open it.

        Raises:
            BudgetError: ``account_unknown``, if the run opens none.
            ConfigError: ``account_terms``.
        """
        if run.opens is not None and rows.account(run.account) is None:
            event = opening(run.account, run.opens)
            return Standing(Account.of(event, rows.head()), (), ())
        return self.standing(rows, run.account)

    def append(self, rows: Rows, event: Event) -> LedgerEntry:
        """Append ``event`` as the newest entry, and file it under its step, run or accounts, and what it says of data.

        Guarantee: an entry that cannot be read again is never appended.

        Raises:
            ProtocolError: ``malformed``.
        """
        entry = make_entry(rows.head(), event, self._store.key)
        # A message that was copied or unpickled is not validated. One NaN in the chain would stop every account.
        parse(type(event), entry.body)
        key = (event.run_id, event.query, event.step) if isinstance(event, StepCharged | VectorsBound) else None
        rows.append(entry, key)
        if isinstance(event, DataBound):
            rows.bind_run(event.run_id, entry.sequence)
        if isinstance(event, AccountOpened):
            rows.add_account(AccountRow(event.account, entry.sequence, entry.sequence))
        elif isinstance(event, AccountEvent):
            for name in named(event):
                rows.change_account(name, entry.sequence)
        if isinstance(event, StatesData) and self.known_data(rows).learns(event):
            rows.add_known(entry.sequence, event.account)
        return entry

    def _signed(self, rows: Rows, sequence: int) -> tuple[Head, Event]:
        """Return an entry's place and event, after its signature was checked once."""
        if (found := self._read.get(sequence)) is None:
            entry = rows.entry(sequence)
            if entry is None:
                raise broken(sequence, "it is missing")
            check_entry(entry, self.keys(rows).at(sequence), Head(sequence - 1, entry.previous))
            found = self._read[sequence] = Head(sequence, entry.hash), entry.event
        return found


def check_links(rows: Rows, keys: LedgerKeys) -> None:
    """Refuse a ledger with a changed, dropped or moved entry, or with tables that count other charges.

    Guarantee: returns only if ``keys`` signed the content of each entry, in this order. The tables then count the
    same charges as the chain, and name the same data of runs and accounts. Takes 50 us per entry on two busy cores. A
    ledger whose end was cut off, or that was put back as a whole, passes: only a head kept elsewhere shows that.

    Raises:
        BudgetError: ``chain_broken``, naming the entry.
    """
    head, newest = Head(), None
    charges: Counter[tuple[str, str]] = Counter()
    bound: dict[str, int] = {}
    known = Known()
    for entry in rows.entries():
        head = check_link(entry, head)
        newest = entry
        # Its hash has just shown that a body is the signed one, so it need not be validated.
        if entry.kind == StepCharged.DOMAIN:
            body = json.loads(entry.body)
            charges[body["run_id"], body["query"]] += 1
        elif entry.kind == DataBound.DOMAIN:
            bound[json.loads(entry.body)["run_id"]] = entry.sequence
        elif entry.kind in _STATING_DATA:
            event = entry.event
            assert isinstance(event, StatesData), "its kind says so"
            known.follow(entry.sequence, event)
    # The newest signature covers every entry before it, link by link.
    if newest is not None:
        check_entry(newest, keys.at(newest.sequence), Head(newest.sequence - 1, newest.previous))
    if rows.known() != known.entries:
        raise broken(head.sequence, "the table of known data disagrees with the chain")
    for row in rows.runs():
        if bound.pop(row.run_id, None) != row.data:
            raise broken(row.sequence, f"the table of runs disagrees with the chain about the data of run {row.run_id}")
        for query, count in row.charged.items():
            if charges.pop((row.run_id, query), 0) != count:
                raise broken(row.sequence, f"the table of charges disagrees with the chain about run {row.run_id}")
    if bound:
        raise broken(head.sequence, f"the table of runs lacks run {next(iter(bound))}")
    if charges:
        lacking = " of run ".join(reversed(next(iter(charges))))
        raise broken(head.sequence, f"the table of charges lacks the {lacking}")


def check_tables(rows: Rows, audited: AuditedChain) -> None:
    """Check that every table agrees with the chain; BudgetError ``chain_broken`` otherwise."""
    accounts = [AccountRow(name, each.opened_at, each.changed.sequence) for name, each in audited.accounts.items()]
    if rows.accounts() != accounts:
        raise broken(audited.head.sequence, "the table of accounts does not follow from the chain")
    if rows.known() != audited.known.entries:
        raise broken(audited.head.sequence, "the table of known data does not follow from the chain")
    found = {row.run_id: row for row in rows.runs()}
    for run_id, run in audited.runs.items():
        row = found.pop(run_id, None)
        counts = {query: len(charges) for query, charges in run.charges.items()}
        expected = (run.registered.account, run.sequence, counts, run.data)
        # An instance that owns a run, and has not charged it yet, has a higher number than the last charge.
        in_table = row and (row.account, row.sequence, dict(row.charged), row.data)
        if row is None or in_table != expected or row.fencing < run.fencing:
            raise broken(run.sequence, f"the row of run {run_id} does not follow from the chain")
    about = {sequence: (run_id, *key) for run_id, run in audited.runs.items() for sequence, key in run.filed()}
    for sequence, *filed in rows.filed_keys():
        if about.get(sequence, (None, None, None)) != tuple(filed):
            raise broken(sequence, "it is filed under another run, query or step")
    if found:
        raise broken(audited.head.sequence, "the table of runs holds a run that the chain does not")
