"""Replays a ledger's chain: whether its events could have happened, and what they add up to.

Works on any copy of the entries; a third party needs only the ledger's public key.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from attestation.roster import Query
from coordinator.accounting import SLACK_SHARE, accountant_delta, epsilon, step_rdp
from coordinator.ledger_entries import (
    AccountOpened,
    Head,
    LedgerEntry,
    RunRegistered,
    StepCharged,
    broken,
    check_chain,
)
from coordinator.ledger_store import AccountRow, Rows
from workers.mechanism import Mechanism

_TOLERANCE = 1e-6
"""Relative difference allowed between versions of the accountant."""


@dataclass(slots=True)
class ReplayedRun:
    """A run as its events give it; ``charges`` maps the charged steps of each query to their entries."""

    sequence: int
    registered: RunRegistered
    fencing: int = 0
    charges: dict[Query, dict[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Replay:
    """What a chain adds up to: accounts by name with the entry that opened them, and runs by id."""

    accounts: dict[str, tuple[int, AccountOpened]] = field(default_factory=dict)
    runs: dict[str, ReplayedRun] = field(default_factory=dict)
    head: Head = field(default_factory=Head)

    def add(self, entry: LedgerEntry) -> None:
        """Take the next event into account; BudgetError ``chain_broken`` if it cannot follow those before."""
        event = entry.event
        if isinstance(event, AccountOpened):
            _require(event.account not in self.accounts, entry, "it opens an account a second time")
            self.accounts[event.account] = (entry.sequence, event)
        elif isinstance(event, RunRegistered):
            self._register(entry, event)
        else:
            self._charge(entry, event)

    def spent(self, account: str) -> NDArray[np.float64]:
        """RDP vector of all charges to an account."""
        total = np.zeros(len(self.accounts[account][1].orders))
        for run in self.runs.values():
            if run.registered.account == account:
                for mechanism, cost in zip(run.registered.mechanisms, run.registered.step_rdp, strict=True):
                    total += len(run.charges[mechanism.query]) * np.asarray(cost)
        return total

    def _register(self, entry: LedgerEntry, event: RunRegistered) -> None:
        _require(event.run_id not in self.runs, entry, "it registers a run a second time")
        _require(event.account in self.accounts, entry, "its account was never opened")
        account = self.accounts[event.account][1]
        expected = tuple(_release_rdp(mechanism, account.orders) for mechanism in event.mechanisms)
        same = [len(cost) for cost in event.step_rdp] == [len(cost) for cost in expected]
        same = same and np.allclose(event.step_rdp, expected, rtol=_TOLERANCE, atol=0)
        _require(same, entry, "its cost per step is not that of its mechanism")
        charges: dict[Query, dict[int, int]] = {mechanism.query: {} for mechanism in event.mechanisms}
        _require(len(charges) == len(event.mechanisms) > 0, entry, "it does not name each mechanism once")
        slack = event.delta_slack + sum(
            run.registered.delta_slack for run in self.runs.values() if run.registered.account == event.account
        )
        _require(slack <= SLACK_SHARE * account.delta * (1 + _TOLERANCE), entry, "it overdraws the slack of delta")
        self.runs[event.run_id] = ReplayedRun(entry.sequence, event, charges=charges)

    def _charge(self, entry: LedgerEntry, event: StepCharged) -> None:
        run = self.runs.get(event.run_id)
        if run is None:
            raise broken(entry.sequence, "its run was never registered")
        registered, charges = run.registered, run.charges.get(event.query)
        mechanism = next((each for each in registered.mechanisms if each.query == event.query), None)
        if mechanism is None or charges is None:
            raise broken(entry.sequence, "its mechanism is none of its run's")
        _require(event.step not in charges, entry, f"it charges step {event.step} a second time")
        _require(0 <= event.step < mechanism.steps, entry, "its step was not planned")
        named = (event.manifest_digest, event.mechanism_digest)
        _require(named == (registered.manifest_digest, mechanism.digest()), entry, "it charges for another mechanism")
        _require(event.fencing >= run.fencing, entry, "it comes from an instance that had been replaced")
        charges[event.step], run.fencing = entry.sequence, event.fencing
        account = self.accounts[registered.account][1]
        spent = epsilon(self.spent(registered.account), accountant_delta(account.delta), account.orders)
        close = math.isclose(spent, event.charged_epsilon, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        _require(close, entry, "its epsilon is not what the charges add up to")
        within = not mechanism.private or spent <= account.epsilon_cap * (1 + _TOLERANCE)
        _require(within, entry, "it crosses the cap of its account")


def audit(entries: Iterable[LedgerEntry], public_key: bytes) -> Replay:
    """Check chain, signatures and meaning of a whole ledger, from its first entry.

    Guarantee: returns only if ``public_key`` signed every entry, none is missing before the last, no step was
    charged twice, each charge costs what its mechanism costs, and no private charge crosses its account's cap.

    Raises:
        BudgetError: ``chain_broken``, naming the first entry that is wrong.
    """
    replay = Replay()

    def replayed() -> Iterator[LedgerEntry]:
        # Resumed only after the chain check has accepted what it was given.
        for entry in entries:
            yield entry
            replay.add(entry)

    replay.head = check_chain(replayed(), public_key)
    return replay


def check_tables(rows: Rows, replay: Replay) -> None:
    """Check that every table says what the chain says; BudgetError ``chain_broken`` otherwise."""
    accounts = [AccountRow(name, sequence) for name, (sequence, _) in replay.accounts.items()]
    if rows.accounts() != accounts:
        raise broken(replay.head.sequence, "the table of accounts does not follow from the chain")
    found = {row.run_id: row for row in rows.runs()}
    for run_id, run in replay.runs.items():
        row = found.pop(run_id, None)
        counts = {query: len(charges) for query, charges in run.charges.items()}
        expected = (run.registered.account, run.sequence, counts)
        if row is None or (row.account, row.sequence, dict(row.charged)) != expected or row.fencing < run.fencing:
            raise broken(run.sequence, f"the row of run {run_id} does not follow from the chain")
    charges = {
        sequence: (run_id, query, step)
        for run_id, run in replay.runs.items()
        for query, steps in run.charges.items()
        for step, sequence in steps.items()
    }
    for sequence, *filed in rows.charge_keys():
        if charges.get(sequence, (None, None, None)) != tuple(filed):
            raise broken(sequence, "it is filed under another run, query or step")
    if found:
        raise broken(replay.head.sequence, "the table of runs holds a run that the chain does not")


def _release_rdp(mechanism: Mechanism, orders: tuple[float, ...]) -> tuple[float, ...]:
    """What one release costs at an account's orders."""
    if not mechanism.private:
        return (0.0,) * len(orders)
    return step_rdp(mechanism.sample_rate, mechanism.noise_multiplier, orders)


def _require(condition: bool, entry: LedgerEntry, why: str) -> None:
    if not condition:
        raise broken(entry.sequence, why)
