"""The reading half of `raycloak.coordinator.ledger.ledger.PrivacyLedger`: accounts, runs and views.

Guarantee: terms, caps and costs come from entries whose signature was checked; the tables say only where they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import parse
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.accountants import Spend
from raycloak.coordinator.ledger.accounts import Account, Standing, admitted, named, opening
from raycloak.coordinator.ledger.audit import AuditedChain, audit
from raycloak.coordinator.ledger.entries import (
    AccountClosed,
    AccountOpened,
    CapChanged,
    CapTransferred,
    DataBound,
    Event,
    Head,
    LedgerEntry,
    RunEvent,
    RunPrepaid,
    RunRegistered,
    StepCharged,
    VectorsBound,
    broken,
    check_chain,
    make_entry,
)
from raycloak.coordinator.ledger.export import write_export
from raycloak.coordinator.ledger.extract import extract_lines
from raycloak.coordinator.ledger.known_data import Known, StatesData, learned
from raycloak.coordinator.ledger.places import is_apart
from raycloak.coordinator.ledger.rules import PricedRun, RegistrationTerms, now, registration
from raycloak.coordinator.ledger.store import AccountRow, LedgerStore, Rows, RunRow
from raycloak.coordinator.ledger.view import AccountView, LedgerView, Outlook, StepStatus, account_view
from raycloak.coordinator.ledger.witness import Witnessed, open_witness
from raycloak.metrics.errors import BudgetError


class LedgerReader:
    """The reading side of one ledger instance; arguments and errors as in
    `raycloak.coordinator.ledger.ledger.PrivacyLedger`."""

    def __init__(self, url: str, create: bool, witness: str | None) -> None:
        self._store = LedgerStore(url, create)
        self._book = Book(self._store.key)
        self._witnessed: Witnessed | None = None
        self._rollback_witness = False
        try:
            if witness is not None:
                opened = open_witness(witness, self.public_key)
                self._witnessed = Witnessed(opened, self._store.key, self.hash_at, now)
                self._witnessed.check()
                # Taken once, so that a ledger that is lost later cannot take a run's result with it.
                self._rollback_witness = is_apart(opened.place, self._store.place())
        except BaseException:
            self.close()
            raise

    @property
    def public_key(self) -> bytes:
        """The raw Ed25519 key that signs entries and receipts; the store's, so the same for every instance."""
        return self._store.key.public

    @property
    def fencing(self) -> int:
        """This instance's number. Later instances of the store have higher ones, and a reading one has 0."""
        return self._store.fencing

    def status(self, run_id: str, step: int, query: Query = "gradient") -> StepStatus:
        """Return whether a step of a mechanism is charged. Never charges anything."""
        with self._store.read() as rows:
            entry = rows.charge(run_id, query, step)
        if entry is None:
            return StepStatus(False)
        event = entry.event
        assert isinstance(event, StepCharged)
        return StepStatus(True, event.input_digest, entry.sequence)

    def view(self) -> LedgerView:
        """Return all accounts as they are now, over a connection of its own. Never waits for a charge."""
        with self._store.read() as rows:
            data = self._book.known_data(rows).accounts
            accounts = tuple(self._account_view(rows, row, data.get(row.name, ())) for row in rows.accounts())
            witness = self._witnessed.state if self._witnessed else None
            return LedgerView(self.public_key, self.fencing, rows.head(), accounts, self._rollback_witness, witness)

    def outlook(self, run: RegistrationTerms) -> Outlook:
        """Return what one more run would find on its account; writes nothing.

        Guarantee: refuses what `PrivacyLedger.register_run` would refuse now, with the same code.

        Raises:
            BudgetError, ConfigError: as `PrivacyLedger.register_run`.
        """
        with self._store.read() as rows:
            standing, known = self._book.standing_for(rows, run), self._book.known_data(rows)
        account = standing.account
        event = registration(run, account.terms, account.fixed)
        terms = admitted(standing, known, event).terms
        return Outlook(terms, event, isinstance(event, RunPrepaid), tuple(standing.spent))

    def hash_at(self, sequence: int) -> bytes | None:
        """Return the hash of the entry at ``sequence``; None if the ledger has none there."""
        with self._store.read() as rows:
            entry = rows.entry(sequence)
        return entry.hash if entry else None

    def history(self, account: str | None = None) -> tuple[LedgerEntry, ...]:
        """Return one account's entries in the order of the chain, or the whole chain, as :func:`audit` expects it."""
        with self._store.read() as rows:
            entries = tuple(rows.entries())
            if account is None:
                return entries
            runs = {row.run_id for row in rows.runs(account)}
        return tuple(entry for entry in entries if _belongs(entry.event, account, runs))

    def verify(self) -> AuditedChain:
        """Check the whole record, which takes about 0.3 ms per entry.

        Guarantee: returns only if :func:`raycloak.coordinator.ledger.audit.audit` accepts the chain and every table
        agrees with it. Entries cut off at the end go unnoticed: compare the head with one kept elsewhere.

        Raises:
            BudgetError: ``chain_broken``, naming the entry.
        """
        with self._store.read() as rows:
            audited = audit(rows.entries(), self.public_key)
            _check_tables(rows, audited)
        return audited

    def export(self, path: Path) -> Head:
        """Check the whole record, write it to ``path`` and return its head; see `raycloak.coordinator.ledger.export`.

        Raises:
            BudgetError: ``chain_broken``.
            ConfigError: ``export_exists`` or ``export_file``.
        """
        with self._store.read() as rows:
            _check_tables(rows, audit(rows.entries(), self.public_key))
            return write_export(path, rows.entries(), self._store.key, now())

    def extract(self, account: str) -> list[bytes]:
        """Check the whole record, and return one account's part; see `raycloak.coordinator.ledger.extract`.

        Raises:
            BudgetError: ``chain_broken``, or ``account_unknown``.
        """
        with self._store.read() as rows:
            entries = tuple(rows.entries())
            _check_tables(rows, audit(entries, self.public_key))
            self._book.known(rows, account)
            return extract_lines(entries, account, self._store.key, now())

    def close(self) -> None:
        """Close all connections. Charges stay charged."""
        if self._witnessed is not None:
            self._witnessed.close()
        self._store.close()

    def _account_view(self, rows: Rows, row: AccountRow, data: Sequence[DataMarks]) -> AccountView:
        runs = rows.runs(row.name)
        account = self._book.with_runs(rows, self._book.account_of(rows, row), runs)
        leases = rows.leases(runs)
        shown = [(self._book.run(rows, run).registered, run.charged, leases.get(run.fencing)) for run in runs]
        return account_view(account, shown, self._book.spent(rows, runs), data)


def _check_tables(rows: Rows, audited: AuditedChain) -> None:
    """Check that every table agrees with the chain; BudgetError ``chain_broken`` otherwise."""
    accounts = [AccountRow(name, each.opened_at, each.changed.sequence) for name, each in audited.accounts.items()]
    if rows.accounts() != accounts:
        raise broken(audited.head.sequence, "the table of accounts does not follow from the chain")
    if rows.known() != audited.learning.entries:
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


def _belongs(event: Event, account: str, runs: set[str]) -> bool:
    if isinstance(event, RunRegistered | RunEvent):
        return event.run_id in runs
    return account in named(event)


AccountEvent = AccountOpened | CapChanged | CapTransferred | AccountClosed


class Book:
    """One instance's memory of a ledger. Every method runs inside the caller's transaction."""

    def __init__(self, key: IdentityKey) -> None:
        self._key = key
        self.forget()

    def forget(self) -> None:
        """Forget everything: a transaction that was undone may have been remembered."""
        self._accounts: dict[tuple[str, int], Account] = {}
        self._runs: dict[int, PricedRun] = {}
        self._data: dict[int, bytes] = {}
        self._marks: dict[int, DataMarks] = {}

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
        found: dict[str, tuple[DataMarks, ...]] = {}
        for sequence, account in rows.known():
            found[account] = (*found.get(account, ()), self._marks_of(rows, sequence, account))
        return Known(found)

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

    def data_root(self, rows: Rows, row: RunRow) -> bytes | None:
        """Return the data root that a run is bound to; None if it is not yet."""
        if row.data is None:
            return None
        if row.data not in self._data:
            event = self._signed(rows, row.data).event
            if not isinstance(event, DataBound) or event.run_id != row.run_id:
                raise broken(row.data, f"it does not bind the data of run {row.run_id}")
            self._data[row.data] = event.data_root
        return self._data[row.data]

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
        """Append ``event`` as the newest entry, and file it under its step, its run or its accounts.

        Guarantee: an entry that cannot be read again is never appended.

        Raises:
            ProtocolError: ``malformed``.
        """
        entry = make_entry(rows.head(), event, self._key)
        # A message that was copied or unpickled is not validated. One NaN in the chain would stop every account.
        parse(type(event), entry.body)
        rows.append(
            entry, (event.run_id, event.query, event.step) if isinstance(event, StepCharged | VectorsBound) else None
        )
        if isinstance(event, DataBound):
            rows.bind_run(event.run_id, entry.sequence)
        if isinstance(event, AccountOpened):
            rows.add_account(AccountRow(event.account, entry.sequence, entry.sequence))
        elif isinstance(event, AccountEvent):
            for name in named(event):
                rows.change_account(name, entry.sequence)
        return entry

    def append_known(self, rows: Rows, event: StatesData) -> LedgerEntry:
        """Append an event that states data, and file it if its account was not known by that data."""
        is_new = learned(event, self.known_data(rows))
        entry = self.append(rows, event)
        if is_new:
            rows.add_known(entry.sequence, event.account)
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

    def _marks_of(self, rows: Rows, sequence: int, account: str) -> DataMarks:
        if sequence not in self._marks:
            event = self._signed(rows, sequence).event
            if not isinstance(event, StatesData) or event.account != account:
                raise broken(sequence, f"it states no data of account '{account}'")
            self._marks[sequence] = event.data
        return self._marks[sequence]

    def _signed(self, rows: Rows, sequence: int) -> LedgerEntry:
        entry = rows.entry(sequence)
        if entry is None:
            raise broken(sequence, "it is missing")
        check_chain([entry], self._key.public, Head(sequence - 1, entry.previous))
        return entry
