"""The privacy ledger: charges before anything is computed, never twice, never over the cap.

One account per dataset; many runs may spend from it, each step under a Renyi filter: the sum over the mechanisms of
all runs of (steps charged) x (RDP of one step), at the orders the account was opened with, must keep epsilon within
the cap.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attestation.messages import Envelope, seal
from attestation.roster import Query
from coordinator.accounting import ACCOUNTANT, ORDERS, step_rdp
from coordinator.ledger_audit import Replay, audit, check_tables
from coordinator.ledger_entries import (
    AccountOpened,
    Event,
    Head,
    LedgerEntry,
    RunRegistered,
    StepCharged,
    broken,
    check_chain,
    make_entry,
)
from coordinator.ledger_export import write_export
from coordinator.ledger_rules import PricedRun, check_cap, check_slack, epsilon_at, now, registration, run_mismatch
from coordinator.ledger_store import AccountRow, LedgerStore, Rows, RunRow
from coordinator.ledger_view import AccountView, LedgerView, StepStatus, account_view
from metrics.errors import BudgetError, ConfigError
from workers.mechanism import Mechanism
from workers.receipt import Receipt


class PrivacyLedger:
    """One instance of a ledger; the store outlives it, and several instances may work on one store.

    A run belongs to the newest instance that registered or charged it; older ones are refused with ``fenced``.
    All methods may be called from several threads.

    Args:
        url: ``sqlite:////absolute/file`` or ``postgresql://...``.
        create: whether a ledger may be created where there is none. With False this instance takes no fencing
            number and only reads; a charge by it is refused.

    Raises:
        ConfigError, BudgetError: see `coordinator.ledger_store.LedgerStore`.
    """

    def __init__(self, url: str, create: bool = True) -> None:
        self._store = LedgerStore(url, create)
        self._accounts: dict[str, AccountOpened] = {}
        self._runs: dict[int, PricedRun] = {}

    @property
    def public_key(self) -> bytes:
        """Raw Ed25519 key that signs entries and receipts; the store's, so the same for every instance."""
        return self._store.key.public

    @property
    def fencing(self) -> int:
        """This instance's number; later instances of the store have higher ones, and one that only reads has 0."""
        return self._store.fencing

    def load_accountant(self) -> None:
        """Import what computes RDP, which takes seconds; optional, so that the first registration need not wait."""
        step_rdp(0.5, 1.0)

    def open_account(self, name: str, epsilon_cap: float, delta: float) -> None:
        """Open an account, or find it open with the same terms.

        Raises:
            ConfigError: ``account_terms`` if a value makes no sense.
            BudgetError: ``account_mismatch`` if it is open with other terms.
        """
        if not (name and 0 <= epsilon_cap < float("inf") and 0 < delta < 1):
            raise ConfigError(
                "account_terms", f"account '{name}' cannot have epsilon cap {epsilon_cap} and delta {delta}."
            )
        with self._store.write() as rows:
            existing = self._account(rows, name)
            if existing is None:
                event = AccountOpened(
                    recorded_at=now(),
                    account=name,
                    epsilon_cap=float(epsilon_cap),
                    delta=float(delta),
                    accountant=ACCOUNTANT,
                    orders=ORDERS,
                )
                rows.add_account(AccountRow(name, self._append(rows, event).sequence))
            elif (existing.epsilon_cap, existing.delta) != (epsilon_cap, delta):
                raise BudgetError(
                    "account_mismatch",
                    f"account '{name}' is open with epsilon cap {existing.epsilon_cap:g} and delta "
                    f"{existing.delta:g}, not {epsilon_cap:g} and {delta:g}.",
                    "Use its own terms, or another account name.",
                )

    def register_run(
        self, run_id: str, account: str, mechanisms: tuple[Mechanism, ...], manifest_digest: bytes
    ) -> None:
        """Let a run charge to an account, and make this instance the run's own. Idempotent for the same arguments.

        Args:
            mechanisms: all that the run may release, each with a query of its own and paid for release by release.

        Raises:
            BudgetError: ``account_unknown``, ``run_mismatch`` (the id belongs to a run of another account,
                mechanism or manifest), ``mechanism_inconsistent``, ``delta_exceeded`` (no slack left in delta),
                ``cap_exceeded`` (not even one release of each mechanism is left) or ``fenced``.
        """
        with self._store.read() as rows:
            terms = self._known_account(rows, account)
        event = registration(run_id, terms, mechanisms, manifest_digest)
        with self._store.write() as rows:
            row = rows.run(run_id)
            if row is not None:
                self._check_same_run(rows, row, event)
                self._check_fencing(row)
                rows.own_run(run_id, self.fencing)
                return
            runs = rows.runs(account)
            check_slack(terms, [self._run(rows, other).registered for other in runs], event)
            if any(mechanism.private for mechanism in mechanisms):
                check_cap(terms, self._spent(rows, terms, runs) + np.sum(event.step_rdp, axis=0))
            counts = {mechanism.query: 0 for mechanism in mechanisms}
            rows.add_run(RunRow(run_id, account, self._append(rows, event).sequence, self.fencing, counts))

    def charge(
        self, run_id: str, step: int, parameter_digest: bytes, manifest_digest: bytes, query: Query = "gradient"
    ) -> Envelope:
        """Charge one step of one mechanism and return the signed :class:`workers.receipt.Receipt` for it.

        Guarantee: when the receipt is returned its entry is on disk. The same five arguments give the same entry
        and charge once, whoever asks and however often; for a later instance only the fencing number differs. A
        charge that would cross the cap is refused and changes nothing.

        Raises:
            BudgetError: ``run_unknown``, ``run_mismatch``, ``fenced``, ``step_not_planned``,
                ``step_already_charged`` (for other parameters), ``cap_exceeded`` or ``ledger_unavailable``.
        """
        with self._store.write() as rows:
            row = rows.run(run_id)
            if row is None:
                raise BudgetError("run_unknown", f"run {run_id} is not registered in this ledger.")
            run = self._run(rows, row)
            self._check_fencing(row)
            if manifest_digest != run.registered.manifest_digest:
                raise run_mismatch(run_id)
            entry = rows.charge(run_id, query, step)
            if entry is None:
                entry = self._charge_new(rows, row, run, query, step, parameter_digest)
            receipt = self._receipt(entry, row.account, parameter_digest)
            if row.fencing != self.fencing:
                rows.own_run(run_id, self.fencing)
        return receipt

    def status(self, run_id: str, step: int, query: Query = "gradient") -> StepStatus:
        """Whether a step of a mechanism is charged; never charges anything."""
        with self._store.read() as rows:
            entry = rows.charge(run_id, query, step)
        if entry is None:
            return StepStatus(False)
        event = entry.event
        assert isinstance(event, StepCharged)
        return StepStatus(True, event.parameter_digest, entry.sequence)

    def view(self) -> LedgerView:
        """All accounts as they are now, by a connection of its own; never waits for a charge."""
        with self._store.read() as rows:
            accounts = tuple(self._account_view(rows, row) for row in rows.accounts())
            return LedgerView(self.public_key, self.fencing, rows.head(), accounts)

    def hash_at(self, sequence: int) -> bytes | None:
        """The hash of the entry at ``sequence``; None if the ledger has none there."""
        with self._store.read() as rows:
            entry = rows.entry(sequence)
        return entry.hash if entry else None

    def history(self, account: str | None = None) -> tuple[LedgerEntry, ...]:
        """The entries of one account in the order of the chain, or the whole chain, as :func:`audit` wants it."""
        with self._store.read() as rows:
            entries = tuple(rows.entries())
            if account is None:
                return entries
            runs = {row.run_id for row in rows.runs(account)}
        return tuple(entry for entry in entries if _belongs(entry.event, account, runs))

    def verify(self) -> Replay:
        """Check the whole record; takes about 0.3 ms per entry.

        Guarantee: returns only if :func:`coordinator.ledger_audit.audit` accepts the chain and every table says
        what the chain says. Entries cut off at the end are not noticed: compare the head with one kept elsewhere.

        Raises:
            BudgetError: ``chain_broken``, naming the entry.
        """
        with self._store.read() as rows:
            replay = audit(rows.entries(), self.public_key)
            check_tables(rows, replay)
        return replay

    def export(self, path: Path) -> Head:
        """Check the whole record and write it to ``path``; see `coordinator.ledger_export`. Returns its head.

        Raises:
            BudgetError: ``chain_broken``.
            ConfigError: ``export_exists`` or ``export_file``.
        """
        with self._store.read() as rows:
            check_tables(rows, audit(rows.entries(), self.public_key))
            return write_export(path, rows.entries(), self._store.key, now())

    def close(self) -> None:
        """Close all connections. What was charged stays charged."""
        self._store.close()

    def _charge_new(
        self, rows: Rows, row: RunRow, run: PricedRun, query: Query, step: int, parameter_digest: bytes
    ) -> LedgerEntry:
        priced = run.priced.get(query)
        planned = priced.mechanism.steps if priced else 0
        if priced is None or not 0 <= step < planned:
            raise BudgetError(
                "step_not_planned",
                f"run {row.run_id} planned {planned} releases of its {query}; number {step} is none of them.",
            )
        terms = self._known_account(rows, row.account)
        spent = self._spent(rows, terms, rows.runs(row.account))
        if priced.mechanism.private:
            spent = spent + priced.step_rdp
            check_cap(terms, spent)
        event = StepCharged(
            recorded_at=now(),
            run_id=row.run_id,
            query=query,
            step=step,
            parameter_digest=parameter_digest,
            manifest_digest=run.registered.manifest_digest,
            mechanism_digest=priced.digest,
            fencing=self.fencing,
            charged_epsilon=epsilon_at(terms, spent),
        )
        rows.count_charge(row.run_id, query)
        return self._append(rows, event)

    def _receipt(self, entry: LedgerEntry, account: str, parameter_digest: bytes) -> Envelope:
        event = entry.event
        assert isinstance(event, StepCharged)
        if event.parameter_digest != parameter_digest:
            raise BudgetError(
                "step_already_charged",
                f"step {event.step} of run {event.run_id} was charged for other parameters.",
                "A rerun that does not reproduce needs a new run id: fresh noise, and a full charge.",
            )
        receipt = Receipt(
            run_id=event.run_id,
            query=event.query,
            step=event.step,
            parameter_digest=event.parameter_digest,
            manifest_digest=event.manifest_digest,
            account=account,
            mechanism_digest=event.mechanism_digest,
            fencing=self.fencing,
            sequence=entry.sequence,
            head=entry.hash,
            charged_epsilon=event.charged_epsilon,
        )
        return seal(receipt, self._store.key)

    def _append(self, rows: Rows, event: Event) -> LedgerEntry:
        entry = make_entry(rows.head(), event, self._store.key)
        key = (event.run_id, event.query, event.step) if isinstance(event, StepCharged) else None
        rows.append(entry, key)
        return entry

    def _account(self, rows: Rows, name: str) -> AccountOpened | None:
        if name in self._accounts:
            return self._accounts[name]
        row = rows.account(name)
        return self._opened(rows, row) if row else None

    def _known_account(self, rows: Rows, name: str) -> AccountOpened:
        account = self._account(rows, name)
        if account is None:
            raise BudgetError(
                "account_unknown", f"there is no account '{name}'.", f"Open it: raycloak budget open {name}"
            )
        return account

    def _opened(self, rows: Rows, row: AccountRow) -> AccountOpened:
        if row.name not in self._accounts:
            event = self._signed_event(rows, row.sequence)
            assert isinstance(event, AccountOpened)
            self._accounts[row.name] = event
        return self._accounts[row.name]

    def _run(self, rows: Rows, row: RunRow) -> PricedRun:
        if row.sequence not in self._runs:
            event = self._signed_event(rows, row.sequence)
            assert isinstance(event, RunRegistered)
            self._runs[row.sequence] = PricedRun.of(event)
        return self._runs[row.sequence]

    def _signed_event(self, rows: Rows, sequence: int) -> Event:
        """The event at a position, after a check of its signature: terms and costs are never read unsigned."""
        entry = rows.entry(sequence)
        if entry is None:
            raise broken(sequence, "it is missing")
        check_chain([entry], self.public_key, Head(sequence - 1, entry.previous))
        return entry.event

    def _spent(self, rows: Rows, terms: AccountOpened, runs: list[RunRow]) -> NDArray[np.float64]:
        spent = np.zeros(len(terms.orders))
        for row in runs:
            priced = self._run(rows, row).priced
            if row.charged.keys() != priced.keys():
                raise broken(row.sequence, f"the table of charges does not have the mechanisms of run {row.run_id}")
            for query, each in priced.items():
                spent += row.charged[query] * each.step_rdp
        return spent

    def _account_view(self, rows: Rows, row: AccountRow) -> AccountView:
        terms, runs = self._opened(rows, row), rows.runs(row.name)
        registered = [(self._run(rows, run).registered, run.charged) for run in runs]
        return account_view(terms, registered, self._spent(rows, terms, runs))

    def _check_same_run(self, rows: Rows, row: RunRow, event: RunRegistered) -> None:
        known = self._run(rows, row).registered
        same = (known.account, known.mechanisms, known.manifest_digest)
        if same != (event.account, event.mechanisms, event.manifest_digest):
            raise run_mismatch(row.run_id)

    def _check_fencing(self, row: RunRow) -> None:
        if row.fencing > self.fencing:
            raise BudgetError(
                "fenced", f"ledger instance {self.fencing} was replaced by {row.fencing} for run {row.run_id}."
            )


def _belongs(event: Event, account: str, runs: set[str]) -> bool:
    return event.run_id in runs if isinstance(event, StepCharged) else event.account == account
