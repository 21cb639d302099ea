"""An rdp account is held at the one order that its first private run fixes. Accounts of an earlier version share delta.

`ledger_v3.sql` is a ledger that the earlier version wrote. Its account `patients` has three charges of two runs and a
lowered cap, `full` no room left, `study` no run, and `tight` is held with pld.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from raycloak.attestation.core.keys import IdentityKey
from raycloak.coordinator.accounting.accountants import smallest_epsilon
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta, composed_rdp, least_share_order
from raycloak.coordinator.ledger import ledger as ledger_module
from raycloak.coordinator.ledger.audit import AuditedChain, audit
from raycloak.coordinator.ledger.entries import (
    DeltaShared,
    Event,
    Head,
    RunRegistered,
    RunRegisteredAtOrders,
    StepCharged,
    make_entry,
)
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import PricedRun, account_limits, epsilon_at, mechanism_rdp, planned
from raycloak.coordinator.ledger.store import APPLICATION, EARLIER_APPLICATION
from raycloak.coordinator.ledger.view import AccountView
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.mechanism import Mechanism
from tests.coordinator.ledger.ledger_cases import CAP, DELTA, MANIFEST, PARAMETERS, mechanism, register, tamper

PEOPLE = b"f" * 32
EARLIER = Path(__file__).with_name("ledger_v3.sql")


def sampled(**changes: Any) -> Mechanism:
    """A run of half the examples per step; its plan fixes another order than full batches do."""
    return mechanism(**{"sample_rate": 0.02, "steps": 400, "noise_multiplier": 0.8, "sigma": 3e5, **changes})


def best_order(run: Mechanism, cap: float = CAP) -> float:
    return least_share_order(composed_rdp(planned([run])), cap, accountant_delta(DELTA), ORDERS)


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[PrivacyLedger]:
    """A ledger with one account and no run, on each kind of database."""
    instance = PrivacyLedger(ledger_url)
    instance.open_account("patients", CAP, DELTA, fingerprint=PEOPLE)
    yield instance
    instance.close()


def account(ledger: PrivacyLedger, name: str = "patients") -> AccountView:
    return next(each for each in ledger.view().accounts if each.name == name)


def orders_of(ledger: PrivacyLedger) -> list[tuple[float, ...]]:
    return [e.event.orders for e in ledger.history() if isinstance(e.event, RunRegisteredAtOrders)]


def test_the_first_private_run_fixes_the_one_order_for_good(ledger: PrivacyLedger, ledger_url: str):
    assert not account(ledger).orders_fixed
    assert best_order(sampled()) != best_order(mechanism())
    register(ledger, "run-a", sampled(), fingerprint=PEOPLE)
    register(ledger, "run-b", mechanism(), fingerprint=PEOPLE)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.close()
    again = PrivacyLedger(ledger_url)
    register(again, "run-c", sampled(steps=3), fingerprint=PEOPLE)
    again.charge("run-c", 0, PARAMETERS, MANIFEST)
    only = (best_order(sampled()),)
    assert orders_of(again) == [only] * 3
    assert (account(again).orders, account(again).orders_fixed) == (only, True)
    assert all(len(e.event.step_rdp[0]) == 1 for e in again.history() if isinstance(e.event, RunRegistered))
    again.verify()
    again.close()


def test_a_plan_within_the_cap_is_admitted_whole_at_the_order_it_fixes(ledger: PrivacyLedger):
    run = sampled(steps=6)
    register(ledger, "run-a", run, fingerprint=PEOPLE)
    stated = [ledger.charge("run-a", step, PARAMETERS, MANIFEST) for step in range(6)]
    assert len(stated) == 6
    assert account(ledger).spent_epsilon <= CAP
    ledger.verify()


def test_a_run_on_public_data_fixes_no_order(ledger: PrivacyLedger):
    ledger.open_account("open", CAP, DELTA)
    public = mechanism(private=False, noise_multiplier=0.0, sigma=0.0)
    register(ledger, "run-a", public, account="open")
    assert not account(ledger, "open").orders_fixed
    register(ledger, "run-b", sampled(), account="open", manifest=b"n" * 32)
    register(ledger, "run-c", public, account="open", manifest=b"o" * 32)
    for run, manifest in (("run-a", MANIFEST), ("run-b", b"n" * 32), ("run-c", b"o" * 32)):
        ledger.charge(run, 0, PARAMETERS, manifest)
    assert orders_of(ledger) == [(), (best_order(sampled()),), ()]
    ledger.verify()


def test_an_account_of_one_plan_keeps_all_orders(ledger: PrivacyLedger):
    ledger.open_account("tight", CAP, DELTA, accountant="pld")
    register(ledger, "run-a", mechanism(accountant="pld"), account="tight")
    assert orders_of(ledger) == [ORDERS]
    ledger.verify()


def test_of_two_runs_that_register_at_once_the_first_fixes_the_order(
    ledger: PrivacyLedger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
):
    """The second has priced its plan at an order of its own before the first is written."""
    other = PrivacyLedger(ledger_url)
    price: Callable[..., RunRegisteredAtOrders] = ledger_module.registration
    priced: list[tuple[float, ...]] = []

    def then_the_other_is_first(run_id: str, *arguments: Any) -> RunRegisteredAtOrders:
        event = price(run_id, *arguments)
        if run_id == "run-a":
            priced.append(event.orders)
            if len(priced) == 1:
                register(other, "run-b", sampled(), fingerprint=PEOPLE)
        return event

    monkeypatch.setattr(ledger_module, "registration", then_the_other_is_first)
    register(ledger, "run-a", mechanism(), fingerprint=PEOPLE)
    assert priced == [(best_order(mechanism()),), (best_order(sampled()),)]
    assert orders_of(ledger) == [(best_order(sampled()),)] * 2
    for instance, run in ((ledger, "run-a"), (other, "run-b"), (ledger, "run-a")):
        step = instance.view().accounts[0].runs[run == "run-a"].charged_steps
        instance.charge(run, step, PARAMETERS, MANIFEST)
    ledger.verify()
    other.close()


def test_a_registration_that_is_undone_fixes_nothing(ledger: PrivacyLedger, monkeypatch: pytest.MonkeyPatch):
    def lost(*_: Any) -> None:
        raise BudgetError("ledger_unavailable", "the connection was lost.")

    with monkeypatch.context() as patched:
        patched.setattr(ledger_module.Rows, "add_run", lost)
        with pytest.raises(BudgetError, match="ledger_unavailable"):
            register(ledger, "run-a", mechanism(), fingerprint=PEOPLE)
    assert not account(ledger).orders_fixed
    register(ledger, "run-b", sampled(), fingerprint=PEOPLE)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    assert orders_of(ledger) == [(best_order(sampled()),)]
    ledger.verify()


def test_the_cap_that_an_order_is_fixed_at_may_change_and_the_order_stays(ledger: PrivacyLedger):
    register(ledger, "run-a", sampled(), fingerprint=PEOPLE)
    only = (best_order(sampled()),)
    ledger.change_cap("patients", 5.0)
    ledger.open_account("study", CAP, DELTA, fingerprint=PEOPLE)
    ledger.transfer("study", "patients", 1.0)
    register(ledger, "run-b", mechanism(), fingerprint=PEOPLE)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    assert orders_of(ledger) == [only] * 2
    assert account(ledger).orders == only
    ledger.verify()


def test_epsilon_moves_between_accounts_of_different_orders(ledger: PrivacyLedger):
    """Proof 004, section 5: both caps' sum holds at both deltas' sum, whichever orders the accounts are held at."""
    ledger.open_account("study", CAP, DELTA, fingerprint=PEOPLE)
    register(ledger, "run-a", sampled(), fingerprint=PEOPLE)
    register(ledger, "run-b", mechanism(), account="study", manifest=b"n" * 32, fingerprint=PEOPLE)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-b", 0, PARAMETERS, b"n" * 32)
    ledger.transfer("patients", "study", 1.0)
    assert account(ledger).orders != account(ledger, "study").orders
    assert (account(ledger).epsilon_cap, account(ledger, "study").epsilon_cap) == (CAP - 1, CAP + 1)
    ledger.verify()


# --- the audit


def resigned(events: Sequence[Event]) -> AuditedChain:
    """Audit a chain of these events, signed as its owner could sign them."""
    key, head, entries = IdentityKey.generate(), Head(), []
    for event in events:
        entries.append(make_entry(head, event, key))
        head = Head(entries[-1].sequence, entries[-1].hash)
    return audit(entries, key.public)


def at_orders(event: RunRegistered, orders: tuple[float, ...]) -> RunRegisteredAtOrders:
    costs = tuple(mechanism_rdp(each, orders) for each in event.mechanisms)
    values = {name: getattr(event, name) for name in RunRegistered.model_fields}
    return RunRegisteredAtOrders(**values | {"orders": orders, "step_rdp": costs})


def as_earlier(event: RunRegistered) -> RunRegistered:
    costs = tuple(mechanism_rdp(each, ORDERS) for each in event.mechanisms)
    return RunRegistered(**{name: getattr(event, name) for name in RunRegistered.model_fields} | {"step_rdp": costs})


def test_the_audit_computes_the_fixed_order_again(ledger: PrivacyLedger):
    register(ledger, "run-a", sampled(), fingerprint=PEOPLE)
    register(ledger, "run-b", mechanism(), fingerprint=PEOPLE)
    opened, first, bound, second, *_ = (entry.event for entry in ledger.history())
    assert isinstance(first, RunRegistered)
    assert isinstance(second, RunRegistered)
    resigned([opened, first, bound, second])
    for orders in ((best_order(mechanism()),), (best_order(sampled()) + 0.01,), ORDERS, ORDERS[:2], ()):
        with pytest.raises(BudgetError, match="entry 2: its order is not the one that its plan fixes"):
            resigned([opened, at_orders(first, orders)])
    with pytest.raises(BudgetError, match="entry 4: it names other orders than its account uses"):
        resigned([opened, first, bound, at_orders(second, (best_order(mechanism()),))])
    with pytest.raises(BudgetError, match="entry 4: it does not name the order that its account uses"):
        resigned([opened, first, bound, as_earlier(second)])


def test_the_audit_refuses_a_charge_beyond_the_cap_at_the_fixed_order(ledger: PrivacyLedger):
    """At another order the charge would still fit."""
    register(ledger, "run-a", sampled(steps=400), fingerprint=PEOPLE)
    register(ledger, "run-b", mechanism(), fingerprint=PEOPLE)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        charge_every_step(ledger)
    step = account(ledger).runs[1].charged_steps
    events, audited = [entry.event for entry in ledger.history()], ledger.verify()
    last, run = events[-1], audited.runs["run-b"]
    assert isinstance(last, StepCharged)
    terms = audited.accounts["patients"].terms
    spent = epsilon_at(terms, [run.priced.spend({"gradient": step + 1})])
    beyond = last.model_copy(update={"step": step, "charged_epsilon": spent})
    with pytest.raises(BudgetError, match="it crosses the cap of its account"):
        resigned([*events, beyond])
    every = account_limits(terms.model_copy(update={"orders": ORDERS}))
    spend = PricedRun.of(as_earlier(run.registered)).spend({"gradient": step + 1})
    assert smallest_epsilon([spend], every) <= CAP


def charge_every_step(ledger: PrivacyLedger) -> None:
    for step in range(20):
        ledger.charge("run-b", step, PARAMETERS, MANIFEST)


# --- ledgers of an earlier version


@pytest.fixture
def earlier(ledger_url: str) -> str:
    """Put the earlier version's ledger at a URL of each kind of database."""
    PrivacyLedger(ledger_url).close()
    source = sqlite3.connect(":memory:")
    source.executescript(EARLIER.read_text())
    source.row_factory = sqlite3.Row
    engine = sa.create_engine(ledger_url.replace("postgresql:", "postgresql+psycopg:"))
    tables = sa.MetaData()
    tables.reflect(engine)
    with engine.begin() as connection:
        for table in reversed(tables.sorted_tables):
            connection.execute(sa.delete(table))
        for table in tables.sorted_tables:
            rows = [dict(row) for row in source.execute(f"SELECT * FROM {table.name}")]
            connection.execute(sa.insert(table), rows)
    engine.dispose()
    source.close()
    return ledger_url


def manifest_of(run: str) -> bytes:
    return (run * 32).encode()[:32]


def application(url: str) -> str:
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        value = connection.execute(sa.text("SELECT value FROM meta WHERE name = 'application'")).scalar()
    engine.dispose()
    return str(value)


def test_an_earlier_ledger_is_read_and_audited_as_it_is(earlier: str):
    reader = PrivacyLedger(earlier, create=False)
    assert reader.verify().unstated == {"patients", "full"}
    spent = {each.name: each.spent_epsilon for each in reader.view().accounts}
    # It stated 2.647, 7.536 and 2.191.
    assert spent == pytest.approx({"patients": 3.278, "full": 9.059, "study": 0.0, "tight": 2.191}, abs=0.01)
    assert [account(reader, name).orders for name in ("patients", "tight")] == [ORDERS] * 2
    reader.close()
    assert application(earlier) == EARLIER_APPLICATION


def test_the_next_charge_of_an_earlier_account_states_how_it_counts_from_there(earlier: str):
    ledger = PrivacyLedger(earlier)
    assert application(earlier) == APPLICATION
    before = account(ledger).spent_epsilon
    for step in (2, 3):
        ledger.charge("run-a", step, PARAMETERS, manifest_of("run-a"))
    register(ledger, "run-e", sampled(), manifest=manifest_of("run-e"), fingerprint=PEOPLE)
    ledger.charge("run-e", 0, PARAMETERS, manifest_of("run-e"))
    kinds = [entry.kind for entry in ledger.history()[23:]]
    assert kinds == [
        *("delta_shared", "step_charged", "step_charged"),
        *("run_registered_at_orders", "data_bound", "step_charged"),
    ]
    (stated,) = (e.event for e in ledger.history("patients") if e.kind == "delta_shared")
    assert isinstance(stated, DeltaShared)
    assert (stated.charged_epsilon, stated.orders) == (before, ORDERS)
    assert orders_of(ledger) == [ORDERS]
    assert ledger.verify().unstated == {"full"}
    # A process of the earlier version that still held a run of the account is replaced.
    held = {run.run_id: run.lease.fencing for run in account(ledger).runs if run.lease}
    assert held == {"run-a": ledger.fencing, "run-b": ledger.fencing, "run-e": ledger.fencing}
    ledger.close()


@pytest.mark.parametrize(
    "write",
    [
        lambda ledger: ledger.change_cap("patients", 6.0),
        lambda ledger: ledger.transfer("patients", "study", 1.0),
        lambda ledger: ledger.transfer("study", "patients", 1.0),
        lambda ledger: ledger.close_account("patients"),
        lambda ledger: register(ledger, "run-e", mechanism(), manifest=manifest_of("run-e"), fingerprint=PEOPLE),
    ],
)
def test_every_change_of_an_earlier_account_states_first_how_it_counts(earlier: str, write: Callable[..., None]):
    ledger = PrivacyLedger(earlier)
    write(ledger)
    kinds = [entry.kind for entry in ledger.history()[23:]]
    assert kinds[0] == "delta_shared"
    assert kinds.count("delta_shared") == 1
    assert ledger.verify().unstated == {"full"}
    ledger.close()


def test_an_earlier_account_whose_spend_passes_its_cap_admits_nothing_more_and_says_why(earlier: str):
    ledger = PrivacyLedger(earlier)
    before = ledger.view()
    why = "an earlier version charged it before it had one fixed order, so its 165 orders share its delta"
    for refused in (
        lambda: ledger.charge("run-c", 5, PARAMETERS, manifest_of("run-c")),
        lambda: register(ledger, "run-e", sampled(), account="full", fingerprint=PEOPLE),
        lambda: ledger.change_cap("full", 7.9),
        lambda: ledger.transfer("full", "study", 0.1),
    ):
        with pytest.raises(BudgetError, match=why):
            refused()
    assert ledger.view() == before
    # What it released stays released, so a charged step still has its receipt, and the account can be closed.
    ledger.charge("run-c", 4, PARAMETERS, manifest_of("run-c"))
    ledger.close_account("full")
    assert ledger.verify().unstated == {"patients"}
    ledger.close()


def test_an_earlier_account_without_a_private_run_fixes_one_order(earlier: str):
    ledger = PrivacyLedger(earlier)
    register(ledger, "run-e", sampled(), account="study", fingerprint=PEOPLE)
    ledger.charge("run-e", 0, PARAMETERS, MANIFEST)
    assert account(ledger, "study").orders == (best_order(sampled()),)
    assert ledger.verify().unstated == {"patients", "full"}
    ledger.close()


def test_a_statement_that_is_undone_is_made_again(earlier: str, monkeypatch: pytest.MonkeyPatch):
    ledger = PrivacyLedger(earlier)
    with monkeypatch.context() as patched:
        patched.setattr(ledger_module.Rows, "count_charge", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(RuntimeError):
            ledger.charge("run-a", 2, PARAMETERS, manifest_of("run-a"))
    register(ledger, "run-e", sampled(), account="study", fingerprint=PEOPLE)
    ledger.charge("run-a", 2, PARAMETERS, manifest_of("run-a"))
    assert ledger.verify().unstated == {"full"}
    ledger.close()


def test_the_audit_holds_an_earlier_account_to_the_statement(earlier: str):
    ledger = PrivacyLedger(earlier)
    ledger.charge("run-a", 2, PARAMETERS, manifest_of("run-a"))
    *before, stated, charged = (entry.event for entry in ledger.history())
    ledger.close()
    assert isinstance(stated, DeltaShared)
    assert isinstance(charged, StepCharged)
    resigned([*before, stated, charged])
    with pytest.raises(BudgetError, match="entry 24: its epsilon is not what the charges add up to"):
        resigned([*before, charged])
    with pytest.raises(BudgetError, match="entry 25: its account has no charges of an earlier version to state"):
        resigned([*before, stated, stated])
    lower = stated.model_copy(update={"charged_epsilon": 2.647})
    with pytest.raises(BudgetError, match="entry 24: its epsilon is not what the charges add up to"):
        resigned([*before, lower])
    fewer = stated.model_copy(update={"orders": ORDERS[:8]})
    with pytest.raises(BudgetError, match="entry 24: it names other orders"):
        resigned([*before, fewer])


def test_a_ledger_of_another_format_is_refused(earlier: str):
    tamper(earlier, "UPDATE meta SET value = 'raycloak ledger v2' WHERE name = 'application'")
    with pytest.raises(BudgetError, match="ledger_foreign"):
        PrivacyLedger(earlier)
