"""Audits a ledger's chain: checks that its events could have happened, and adds them up.

It works on any copy of the entries. A third party needs only one public key of the ledger.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.accountants import Spend
from raycloak.coordinator.accounting.renyi import composed_rdp, order_shares
from raycloak.coordinator.ledger import rules
from raycloak.coordinator.ledger.accounts import Account, Standing, check_cap_change, check_transfer, named
from raycloak.coordinator.ledger.entries import (
    AccountEvent,
    AccountOpened,
    CapChanged,
    CapTransferred,
    DataBound,
    DataKnown,
    Head,
    KeyRotated,
    LedgerEntry,
    LedgerKeys,
    RunEvent,
    RunPrepaid,
    RunRegistered,
    StepCharged,
    VectorsBound,
    broken,
    check_entry,
)
from raycloak.coordinator.ledger.known_data import Known, check_addition, check_opening, check_run_data
from raycloak.metrics.errors import BudgetError, ProtocolError
from raycloak.metrics.proof_bounds import require_assertions
from raycloak.workers.terms.mechanism import check_together

_TOLERANCE = 1e-6
"""The relative difference that is allowed between versions of the accountant."""


@dataclass(slots=True)
class AuditedRun:
    """A run, as its events define it.

    Attributes:
        data: the entry that bound it to its data; None before.
        charges: the charged steps of each query, with their entries.
        bound: the steps of each query whose vectors are bound, with their entries.
        sums: what steps were bound with whose sums later ones mix.
    """

    sequence: int
    registered: RunRegistered
    priced: rules.PricedRun
    fencing: int = 0
    data: int | None = None
    charges: dict[Query, dict[int, int]] = field(default_factory=dict)
    bound: dict[Query, dict[int, int]] = field(default_factory=dict)
    sums: dict[int, bytes] = field(default_factory=dict)

    def filed(self) -> Iterator[tuple[int, tuple[Query, int]]]:
        """Yield each entry about one step, with the step's query and number."""
        for each in (self.charges, self.bound):
            for query, steps in each.items():
                for step, sequence in steps.items():
                    yield sequence, (query, step)


@dataclass(slots=True)
class AuditedChain:
    """The totals of a chain: accounts by name, and runs by id.

    Attributes:
        keys: of the ledger up to here.
        known: the data that the accounts are known by. An extract has not all accounts of its ledger.
    """

    keys: LedgerKeys
    accounts: dict[str, Account] = field(default_factory=dict)
    known: Known = field(default_factory=Known)
    runs: dict[str, AuditedRun] = field(default_factory=dict)
    head: Head = field(default_factory=Head)

    def add(self, entry: LedgerEntry) -> None:
        """Add the next event; BudgetError ``chain_broken`` if it cannot follow the events before it."""
        event = entry.event
        match event:
            case AccountOpened():
                self._open(entry, event)
            case DataKnown():
                _require(event.account in self.accounts, entry, "its account was never opened")
                with _held_to(entry):
                    check_addition(event, self.accounts[event.account].opened, self.known)
                self.known.follow(entry.sequence, event)
            case RunRegistered():
                self._register(entry, event)
            case DataBound():
                self._bind_data(entry, event)
            case StepCharged():
                self._charge(entry, event)
            case VectorsBound():
                self._bind_vectors(entry, event)
            case KeyRotated():
                self.keys = self.keys.after(entry)
            case _:
                self._change(entry, event)

    def spent(self, account: str) -> list[Spend]:
        """Return the charges of each run of an account."""
        return [
            run.priced.spend({query: len(charges) for query, charges in run.charges.items()})
            for run in self.runs.values()
            if run.registered.account == account
        ]

    def standing(self, account: str) -> Standing:
        """Return an account with its charges."""
        registered = [run.registered for run in self.runs.values() if run.registered.account == account]
        return Standing(self.accounts[account], self.spent(account), registered, self.known.accounts.get(account, ()))

    def _open(self, entry: LedgerEntry, event: AccountOpened) -> None:
        _require(event.account not in self.accounts, entry, "it opens an account a second time")
        with _held_to(entry):
            check_opening(event, self.known)
        self.accounts[event.account] = Account.of(event, Head(entry.sequence, entry.hash))
        self.known.follow(entry.sequence, event)

    def _change(self, entry: LedgerEntry, event: AccountEvent) -> None:
        known = all(name in self.accounts for name in named(event))
        _require(known, entry, "its account was never opened")
        with _held_to(entry):
            if isinstance(event, CapChanged):
                check_cap_change(self.standing(event.account), event, self.keys.current)
            elif isinstance(event, CapTransferred):
                check_transfer(self.standing(event.source), self.standing(event.target), event)
            else:
                self.accounts[event.account].require_open()
                same = self.accounts[event.account].terms.epsilon_cap == event.epsilon_cap
                _require(same, entry, "it closes the account with another cap")
        for name in named(event):
            self.accounts[name] = self.accounts[name].after(event, Head(entry.sequence, entry.hash))

    def _register(self, entry: LedgerEntry, event: RunRegistered) -> None:
        _require(event.run_id not in self.runs, entry, "it registers a run a second time")
        _require(event.account in self.accounts, entry, "its account was never opened")
        account = self.accounts[event.account].terms
        charges: dict[Query, dict[int, int]] = {mechanism.query: {} for mechanism in event.mechanisms}
        _require(event.epsilon_cap == account.epsilon_cap, entry, "it states another cap than its account has")
        private = [mechanism for mechanism in event.mechanisms if mechanism.private]
        with _held_to(entry):
            check_together(event.mechanisms)
            rules.check_order(event.run_id, event.mechanisms, event.lineage)
            self.accounts[event.account].require_open()
            self.accounts[event.account].require_unit(event)
            check_run_data(event.run_id, event.mechanisms, event.data, account, self.known)
            for mechanism in private:
                rules.check_claims(event.run_id, mechanism)
                rules.check_accountant(event.run_id, mechanism, account)
            registered = [*self.standing(event.account).registered, event]
            rules.check_reserve(account, registered)
            if private:
                rules.check_shareable(account, registered)
        _require(event.unit == rules.unit_of(event.mechanisms), entry, "it states another unit than its mechanisms")
        if not private:
            _require(event.orders == (), entry, "it names orders for a run that is not private")
        elif self.accounts[event.account].fixed:
            _require(event.orders == account.orders, entry, "it names other orders than its account uses")
        else:
            _require(_is_least(event, account), entry, "its order is not the one that its plan fixes")
        self.accounts[event.account] = self.accounts[event.account].with_run(event)
        self.known.follow(entry.sequence, event)
        costs = [rules.mechanism_rdp(mechanism, event.orders) for mechanism in event.mechanisms]
        same = len(costs) == len(event.step_rdp) and all(map(_close, event.step_rdp, costs, repeat(0.0)))
        _require(same, entry, "its cost per step is not that of its mechanism")
        quote = rules.quoted(account, event.mechanisms)
        same = event.quote_counts == quote.counts and _close(event.quote_epsilon, quote.epsilon, _TOLERANCE)
        _require(same, entry, "its quote is not what its plan costs")
        self.runs[event.run_id] = AuditedRun(entry.sequence, event, rules.PricedRun.of(event), charges=charges)
        if isinstance(event, RunPrepaid) and private:
            self._require_within(entry, event.account)

    def _owned(self, entry: LedgerEntry, event: RunEvent) -> AuditedRun:
        """Return the run of ``event``, which its owner wrote while the account was open."""
        run = self.runs.get(event.run_id)
        if run is None:
            raise broken(entry.sequence, "its run was never registered")
        _require(event.manifest_digest == run.registered.manifest_digest, entry, "its run has another manifest")
        _require(event.fencing >= run.fencing, entry, "it comes from an instance that had been replaced")
        _require(not self.accounts[run.registered.account].closed, entry, "its account was closed")
        run.fencing = event.fencing
        return run

    def _bind_data(self, entry: LedgerEntry, event: DataBound) -> None:
        run = self._owned(entry, event)
        # A charge needs bound data, so nothing can have been charged before.
        _require(run.data is None, entry, "it binds its run's data a second time")
        run.data = entry.sequence

    def _bind_vectors(self, entry: LedgerEntry, event: VectorsBound) -> None:
        run = self._owned(entry, event)
        charged = event.step in run.charges.get(event.query, {})
        _require(charged, entry, f"it binds vectors of step {event.step}, which was not charged before")
        bound = run.bound.setdefault(event.query, {})
        _require(event.step not in bound, entry, f"it binds vectors of step {event.step} a second time")
        bands = next(each.bands for each in run.registered.mechanisms if each.query == event.query)
        counted = 1 <= len(event.sums) <= bands if bands > 1 else not event.sums
        _require(counted, entry, f"it names {len(event.sums)} sums of a run that mixes those of {bands} steps")
        mixed = [run.sums.get(event.step - age) for age in range(1, len(event.sums))]
        _require(mixed == [*event.sums[1:]], entry, "its vectors mix other sums than earlier steps were bound with")
        bound[event.step] = entry.sequence
        if event.sums:
            run.sums[event.step] = event.sums[0]

    def _charge(self, entry: LedgerEntry, event: StepCharged) -> None:
        run = self._owned(entry, event)
        _require(run.data is not None, entry, "its run was not bound to its data before")
        registered, charges = run.registered, run.charges.get(event.query)
        mechanism = next((each for each in registered.mechanisms if each.query == event.query), None)
        if mechanism is None or charges is None:
            raise broken(entry.sequence, "its run has no such mechanism")
        _require(event.step not in charges, entry, f"it charges step {event.step} a second time")
        _require(0 <= event.step < mechanism.steps, entry, "its step was not planned")
        _require(event.mechanism_digest == mechanism.digest(), entry, "it charges for another mechanism")
        if registered.lineage is not None and event.query == "gradient":
            _require(event.step == len(charges), entry, "its step does not follow the last one that was charged")
        charges[event.step] = entry.sequence
        spent = self._epsilon(registered.account)
        same = math.isclose(spent, event.charged_epsilon, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        _require(same, entry, "its epsilon is not what the charges add up to")
        if mechanism.private:
            self._require_within(entry, registered.account)

    def _epsilon(self, account: str) -> float:
        return rules.epsilon_at(self.accounts[account].terms, self.spent(account))

    def _require_within(self, entry: LedgerEntry, account: str) -> None:
        within = self._epsilon(account) <= self.accounts[account].terms.epsilon_cap * (1 + _TOLERANCE)
        _require(within, entry, "it crosses the cap of its account")


def audit(entries: Iterable[LedgerEntry], public_key: bytes) -> AuditedChain:
    """Check chain, signatures and meaning of a whole ledger, from its first entry.

    Guarantee: returns only if ``public_key`` signed every entry up to the first rotation, each later one was signed by
    the key that the rotation before it names, and none is missing before the last. No step was charged twice, and each
    charge costs what its mechanism costs. Each mechanism has the noise it claims. No private charge crosses its
    account's cap, at the one order that the first private plan of an rdp account fixed. Every cap was set by the
    opening, a lowering, a signature of the account's authority, or a transfer. Each run was bound to its data once,
    before its first charge. Each charged step was bound to its vectors once at most, after its charge. No run was
    charged to another account than the one that its data was known by, and none released such data without noise, as
    far as the marks of data tell.

    Raises:
        BudgetError: ``chain_broken``, naming the first entry that is wrong.
        ConfigError: ``assertions_off``.
    """
    require_assertions()
    audited = AuditedChain(LedgerKeys.of((), public_key))
    for entry in entries:
        audited.head = check_entry(entry, audited.keys.current, audited.head)
        audited.add(entry)
    return audited


def _close(stated: Sequence[float], expected: Sequence[float], absolute: float) -> bool:
    """Return whether numbers are the same but for the version of the library that computed them."""
    same_size = len(stated) == len(expected)
    return same_size and bool(np.allclose(stated, expected, rtol=_TOLERANCE, atol=absolute))


def _is_least(event: RunRegistered, terms: AccountOpened) -> bool:
    """Return whether a first private run put to use what it had to."""
    if terms.accountant != "rdp":
        return event.orders == terms.orders
    if len(event.orders) != 1 or event.orders[0] not in terms.orders:
        return False
    rdp = composed_rdp(rules.planned(event.mechanisms), terms.orders)
    shares = order_shares(rdp, terms.epsilon_cap, rules.account_limits(terms).delta, terms.orders)
    # Another version of the library may break a tie the other way.
    return bool(shares[terms.orders.index(event.orders[0])] <= shares.min() * (1 + _TOLERANCE))


@contextmanager
def _held_to(entry: LedgerEntry) -> Iterator[None]:
    """Turn a refusal by the ledger's own rules into one that names the entry."""
    try:
        yield
    except (BudgetError, ProtocolError) as refusal:
        if refusal.code == "chain_broken":
            raise
        raise broken(entry.sequence, f"the ledger would have refused it with {refusal.code}") from None


def _require(condition: bool, entry: LedgerEntry, why: str) -> None:
    if not condition:
        raise broken(entry.sequence, why)
