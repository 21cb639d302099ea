"""The privacy ledger charges before anything is computed, never twice, never over the cap.

Each dataset has one account, which names its accountant when it is opened. The accountant's total of all charges must
stay within the cap. It is a Renyi filter for accounts that runs share, or privacy loss distributions for one fixed
plan.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycloak.attestation.core.data_marks import NO_MARKS, DataMarks
from raycloak.attestation.core.lineage import INITIAL, ModelOrigin
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta
from raycloak.coordinator.ledger.accounts import (
    Account,
    admitted,
    cap_change,
    check_same_terms,
    opening,
    transfer,
)
from raycloak.coordinator.ledger.audit import AuditedChain, audit
from raycloak.coordinator.ledger.book import Book, check_links, check_tables
from raycloak.coordinator.ledger.cap_authority import SignedCap
from raycloak.coordinator.ledger.entries import (
    AccountClosed,
    DataBound,
    DataKnown,
    Head,
    LedgerEntry,
    RunPrepaid,
    RunRegistered,
    StepCharged,
    VectorsBound,
    rotation,
)
from raycloak.coordinator.ledger.export import entries_of, extract_lines, write_export
from raycloak.coordinator.ledger.known_data import check_addition, check_opening
from raycloak.coordinator.ledger.lineage_rule import AskedStep, LastStep, state_before
from raycloak.coordinator.ledger.location import is_apart
from raycloak.coordinator.ledger.rules import (
    OpeningTerms,
    PricedRun,
    RegistrationTerms,
    check_cap,
    epsilon_at,
    now,
    planned,
    registration,
    require_same_sums,
    run_mismatch,
)
from raycloak.coordinator.ledger.store import LedgerStore, Rows, RunRow
from raycloak.coordinator.ledger.view import LedgerView, Outlook, StepStatus, account_view
from raycloak.coordinator.ledger.witness import Witnessed, open_witness
from raycloak.coordinator.quick_imports import quickly
from raycloak.metrics.errors import BudgetError
from raycloak.metrics.proof_bounds import require_assertions
from raycloak.workers.terms.binding import Binding
from raycloak.workers.terms.mechanism import AccountantName, Mechanism
from raycloak.workers.terms.receipt import LedgerStatement, Receipt


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a run, which its first charge records.

    Attributes:
        run: what it is registered with.
        data_root: see `raycloak.workers.terms.receipt.data_root`.
    """

    run: RegistrationTerms
    data_root: bytes


class PrivacyLedger:
    """One instance of a ledger. The store outlives it, and several instances may work on one store.

    A run belongs to the newest instance that registered or charged it. Older ones are refused with ``fenced``.
    All methods may be called from several threads.

    Args:
        url: ``sqlite:////absolute/file`` or ``postgresql://...`` without a password.
        create: whether a missing ledger may be created. With False this instance takes no fencing number and only
            reads; a charge by it is refused.
        witness: absolute folder on other storage that is told every head, or absolute file of mode 0600 with the
            http(s) URL of one. See `raycloak.coordinator.ledger.witness`.

    Raises:
        ConfigError, BudgetError: as in `raycloak.coordinator.ledger.store.LedgerStore`. ConfigError ``witness`` or
            ``assertions_off``.
            BudgetError ``chain_broken`` if this instance is to write and an entry was changed. BudgetError
            ``ledger_rolled_back`` or ``witness_unavailable``.
    """

    def __init__(self, url: str, create: bool = True, witness: str | None = None) -> None:
        require_assertions()
        self._store = LedgerStore(url, create)
        self._book = Book(self._store)
        self._witnessed: Witnessed | None = None
        self._rollback_witness = False
        self._renewed_at = 0
        self._first_entry = 1
        try:
            if witness is not None:
                with self._store.read() as rows:
                    opened = open_witness(witness, self._book.keys(rows))
                self._witnessed = Witnessed(opened, self._store.key, self.hash_at, now)
                self._witnessed.check()
                # Taken once, so that a ledger that is lost later cannot take a run's result with it.
                self._rollback_witness = is_apart(opened.place, self._store.place())
            if create:
                with self._store.read() as rows:
                    keys = self._book.keys(rows)
                    check_links(rows, keys)
                # The first entry under its key, which lasts as long as the instance.
                self._first_entry = keys.since[-1][0]
        except BaseException:
            self.close()
            raise

    @property
    def public_key(self) -> bytes:
        """The raw Ed25519 key that signs entries and receipts; the store's when this instance was opened."""
        return self._store.public_key

    @property
    def fencing(self) -> int:
        """This instance's number. Later instances of the store have higher ones, and a reading one has 0."""
        return self._store.fencing

    def status(self, run_id: str, step: int, query: Query = "gradient") -> StepStatus:
        """Return whether a step of a mechanism is charged. Never charges anything."""
        with self._store.read() as rows:
            entry = rows.about(run_id, query, step).get(StepCharged.DOMAIN)
        if entry is None:
            return StepStatus(False)
        event = entry.event
        assert isinstance(event, StepCharged)
        return StepStatus(True, event.input_digest, entry.sequence)

    def view(self) -> LedgerView:
        """Return all accounts as they are now, over a connection of its own. Never waits for a charge."""
        with self._store.read() as rows:
            data = self._book.known_data(rows).accounts
            accounts = []
            for row in rows.accounts():
                runs = rows.runs(row.name)
                account = self._book.with_runs(rows, self._book.account_of(rows, row), runs)
                leases = rows.leases(row.name)
                shown = [(self._book.run(rows, run).registered, run.charged, leases.get(run.fencing)) for run in runs]
                accounts.append(account_view(account, shown, self._book.spent(rows, runs), data.get(row.name, ())))
            witness = self._witnessed.state if self._witnessed else None
            head, told = rows.head(), self._rollback_witness
            key = rows.public_key()
        return LedgerView(key, self.fencing, head, tuple(accounts), told, witness)

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
        """Return the whole chain as :func:`audit` expects it, or one account's entries and the ledger's rotations."""
        with self._store.read() as rows:
            entries = tuple(rows.entries())
        return entries if account is None else tuple(entries_of(entries, {account}))

    def verify(self) -> AuditedChain:
        """Check the whole record, which takes about 0.3 ms per entry.

        Guarantee: returns only if :func:`raycloak.coordinator.ledger.audit.audit` accepts the chain and every table
        agrees with it. Entries cut off at the end go unnoticed: compare the head with one kept elsewhere.

        Raises:
            BudgetError: ``chain_broken``, naming the entry.
        """
        with self._store.read() as rows:
            audited = audit(rows.entries(), self._book.keys(rows).first)
            check_tables(rows, audited)
        return audited

    def export(self, path: Path) -> Head:
        """Check the whole record, write it to ``path`` and return its head; see `raycloak.coordinator.ledger.export`.

        Raises:
            BudgetError: ``chain_broken``.
            ConfigError: ``export_exists`` or ``export_file``.
        """
        with self._store.read() as rows:
            first = self._book.keys(rows).first
            check_tables(rows, audit(rows.entries(), first))
            return write_export(path, rows.entries(), first, rows.signing_key(), now())

    def extract(self, account: str) -> list[bytes]:
        """Check the whole record, and return one account's part; see `raycloak.coordinator.ledger.export`.

        Raises:
            BudgetError: ``chain_broken``, or ``account_unknown``.
        """
        with self._store.read() as rows:
            entries = tuple(rows.entries())
            check_tables(rows, audit(entries, self._book.keys(rows).first))
            self._book.known(rows, account)
            return extract_lines(entries, account, rows.signing_key(), now())

    def close(self) -> None:
        """Close all connections. Charges stay charged."""
        if self._witnessed is not None:
            self._witnessed.close()
        self._store.close()

    def rotate_key(self) -> bytes:
        """Give the ledger another key, and return its public half. All entries and charges stay.

        Every instance that is open now, this one included, is refused with ``ledger_key_rotated`` at its next write.
        So is every charge of a run that is registered by now, because its workers take receipts of the former key.

        Guarantee: the entry, which both keys sign, and the new key are stored in one transaction. After a crash the
        ledger has both or neither. No file of an SQLite ledger that every process closed has the former key.

        Raises:
            BudgetError: ``ledger_key_rotated``, ``ledger_unavailable``, ``ledger_rolled_back`` or
                ``witness_unavailable``. The key may be rotated after the last two.
        """
        with self._write() as rows:
            new = rows.make_key()
            self._book.append(rows, rotation(rows.head(), self.public_key, new, now()))
        return new.public

    def load_accountant(self, name: AccountantName = "pld") -> None:
        """Import what computes epsilon, which takes seconds. Calling it early spares a registration that wait."""
        with quickly():
            accountant_of(name).load()

    def price(self, mechanisms: tuple[Mechanism, ...], epsilon_cap: float, delta: float, name: AccountantName) -> None:
        """Compute what the registration of a run of these mechanisms will record, and remember it for a while.

        Changes nothing. Calling it early spares a registration half a second.

        Args:
            epsilon_cap, delta: of the account.
        """
        if plan := planned(mechanisms):
            accountant_of(name).quote(plan, AccountLimits(epsilon_cap, accountant_delta(delta), ORDERS))

    def open_account(
        self,
        name: str,
        terms: OpeningTerms,
        *,
        authority: bytes = b"",
        data: DataMarks = NO_MARKS,
        also: bool = False,
    ) -> None:
        """Open an account, or check that it was opened with the same terms.

        Args:
            authority: raw Ed25519 key that may let the cap be raised. Without one the cap can only be lowered.
            data: marks of the only dataset whose runs may charge; empty for any.
            also: whether it may pay for data that another account pays for.

        Raises:
            ConfigError: ``account_terms`` if a value makes no sense.
            BudgetError: ``account_mismatch`` if it was opened with other terms. ``account_known`` or
                ``fingerprint_key_unknown`` if another account is, or may be, known by this data.
        """
        event = opening(name, terms, authority, data, also)
        with self._write() as rows:
            existing = self._book.account(rows, name)
            if existing is None:
                check_opening(event, self._book.known_data(rows))
                self._book.append(rows, event)
            else:
                check_same_terms(existing, event)

    def add_data(self, account: str, data: DataMarks) -> None:
        """Let an account be known by its data under another key, or at another place, from now on.

        Raises:
            BudgetError: ``account_unknown``, or ``account_known`` if another account is known by this data.
        """
        event = DataKnown(recorded_at=now(), account=account, data=data)
        with self._write() as rows:
            known = self._book.known_data(rows)
            check_addition(event, self._book.known(rows, account).opened, known)
            if known.learns(event):
                self._book.append(rows, event)

    def change_cap(self, account: str, epsilon_cap: float, authorisation: SignedCap | None = None) -> None:
        """Lower an account's cap, or raise it as its authority has signed it.

        Raises:
            ConfigError, BudgetError: ``account_unknown``, or as in `raycloak.coordinator.ledger.accounts.cap_change`.
        """
        with self._write() as rows:
            standing = self._book.standing(rows, account)
            event = cap_change(standing, epsilon_cap, authorisation, self.public_key)
            if event is not None:
                self._book.append(rows, event)

    def transfer(self, source: str, target: str, amount: float) -> None:
        """Move unspent epsilon from one account's cap to that of another of the same dataset, in one entry.

        Raises:
            ConfigError, BudgetError: ``account_unknown``, or as in `raycloak.coordinator.ledger.accounts.transfer`.
        """
        with self._write() as rows:
            giver, taker = (self._book.standing(rows, name) for name in (source, target))
            self._book.append(rows, transfer(giver, taker, amount))

    def close_account(self, account: str) -> None:
        """Close an account: no run is registered with it and nothing is charged any more. Repeating does nothing.

        Raises:
            BudgetError: ``account_unknown``.
        """
        with self._write() as rows:
            known = self._book.known(rows, account)
            if not known.closed:
                event = AccountClosed(recorded_at=now(), account=account, epsilon_cap=known.terms.epsilon_cap)
                self._book.append(rows, event)

    def register_run(self, run: RegistrationTerms) -> None:
        """Let a run charge to an account, and make this instance the run's owner. Idempotent for the same terms.

        The account that the run opens, if it is not open yet, is opened in the same entry of the store, or not at all.

        Raises:
            BudgetError: ``account_unknown``, ``account_closed`` or ``fenced``. ``run_mismatch`` if the id belongs to a
                run of another account, mechanism, dataset or manifest. ``account_mismatch`` if another run opened the
                account with other terms. ``account_known``, ``account_private``, ``dataset_mismatch`` or
                ``fingerprint_key_unknown`` as `raycloak.coordinator.ledger.known_data.check_run_data`.
                ``unit_mismatch``. ``account_not_shared`` if another run has the account's one plan. ``delta_exceeded``
                without slack left in delta. ``cap_exceeded`` if not even one release of each mechanism is left, or
                less than a run plans that is prepaid or needs all. Also as in
                `raycloak.coordinator.ledger.rules.registration`.
            ConfigError: ``delta_too_small`` for the account's accountant; ``account_terms``.
            ProtocolError: ``malformed`` if a mechanism has a value that no entry can hold, such as a NaN.
        """
        priced = self._priced(run)
        with self._write() as rows:
            self._register(rows, run, priced)

    def bind_data(self, run_id: str, manifest_digest: bytes, data_root: bytes) -> None:
        """Bind a run to its data, before its first charge. The same again changes nothing.

        Guarantee: no receipt of the run ever names another root, from any instance of this ledger.

        Args:
            data_root: see `raycloak.workers.terms.receipt.data_root`.

        Raises:
            BudgetError: ``data_changed`` if the run is bound to another root. ``run_unknown``, ``run_mismatch``,
                ``fenced``, ``account_closed``, ``ledger_unavailable``, ``ledger_rolled_back`` or
                ``witness_unavailable``.
        """
        with self._write() as rows:
            self._bind_data(rows, run_id, manifest_digest, data_root)

    def charge(
        self,
        run_id: str,
        step: int,
        input_digest: bytes,
        manifest_digest: bytes,
        query: Query = "gradient",
        start: RunStart | None = None,
        origin: ModelOrigin = INITIAL,
        batches: tuple[bytes, ...] = (),
    ) -> Envelope:
        """Charge one step of one mechanism and return the signed :class:`raycloak.workers.terms.receipt.Receipt` for
        it.

        ``input_digest`` is of the step's whole input: see `raycloak.workers.terms.step_input`.

        Guarantee: when the receipt is returned its entry is on disk. The witness, if there is one, then holds a head
        at or behind that entry. The same first five arguments give the same entry and charge once, for any caller and
        any number of calls. For a later instance only the fencing number differs. A charge that would cross the cap is
        refused and changes nothing. A closed account gives no receipt, not even an old one.

        Guarantee: a run that is registered with its first charge, and the account that it opens, are in the ledger
        only if that charge is.

        Guarantee: a step of a run with a lineage is charged only for the model that the aggregators of the step before
        signed, that the run's orchestrator states, or that the run began with.

        Args:
            start: what the run is registered with and bound to, if it is not yet. The same again changes nothing.
            origin: evidence of where the model comes from; a charge that is there already needs none.
            batches: SHA-256 of each batch that a client sent for the step.

        Raises:
            BudgetError, ConfigError: as :meth:`register_run` and :meth:`bind_data` for a ``start``.
            BudgetError: ``run_unknown``, ``run_mismatch``, ``fenced``, ``step_not_planned``,
                ``step_already_charged`` (for other parameters), ``data_unbound``, ``account_closed``,
                ``cap_exceeded``, ``ledger_unavailable``, ``ledger_rolled_back`` or ``witness_unavailable``. The step
                may be charged after the last two: see :meth:`status`. ``lineage_missing`` or ``lineage_broken`` as
                `raycloak.coordinator.ledger.lineage_rule.state_before`.
            ProtocolError: as `raycloak.attestation.core.lineage.open_release`.
        """
        priced = self._priced(start.run) if start else None
        with self._write() as rows:
            if start is not None:
                self._register(rows, start.run, priced)
                self._bind_data(rows, run_id, manifest_digest, start.data_root)
            row, run, account = self._owned(rows, run_id, manifest_digest)
            data_root = self._book.data_root(rows, row)
            if data_root is None:
                raise BudgetError(
                    "data_unbound", f"run {run_id} is not bound to its data yet.", "Bind it before its first charge."
                )
            entry = rows.about(run_id, query, step).get(StepCharged.DOMAIN)
            if entry is None:
                asked = AskedStep(query, step, input_digest, origin, batches)
                last = self._last_step(rows, row) if run.registered.lineage else None
                state = state_before(run.registered, last, asked)
                entry = self._charge_new(rows, run, account, asked, state)
            receipt = self._receipt(entry, run.registered, input_digest, data_root)
            self._take(rows, row)
        return receipt

    def bind_vectors(
        self,
        run_id: str,
        query: Query,
        step: int,
        manifest_digest: bytes,
        vectors_digest: bytes,
        sums: tuple[bytes, ...] = (),
    ) -> Envelope:
        """Bind a charged step to its vectors, and return the signed :class:`raycloak.workers.terms.binding.Binding`.

        Guarantee: when the binding is returned its entry is on disk, and no binding of this step ever names other
        vectors, from any instance of this ledger. The same arguments give the same entry. A closed account gives
        no binding, not even an old one.

        Guarantee: vectors that mix sums of earlier steps mix those that these steps were bound with.

        Args:
            vectors_digest: see `raycloak.workers.terms.binding.vectors_digest`.
            sums: see `raycloak.workers.terms.binding.sum_digests`.

        Raises:
            BudgetError: ``not_reproducible`` if the step is bound to other vectors: the difference of the two sums
                would carry no noise; or if they mix another sum of an earlier step. ``step_not_charged``;
                ``run_unknown``, ``run_mismatch``, ``fenced``, ``account_closed``, ``ledger_unavailable``,
                ``ledger_rolled_back`` or ``witness_unavailable``.
        """
        with self._write() as rows:
            row, run, _ = self._owned(rows, run_id, manifest_digest)
            known = rows.about(run_id, query, step)
            if StepCharged.DOMAIN not in known:
                raise BudgetError("step_not_charged", f"{query} step {step} of run {run_id} is not charged.")
            entry = known.get(VectorsBound.DOMAIN)
            if entry is None:
                before = [rows.about(run_id, query, step - age) for age in range(1, len(sums))]
                bound_before = [each.get(VectorsBound.DOMAIN) for each in before]
                mechanism = run.priced[query].mechanism
                require_same_sums(mechanism, step, sums, [each.event if each else None for each in bound_before])
                event = VectorsBound(
                    recorded_at=now(),
                    run_id=run_id,
                    query=query,
                    step=step,
                    manifest_digest=manifest_digest,
                    vectors_digest=vectors_digest,
                    sums=sums,
                    fencing=self.fencing,
                )
                entry = self._book.append(rows, event)
            bound = entry.event
            assert isinstance(bound, VectorsBound)
            if (bound.vectors_digest, bound.sums) != (vectors_digest, sums):
                raise BudgetError(
                    "not_reproducible",
                    f"{query} step {step} now gives vectors {vectors_digest.hex()}, but {bound.vectors_digest.hex()} "
                    "were computed before.",
                    "Use the kind of machine and the library versions of the first time, or start a new run.",
                )
            binding = self._sealed(Binding, entry)
            self._take(rows, row)
        return binding

    def _priced(self, run: RegistrationTerms) -> tuple[Account, RunRegistered] | None:
        """Price a new run, for its account as it is, before the lock is taken.

        It takes seconds the first time, and others wait for the lock.
        """
        with self._store.read() as rows:
            if rows.run(run.run_id) is not None:
                return None
            account = self._book.standing_for(rows, run).account
        return account, registration(run, account.terms, account.fixed)

    def _register(self, rows: Rows, run: RegistrationTerms, priced: tuple[Account, RunRegistered] | None) -> None:
        """Register a run, and open the account that it is to open; or check that it is the one that is registered."""
        found = rows.run(run.run_id)
        if found is not None:
            row, _ = found
            known = self._book.run(rows, row).registered
            alike = ("account", "mechanisms", "manifest_digest", "lineage")
            same = all(getattr(known, name) == getattr(run, name) for name in alike)
            # Its data may have moved, or gained a key of its account: the fingerprint says whether it is the same.
            same = same and known.data.fingerprint == run.data.fingerprint
            if not same or isinstance(known, RunPrepaid) != run.prepaid:
                raise run_mismatch(row.run_id)
            self._check_fencing(row)
            self._check_key(row)
            self._take(rows, row)
            return
        if run.opens is not None:
            event = opening(run.account, run.opens)
            existing = self._book.account(rows, run.account)
            if existing is None:
                self._book.append(rows, event)
            else:
                # Whoever opened it may also have named its authority, and its data.
                own = {name: getattr(existing.opened, name) for name in ("authority", "data", "also")}
                check_same_terms(existing, event.model_copy(update=own))
        standing, known_data = self._book.standing(rows, run.account), self._book.known_data(rows)
        account = standing.account
        # The account may have changed since: another run may have opened it, or fixed its order.
        if priced is None or (priced[0].terms, priced[0].fixed) != (account.terms, account.fixed):
            priced = account, registration(run, account.terms, account.fixed)
        _, registered = priced
        admitted(standing, known_data, registered)
        entry = self._book.append(rows, registered)
        counts = {mechanism.query: 0 for mechanism in run.mechanisms}
        rows.add_run(RunRow(run.run_id, run.account, entry.sequence, self.fencing, counts))
        rows.renew_lease(self.fencing)

    def _bind_data(self, rows: Rows, run_id: str, manifest_digest: bytes, data_root: bytes) -> None:
        row, _, _ = self._owned(rows, run_id, manifest_digest)
        bound = self._book.data_root(rows, row)
        if bound is None:
            event = DataBound(
                recorded_at=now(),
                run_id=run_id,
                manifest_digest=manifest_digest,
                data_root=data_root,
                fencing=self.fencing,
            )
            self._book.append(rows, event)
        elif bound != data_root:
            raise BudgetError(
                "data_changed",
                f"the examples of run {run_id} are not those it began with: their root was {bound.hex()}, now "
                f"{data_root.hex()}.",
                "Put the data back, or start a new run: it draws fresh noise and is charged in full.",
            )
        self._take(rows, row)

    def _owned(self, rows: Rows, run_id: str, manifest_digest: bytes) -> tuple[RunRow, PricedRun, Account]:
        """Return a run that this instance may charge, and its account; BudgetError otherwise, with the code."""
        found = rows.run(run_id)
        if found is None:
            raise BudgetError("run_unknown", f"run {run_id} is not registered in this ledger.", "Register it first.")
        row, account_row = found
        run = self._book.run(rows, row)
        # Ownership is read in the transaction that writes, so it cannot be out of date.
        self._check_fencing(row)
        self._check_key(row)
        if manifest_digest != run.registered.manifest_digest:
            raise run_mismatch(run_id)
        account = self._book.account_of(rows, account_row)
        account.require_open()
        return row, run, account

    def _last_step(self, rows: Rows, row: RunRow) -> LastStep | None:
        """Return the newest training step that a run with a lineage was charged for; None before the first."""
        newest = row.charged.get("gradient", 0) - 1
        if newest < 0:
            return None
        about = rows.about(row.run_id, "gradient", newest)
        bound = about.get(VectorsBound.DOMAIN)
        event = about[StepCharged.DOMAIN].event
        assert isinstance(event, StepCharged)
        return LastStep(newest, event.input_digest, event.state_digest, bound.hash if bound else b"")

    def _charge_new(
        self, rows: Rows, run: PricedRun, account: Account, asked: AskedStep, state_digest: bytes
    ) -> LedgerEntry:
        """Charge a step that was not charged before; BudgetError as :meth:`charge`."""
        run_id, query, step = run.registered.run_id, asked.query, asked.step
        priced = run.priced.get(query)
        planned = priced.mechanism.steps if priced else 0
        if priced is None or not 0 <= step < planned:
            raise BudgetError(
                "step_not_planned",
                f"run {run_id} planned {planned} releases of its {query}; number {step} is not one of them.",
            )
        runs = rows.runs(run.registered.account)
        account = self._book.with_runs(rows, account, runs)
        terms, spent = account.terms, self._book.spent(rows, runs, (run_id, query))
        # A public release costs nothing, so no cap can refuse it.
        charged = check_cap(terms, spent) if priced.mechanism.private else epsilon_at(terms, spent)
        event = StepCharged(
            recorded_at=now(),
            run_id=run_id,
            query=query,
            step=step,
            input_digest=asked.input_digest,
            manifest_digest=run.registered.manifest_digest,
            mechanism_digest=priced.digest,
            fencing=self.fencing,
            charged_epsilon=charged,
            state_digest=state_digest,
        )
        rows.count_charge(run_id, query)
        # It is for people, and in whole seconds.
        if event.recorded_at != self._renewed_at:
            rows.renew_lease(self.fencing)
            self._renewed_at = event.recorded_at
        return self._book.append(rows, event)

    def _receipt(self, entry: LedgerEntry, run: RunRegistered, input_digest: bytes, data_root: bytes) -> Envelope:
        event = entry.event
        assert isinstance(event, StepCharged)
        # The same keyed noise on another gradient would be a difference without noise.
        if event.input_digest != input_digest:
            raise BudgetError(
                "step_already_charged",
                f"step {event.step} of run {event.run_id} was charged for other parameters or batches.",
                "A rerun that does not reproduce needs a new run id: fresh noise, and a full charge.",
            )
        return self._sealed(
            Receipt,
            entry,
            account=run.account,
            dataset_fingerprint=run.data.fingerprint,
            data_root=data_root,
            lineage=run.lineage,
        )

    def _sealed(self, kind: type[LedgerStatement], entry: LedgerEntry, **more: Any) -> Envelope:
        """Return this instance's signed statement about a step, which repeats what the step's entry says."""
        stated = entry.event.model_dump(exclude={"recorded_at", "fencing", "state_digest"})
        place: dict[str, Any] = {"fencing": self.fencing, "sequence": entry.sequence, "head": entry.hash}
        return seal(kind(**stated, **place, **more), self._store.key)

    @contextmanager
    def _write(self) -> Iterator[Rows]:
        """Open a transaction of the store. Once it has committed, give its head to the witness."""
        try:
            with self._store.write() as rows:
                try:
                    # An instance signs with the key that it was opened with.
                    if rows.public_key() != self.public_key:
                        raise _rotated(
                            "this instance of the ledger", "Start again: the ledger is then opened with its new key."
                        )
                    yield rows
                except BaseException:
                    # While the lock is held: entries that are undone now must be remembered by no other thread.
                    self._book.forget()
                    raise
                head = rows.head() if self._witnessed else Head()
        except BaseException:
            self._book.forget()
            raise
        # The witness is asked after the commit, so that it never holds a head that the ledger could still undo.
        if self._witnessed:
            self._witnessed.keep(head)

    def _take(self, rows: Rows, row: RunRow) -> None:
        """Make this instance the run's owner, if it is not."""
        if row.fencing != self.fencing:
            rows.own_run(row.run_id, self.fencing)
            rows.renew_lease(self.fencing)

    def _check_key(self, row: RunRow) -> None:
        """Refuse a run whose manifest names a former key: nobody would take the receipt that it is charged for."""
        if row.sequence < self._first_entry:
            raise _rotated(f"run {row.run_id}", "Start a new run; what this one was charged stays charged.")

    def _check_fencing(self, row: RunRow) -> None:
        if row.fencing > self.fencing:
            raise BudgetError(
                "fenced",
                f"ledger instance {self.fencing} was replaced by {row.fencing} for run {row.run_id}.",
                "Another process runs it: raycloak budget show tells which; end one of the two.",
            )


def _rotated(what: str, remedy: str) -> BudgetError:
    return BudgetError("ledger_key_rotated", f"{what} has a key that was rotated since.", remedy)
