"""An rdp account is held at the one order that its first private run fixes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.attestation.core.keys import IdentityKey
from raycloak.coordinator.accounting import renyi
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta, composed_rdp, least_share_order
from raycloak.coordinator.ledger import ledger as ledger_module
from raycloak.coordinator.ledger.audit import AuditedChain, audit
from raycloak.coordinator.ledger.entries import (
    Event,
    Head,
    RunRegistered,
    StepCharged,
    make_entry,
)
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import (
    OpeningTerms,
    PricedRun,
    RegistrationTerms,
    account_limits,
    epsilon_at,
    mechanism_rdp,
    planned,
)
from raycloak.coordinator.ledger.view import AccountView
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.mechanism import Mechanism
from tests.coordinator.ledger.ledger_cases import CAP, DELTA, MANIFEST, PARAMETERS, mechanism, register, tamper

PEOPLE = DataMarks(fingerprint=b"f" * 32)


def sampled(**changes: Any) -> Mechanism:
    """A run of half the examples per step; its plan fixes another order than full batches do."""
    return mechanism(**{"sample_rate": 0.02, "steps": 400, "noise_multiplier": 0.8, "sigma": 3e5, **changes})


def best_order(run: Mechanism, cap: float = CAP) -> float:
    return least_share_order(composed_rdp(planned([run])), cap, accountant_delta(DELTA), ORDERS)


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[PrivacyLedger]:
    """A ledger with one account and no run, on each kind of database."""
    instance = PrivacyLedger(ledger_url)
    instance.open_account("patients", OpeningTerms(CAP, DELTA), data=PEOPLE)
    yield instance
    instance.close()


def account(ledger: PrivacyLedger, name: str = "patients") -> AccountView:
    return next(each for each in ledger.view().accounts if each.name == name)


def orders_of(ledger: PrivacyLedger) -> list[tuple[float, ...]]:
    return [e.event.orders for e in ledger.history() if isinstance(e.event, RunRegistered)]


def test_the_first_private_run_fixes_the_one_order_for_good(ledger: PrivacyLedger, ledger_url: str):
    assert not account(ledger).orders_fixed
    assert best_order(sampled()) != best_order(mechanism())
    register(ledger, "run-a", sampled(), data=PEOPLE)
    register(ledger, "run-b", mechanism(), data=PEOPLE)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.close()
    again = PrivacyLedger(ledger_url)
    register(again, "run-c", sampled(steps=3), data=PEOPLE)
    again.charge("run-c", 0, PARAMETERS, MANIFEST)
    only = (best_order(sampled()),)
    assert orders_of(again) == [only] * 3
    assert (account(again).orders, account(again).orders_fixed) == (only, True)
    assert all(len(e.event.step_rdp[0]) == 1 for e in again.history() if isinstance(e.event, RunRegistered))
    again.verify()
    again.close()


def test_a_plan_within_the_cap_is_admitted_whole_at_the_order_it_fixes(ledger: PrivacyLedger):
    run = sampled(steps=6)
    register(ledger, "run-a", run, data=PEOPLE)
    stated = [ledger.charge("run-a", step, PARAMETERS, MANIFEST) for step in range(6)]
    assert len(stated) == 6
    assert account(ledger).spent_epsilon <= CAP
    ledger.verify()


def test_a_run_on_public_data_fixes_no_order(ledger: PrivacyLedger):
    ledger.open_account("open", OpeningTerms(CAP, DELTA))
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
    ledger.open_account("tight", OpeningTerms(CAP, DELTA, "pld"))
    register(ledger, "run-a", mechanism(accountant="pld"), account="tight")
    assert orders_of(ledger) == [ORDERS]
    ledger.verify()


def test_of_two_runs_that_register_at_once_the_first_fixes_the_order(
    ledger: PrivacyLedger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
):
    """The second has priced its plan at an order of its own before the first is written."""
    other = PrivacyLedger(ledger_url)
    price: Callable[..., RunRegistered] = ledger_module.registration
    priced: list[tuple[float, ...]] = []

    def then_the_other_is_first(run: RegistrationTerms, *arguments: Any) -> RunRegistered:
        event = price(run, *arguments)
        if run.run_id == "run-a":
            priced.append(event.orders)
            if len(priced) == 1:
                register(other, "run-b", sampled(), data=PEOPLE)
        return event

    monkeypatch.setattr(ledger_module, "registration", then_the_other_is_first)
    register(ledger, "run-a", mechanism(), data=PEOPLE)
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
            register(ledger, "run-a", mechanism(), data=PEOPLE)
    assert not account(ledger).orders_fixed
    register(ledger, "run-b", sampled(), data=PEOPLE)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    assert orders_of(ledger) == [(best_order(sampled()),)]
    ledger.verify()


def test_the_cap_that_an_order_is_fixed_at_may_change_and_the_order_stays(ledger: PrivacyLedger):
    register(ledger, "run-a", sampled(), data=PEOPLE)
    only = (best_order(sampled()),)
    ledger.change_cap("patients", 5.0)
    ledger.open_account("study", OpeningTerms(CAP, DELTA), data=PEOPLE, also=True)
    ledger.transfer("study", "patients", 1.0)
    register(ledger, "run-b", mechanism(), data=PEOPLE)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    assert orders_of(ledger) == [only] * 2
    assert account(ledger).orders == only
    ledger.verify()


def test_epsilon_moves_between_accounts_of_different_orders(ledger: PrivacyLedger):
    """Proof 004, section 5: both caps' sum holds at both deltas' sum, whichever orders the accounts are held at."""
    ledger.open_account("study", OpeningTerms(CAP, DELTA), data=PEOPLE, also=True)
    register(ledger, "run-a", sampled(), data=PEOPLE)
    register(ledger, "run-b", mechanism(), account="study", manifest=b"n" * 32, data=PEOPLE)
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


def at_orders(event: RunRegistered, orders: tuple[float, ...]) -> RunRegistered:
    costs = tuple(mechanism_rdp(each, orders) for each in event.mechanisms)
    return event.model_copy(update={"orders": orders, "step_rdp": costs})


def test_the_audit_computes_the_fixed_order_again(ledger: PrivacyLedger):
    register(ledger, "run-a", sampled(), data=PEOPLE)
    register(ledger, "run-b", mechanism(), data=PEOPLE)
    opened, first, bound, second, *_ = (entry.event for entry in ledger.history())
    assert isinstance(first, RunRegistered)
    assert isinstance(second, RunRegistered)
    resigned([opened, first, bound, second])
    for orders in ((best_order(mechanism()),), (best_order(sampled()) + 0.01,), ORDERS, ORDERS[:2], ()):
        with pytest.raises(BudgetError, match="entry 2: its order is not the one that its plan fixes"):
            resigned([opened, at_orders(first, orders)])
    with pytest.raises(BudgetError, match="entry 4: it names other orders than its account uses"):
        resigned([opened, first, bound, at_orders(second, (best_order(mechanism()),))])


def test_the_audit_refuses_a_charge_beyond_the_cap_at_the_fixed_order(ledger: PrivacyLedger):
    """At another order the charge would still fit."""
    register(ledger, "run-a", sampled(steps=400), data=PEOPLE)
    register(ledger, "run-b", mechanism(), data=PEOPLE)
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
    limits = account_limits(terms)
    spend = PricedRun.of(at_orders(run.registered, ORDERS)).spend({"gradient": step + 1})
    assert renyi.epsilon(spend.rdp, limits.delta, ORDERS) <= CAP


def charge_every_step(ledger: PrivacyLedger) -> None:
    for step in range(20):
        ledger.charge("run-b", step, PARAMETERS, MANIFEST)


@pytest.mark.parametrize("former", ["raycloak ledger v3", "raycloak ledger v5"])
def test_a_ledger_of_a_former_format_is_refused_by_name(ledger: PrivacyLedger, ledger_url: str, former: str):
    tamper(ledger_url, f"UPDATE meta SET value = '{former}' WHERE name = 'application'")
    for create in (True, False):
        with pytest.raises(BudgetError, match=f"ledger_foreign: the ledger has the format '{former}'"):
            PrivacyLedger(ledger_url, create=create)
