"""The reading half of `coordinator.ledger.PrivacyLedger`: answers questions and writes nothing."""

from pathlib import Path

from attestation.roster import Query
from coordinator.ledger_accounts import named
from coordinator.ledger_audit import Replay, audit, check_tables
from coordinator.ledger_book import Book
from coordinator.ledger_entries import Event, Head, LedgerEntry, RunRegistered, StepCharged
from coordinator.ledger_export import write_export
from coordinator.ledger_rules import now
from coordinator.ledger_store import AccountRow, LedgerStore, Rows
from coordinator.ledger_view import AccountView, LedgerView, StepStatus, account_view
from coordinator.ledger_witness import Witnessed, is_apart, open_witness


class LedgerReader:
    """The reading side of one ledger instance; arguments and errors as in `coordinator.ledger.PrivacyLedger`."""

    def __init__(self, url: str, create: bool, witness: str | None) -> None:
        self._store = LedgerStore(url, create)
        self._book = Book(self._store.key)
        self._witnessed: Witnessed | None = None
        self._rollback_witness = False
        try:
            if witness is not None:
                self._witnessed = Witnessed(open_witness(witness, self.public_key), self._store.key, self.hash_at, now)
                self._witnessed.check()
                # Taken once, so that a ledger that is lost later cannot take a run's result with it.
                self._rollback_witness = is_apart(witness, self._store.file)
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
        return StepStatus(True, event.parameter_digest, entry.sequence)

    def view(self) -> LedgerView:
        """Return all accounts as they are now, over a connection of its own. Never waits for a charge."""
        with self._store.read() as rows:
            accounts = tuple(self._account_view(rows, row) for row in rows.accounts())
            return LedgerView(self.public_key, self.fencing, rows.head(), accounts, self._rollback_witness)

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

    def verify(self) -> Replay:
        """Check the whole record, which takes about 0.3 ms per entry.

        Guarantee: returns only if :func:`coordinator.ledger_audit.audit` accepts the chain and every table agrees with
        it. Entries cut off at the end go unnoticed: compare the head with one kept elsewhere.

        Raises:
            BudgetError: ``chain_broken``, naming the entry.
        """
        with self._store.read() as rows:
            replay = audit(rows.entries(), self.public_key)
            check_tables(rows, replay)
        return replay

    def export(self, path: Path) -> Head:
        """Check the whole record, write it to ``path`` and return its head; see `coordinator.ledger_export`.

        Raises:
            BudgetError: ``chain_broken``.
            ConfigError: ``export_exists`` or ``export_file``.
        """
        with self._store.read() as rows:
            check_tables(rows, audit(rows.entries(), self.public_key))
            return write_export(path, rows.entries(), self._store.key, now())

    def close(self) -> None:
        """Close all connections. Charges stay charged."""
        if self._witnessed is not None:
            self._witnessed.close()
        self._store.close()

    def _account_view(self, rows: Rows, row: AccountRow) -> AccountView:
        account, runs = self._book.account_of(rows, row), rows.runs(row.name)
        leases = rows.leases(runs)
        shown = [(self._book.run(rows, run).registered, run.charged, leases.get(run.fencing)) for run in runs]
        return account_view(account, shown, self._book.spent(rows, runs))


def _belongs(event: Event, account: str, runs: set[str]) -> bool:
    if isinstance(event, StepCharged | RunRegistered):
        return event.run_id in runs
    return account in named(event)
