"""The privacy ledger charges before anything is computed, never twice, never over the cap.

Each dataset has one account, which names its accountant when it is opened. The accountant's total of all charges must
stay within the cap. It is a Renyi filter for accounts that runs share, or privacy loss distributions for one fixed
plan.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from raycloak.attestation.core.data_marks import NO_MARKS, DataMarks
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta
from raycloak.coordinator.ledger.accounts import (
    Account,
    admitted,
    cap_change,
    check_same_terms,
    closing,
    opening,
    transfer,
)
from raycloak.coordinator.ledger.cap_authority import SignedCap
from raycloak.coordinator.ledger.entries import (
    AccountOpened,
    DataBound,
    DataKnown,
    Head,
    LedgerEntry,
    RunPrepaid,
    RunRegistered,
    StepCharged,
    VectorsBound,
)
from raycloak.coordinator.ledger.heads import check_links
from raycloak.coordinator.ledger.known_data import check_addition, check_opening, learned
from raycloak.coordinator.ledger.reader import LedgerReader
from raycloak.coordinator.ledger.rules import (
    OpeningTerms,
    PricedRun,
    RegistrationTerms,
    check_cap,
    epsilon_at,
    now,
    planned,
    registration,
    run_mismatch,
)
from raycloak.coordinator.ledger.store import Rows, RunRow
from raycloak.coordinator.quick_imports import quickly
from raycloak.metrics.errors import BudgetError
from raycloak.metrics.proof_bounds import require_assertions
from raycloak.workers.terms.binding import Binding
from raycloak.workers.terms.mechanism import AccountantName, Mechanism
from raycloak.workers.terms.receipt import Receipt


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a run, which its first charge records.

    Attributes:
        run: what it is registered with.
        data_root: see `raycloak.workers.terms.receipt.data_root`.
    """

    run: RegistrationTerms
    data_root: bytes


@dataclass(frozen=True, slots=True)
class _Priced:
    """The registration of a run, priced for an account as it was."""

    terms: AccountOpened
    fixed: bool
    event: RunRegistered


class PrivacyLedger(LedgerReader):
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
        super().__init__(url, create, witness)
        self._renewed_at = 0
        if create:
            try:
                with self._store.read() as rows:
                    check_links(rows, self.public_key)
            except BaseException:
                self.close()
                raise

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
                self._book.append_known(rows, event)
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
            if learned(event, known):
                self._book.append_known(rows, event)

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
            event = closing(self._book.known(rows, account))
            if event is not None:
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
    ) -> Envelope:
        """Charge one step of one mechanism and return the signed :class:`raycloak.workers.terms.receipt.Receipt` for
        it.

        ``input_digest`` is of the step's whole input: see `raycloak.workers.terms.step_input`.

        Guarantee: when the receipt is returned its entry is on disk. The witness, if there is one, then holds a head
        at or behind that entry. The same five arguments give the same entry and charge once, for any caller and any
        number of calls. For a later instance only the fencing number differs. A charge that would cross the cap is
        refused and changes nothing. A closed account gives no receipt, not even an old one.

        Guarantee: a run that is registered with its first charge, and the account that it opens, are in the ledger
        only if that charge is.

        Args:
            start: what the run is registered with and bound to, if it is not yet. The same again changes nothing.

        Raises:
            BudgetError, ConfigError: as :meth:`register_run` and :meth:`bind_data` for a ``start``.
            BudgetError: ``run_unknown``, ``run_mismatch``, ``fenced``, ``step_not_planned``,
                ``step_already_charged`` (for other parameters), ``data_unbound``, ``account_closed``,
                ``cap_exceeded``, ``ledger_unavailable``, ``ledger_rolled_back`` or ``witness_unavailable``. The step
                may be charged after the last two: see :meth:`status`.
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
            entry = rows.charge(run_id, query, step)
            if entry is None:
                entry = self._charge_new(rows, row, run, account, query, step, input_digest)
            receipt = self._receipt(entry, run.registered, input_digest, data_root)
            self._take(rows, row)
        return receipt

    def bind_vectors(
        self, run_id: str, query: Query, step: int, manifest_digest: bytes, vectors_digest: bytes
    ) -> Envelope:
        """Bind a charged step to its vectors, and return the signed :class:`raycloak.workers.terms.binding.Binding`.

        Guarantee: when the binding is returned its entry is on disk, and no binding of this step ever names other
        vectors, from any instance of this ledger. The same five arguments give the same entry. A closed account gives
        no binding, not even an old one.

        Args:
            vectors_digest: see `raycloak.workers.terms.binding.vectors_digest`.

        Raises:
            BudgetError: ``not_reproducible`` if the step is bound to other vectors: the difference of the two sums
                would carry no noise. ``step_not_charged``; ``run_unknown``, ``run_mismatch``, ``fenced``,
                ``account_closed``, ``ledger_unavailable``, ``ledger_rolled_back`` or ``witness_unavailable``.
        """
        with self._write() as rows:
            row, _, _ = self._owned(rows, run_id, manifest_digest)
            known = rows.about(run_id, query, step)
            if StepCharged.DOMAIN not in known:
                raise BudgetError("step_not_charged", f"{query} step {step} of run {run_id} is not charged.")
            entry = known.get(VectorsBound.DOMAIN)
            if entry is None:
                event = VectorsBound(
                    recorded_at=now(),
                    run_id=run_id,
                    query=query,
                    step=step,
                    manifest_digest=manifest_digest,
                    vectors_digest=vectors_digest,
                    fencing=self.fencing,
                )
                entry = self._book.append(rows, event)
            binding = self._binding(entry, vectors_digest)
            self._take(rows, row)
        return binding

    def _priced(self, run: RegistrationTerms) -> _Priced | None:
        """Price a new run before the lock is taken: it takes seconds the first time, and others wait for the lock."""
        with self._store.read() as rows:
            if rows.run(run.run_id) is not None:
                return None
            account = self._book.standing_for(rows, run).account
        return _Priced(account.terms, account.fixed, registration(run, account.terms, account.fixed))

    def _register(self, rows: Rows, run: RegistrationTerms, priced: _Priced | None) -> None:
        """Register a run, and open the account that it is to open; or check that it is the one that is registered."""
        found = rows.run(run.run_id)
        if found is not None:
            row, _ = found
            self._check_same_run(rows, row, run)
            self._check_fencing(row)
            self._take(rows, row)
            return
        if run.opens is not None:
            self._open_for(rows, run.account, run.opens)
        standing, known = self._book.standing(rows, run.account), self._book.known_data(rows)
        account = standing.account
        # The account may have changed since: another run may have opened it, or fixed its order.
        if priced is None or (priced.terms, priced.fixed) != (account.terms, account.fixed):
            priced = _Priced(account.terms, account.fixed, registration(run, account.terms, account.fixed))
        admitted(standing, known, priced.event)
        entry = self._book.append_known(rows, priced.event)
        counts = {mechanism.query: 0 for mechanism in run.mechanisms}
        rows.add_run(RunRow(run.run_id, run.account, entry.sequence, self.fencing, counts))
        rows.renew_lease(self.fencing)

    def _open_for(self, rows: Rows, name: str, terms: OpeningTerms) -> None:
        """Open the account of a run, unless it is open with the same terms."""
        event = opening(name, terms)
        existing = self._book.account(rows, name)
        if existing is None:
            self._book.append_known(rows, event)
        else:
            # Whoever opened it may also have named its authority, and its data.
            own = existing.opened
            same = {"authority": own.authority, "data": own.data, "also": own.also}
            check_same_terms(existing, event.model_copy(update=same))

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
        if manifest_digest != run.registered.manifest_digest:
            raise run_mismatch(run_id)
        account = self._book.account_of(rows, account_row)
        account.require_open()
        return row, run, account

    def _charge_new(
        self,
        rows: Rows,
        row: RunRow,
        run: PricedRun,
        account: Account,
        query: Query,
        step: int,
        input_digest: bytes,
    ) -> LedgerEntry:
        priced = run.priced.get(query)
        planned = priced.mechanism.steps if priced else 0
        if priced is None or not 0 <= step < planned:
            raise BudgetError(
                "step_not_planned",
                f"run {row.run_id} planned {planned} releases of its {query}; number {step} is not one of them.",
            )
        runs = rows.runs(row.account)
        account = self._book.with_runs(rows, account, runs)
        terms, spent = account.terms, self._book.spent(rows, runs, (row.run_id, query))
        # A public release costs nothing, so no cap can refuse it.
        charged = check_cap(terms, spent) if priced.mechanism.private else epsilon_at(terms, spent)
        event = StepCharged(
            recorded_at=now(),
            run_id=row.run_id,
            query=query,
            step=step,
            input_digest=input_digest,
            manifest_digest=run.registered.manifest_digest,
            mechanism_digest=priced.digest,
            fencing=self.fencing,
            charged_epsilon=charged,
        )
        rows.count_charge(row.run_id, query)
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
        receipt = Receipt(
            run_id=event.run_id,
            query=event.query,
            step=event.step,
            input_digest=event.input_digest,
            manifest_digest=event.manifest_digest,
            account=run.account,
            mechanism_digest=event.mechanism_digest,
            fencing=self.fencing,
            sequence=entry.sequence,
            head=entry.hash,
            charged_epsilon=event.charged_epsilon,
            dataset_fingerprint=run.data.fingerprint,
            data_root=data_root,
        )
        return seal(receipt, self._store.key)

    def _binding(self, entry: LedgerEntry, vectors_digest: bytes) -> Envelope:
        event = entry.event
        assert isinstance(event, VectorsBound)
        if event.vectors_digest != vectors_digest:
            raise BudgetError(
                "not_reproducible",
                f"{event.query} step {event.step} now gives vectors {vectors_digest.hex()}, but "
                f"{event.vectors_digest.hex()} were computed before.",
                "Use the kind of machine and the library versions of the first time, or start a new run.",
            )
        binding = Binding(
            run_id=event.run_id,
            query=event.query,
            step=event.step,
            manifest_digest=event.manifest_digest,
            vectors_digest=event.vectors_digest,
            fencing=self.fencing,
            sequence=entry.sequence,
            head=entry.hash,
        )
        return seal(binding, self._store.key)

    @contextmanager
    def _write(self) -> Iterator[Rows]:
        """Open a transaction of the store. Once it has committed, give its head to the witness."""
        try:
            with self._store.write() as rows:
                try:
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

    def _check_same_run(self, rows: Rows, row: RunRow, run: RegistrationTerms) -> None:
        known = self._book.run(rows, row).registered
        # Its data may have moved since, or gained a key of its account: the fingerprint says whether it is the same.
        same = (known.account, known.mechanisms, known.manifest_digest, known.data.fingerprint) == (
            run.account,
            run.mechanisms,
            run.manifest_digest,
            run.data.fingerprint,
        )
        if not same or isinstance(known, RunPrepaid) != run.prepaid:
            raise run_mismatch(row.run_id)

    def _take(self, rows: Rows, row: RunRow) -> None:
        """Make this instance the run's owner, if it is not."""
        if row.fencing != self.fencing:
            rows.own_run(row.run_id, self.fencing)
            rows.renew_lease(self.fencing)

    def _check_fencing(self, row: RunRow) -> None:
        if row.fencing > self.fencing:
            raise BudgetError(
                "fenced",
                f"ledger instance {self.fencing} was replaced by {row.fencing} for run {row.run_id}.",
                "Another process runs it: raycloak budget show tells which; end one of the two.",
            )
