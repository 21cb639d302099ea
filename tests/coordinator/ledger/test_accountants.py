"""Accounts held with privacy loss distributions: one fixed plan, charged what its quote says."""

from pathlib import Path

import pytest

from raycloak.coordinator.accounting import pld
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.accounting.renyi import accountant_delta
from raycloak.coordinator.ledger.audit import audit
from raycloak.coordinator.ledger.entries import AccountOpened, Head, RunRegistered, make_entry
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.metrics.errors import BudgetError, ConfigError
from raycloak.workers.terms.mechanism import Mechanism
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DATA,
    DELTA,
    MANIFEST,
    PARAMETERS,
    affordable,
    mechanism,
    receipt_of,
)

NOISE = 2.6


def planned(**changes) -> Mechanism:
    return mechanism(accountant="pld", **changes)


def tight(steps: int) -> float:
    """Return epsilon of full batches, by the closed form."""
    return pld.epsilon((Release(1.0, NOISE, steps),), accountant_delta(DELTA))


def steps_within(cap: float) -> int:
    return next(steps for steps in range(1, 100) if tight(steps + 1) > cap)


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.open_account("own", OpeningTerms(CAP, DELTA, "pld"))
    yield ledger
    ledger.close()


def register(ledger: PrivacyLedger, *mechanisms: Mechanism, run_id: str = "run-a") -> None:
    ledger.register_run(RegistrationTerms(run_id, "own", mechanisms or (planned(),), MANIFEST))
    ledger.bind_data(run_id, MANIFEST, DATA)


def charge(ledger: PrivacyLedger, step: int, query="gradient") -> float:
    return receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST, query)).charged_epsilon


def test_a_run_that_was_priced_is_registered_without_another_computation_and_nothing_changes_before(
    ledger: PrivacyLedger,
):
    before = ledger.view()
    pld._settled.cache_clear()
    ledger.price((planned(),), CAP, DELTA, "pld")
    assert ledger.view() == before
    computed = pld._settled.cache_info().misses
    register(ledger)
    assert 0 < computed == pld._settled.cache_info().misses


def test_an_account_is_held_with_the_accountant_it_was_opened_with(ledger: PrivacyLedger):
    assert [account.accountant for account in ledger.view().accounts] == ["pld"]
    ledger.open_account("own", OpeningTerms(CAP, DELTA, "pld"))
    with pytest.raises(BudgetError, match=r"account_mismatch.*accountant pld.*differs in accountant"):
        ledger.open_account("own", OpeningTerms(CAP, DELTA))


def test_a_pld_account_admits_every_step_within_the_tight_value_and_none_beyond(ledger: PrivacyLedger):
    register(ledger)
    most = steps_within(CAP)
    assert most > affordable(), "the Renyi filter would have refused earlier"
    for step in range(most):
        assert tight(step + 1) * (1 - 1e-9) <= charge(ledger, step) <= CAP
    with pytest.raises(BudgetError, match="cap_exceeded"):
        charge(ledger, most)
    (account,) = ledger.view().accounts
    assert account.spent_epsilon == pytest.approx(tight(most), rel=1e-9)
    assert account.spent_ratio == 1.0
    ledger.verify()


def test_a_finished_plan_is_charged_its_tight_epsilon(ledger: PrivacyLedger):
    register(ledger, planned(steps=10))
    charged = [charge(ledger, step) for step in range(10)]
    assert charged == sorted(charged)
    assert charged[-1] == pytest.approx(tight(10), rel=1e-9)
    ledger.verify()


def test_a_plan_of_several_mechanisms_is_charged_together(ledger: PrivacyLedger):
    register(ledger, planned(steps=6), planned(steps=2, query="class_counts"))
    charge(ledger, 0, "class_counts")
    first = charge(ledger, 0)
    assert first >= tight(2) * (1 - 1e-9)
    for step in range(1, 6):
        charge(ledger, step)
    assert charge(ledger, 1, "class_counts") == pytest.approx(tight(8), rel=1e-9)
    ledger.verify()


def test_nobody_chooses_which_mechanism_of_a_plan_a_pld_account_pays_for(ledger: PrivacyLedger):
    """`test_who_chooses_between_two_mechanisms_hides_more_delta_than_either` says what a choice would hide."""
    sampled = planned(sample_rate=0.2, steps=2)
    with pytest.raises(BudgetError, match="cap_exceeded: all that the run plans"):
        register(ledger, sampled, planned(query="evaluation"))
    register(ledger, sampled, planned(steps=2, query="evaluation"))
    assert charge(ledger, 1, "evaluation") <= charge(ledger, 0) < CAP


def test_a_second_run_on_a_pld_account_is_refused_by_name(ledger: PrivacyLedger):
    register(ledger)
    register(ledger)
    with pytest.raises(BudgetError, match=r"account_not_shared.*pld, for the plan of run run-a alone"):
        register(ledger, run_id="run-b")
    register(ledger, planned(private=False, noise_multiplier=0.0, sigma=0.0), run_id="public")
    assert [run.run_id for run in ledger.view().accounts[0].runs] == ["run-a", "public"]
    ledger.verify()


@pytest.mark.parametrize(("account", "planned_with"), [("own", "rdp"), ("shared", "pld")])
def test_a_mechanism_planned_with_another_accountant_is_refused(ledger: PrivacyLedger, account: str, planned_with):
    ledger.open_account("shared", OpeningTerms(CAP, DELTA))
    with pytest.raises(BudgetError, match=f"accountant_mismatch.*planned with the {planned_with} accountant"):
        ledger.register_run(RegistrationTerms("run-a", account, (mechanism(accountant=planned_with),), MANIFEST))
    assert [each.runs for each in ledger.view().accounts] == [(), ()]


def test_a_plan_of_which_nothing_fits_is_refused(ledger: PrivacyLedger):
    ledger.open_account("small", OpeningTerms(0.5, DELTA, "pld"))
    with pytest.raises(BudgetError, match="cap_exceeded"):
        ledger.register_run(RegistrationTerms("run-a", "small", (planned(),), MANIFEST))


def test_a_delta_too_small_for_the_accountant_is_refused_at_registration(ledger: PrivacyLedger):
    ledger.open_account("strict", OpeningTerms(CAP, 1e-140, "pld"))
    sampled = planned(sample_rate=0.5)
    with pytest.raises(ConfigError, match="delta_too_small"):
        ledger.register_run(RegistrationTerms("run-a", "strict", (sampled,), MANIFEST))


def test_a_refusal_names_an_epsilon_above_the_cap_however_little_it_is(ledger: PrivacyLedger):
    """Rounded to the nearest figure, 2.1912 would be the cap of 2.191, and 3.6812 that of 3.681."""
    register(ledger)
    charge(ledger, 0)
    assert f"{tight(2):.4f}" == "2.1912"
    ledger.change_cap("own", 2.191)
    with pytest.raises(BudgetError, match=r"epsilon 2\.192, over its cap 2\.191"):
        charge(ledger, 1)


def test_a_cap_below_what_is_spent_is_refused_however_little_it_is(ledger: PrivacyLedger):
    register(ledger)
    for step in range(5):
        charge(ledger, step)
    assert f"{tight(5):.4f}" == "3.6812"
    with pytest.raises(BudgetError, match=r"epsilon 3\.682, more than 3\.681"):
        ledger.change_cap("own", 3.681)


def test_a_lowered_cap_ends_the_run_earlier(ledger: PrivacyLedger):
    register(ledger)
    for step in range(3):
        charge(ledger, step)
    ledger.change_cap("own", tight(4) * 1.0001)
    charge(ledger, 3)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        charge(ledger, 4)
    ledger.verify()


def test_a_quote_that_is_not_what_the_plan_costs_is_found_by_the_audit(ledger: PrivacyLedger):
    register(ledger)
    *before, registered, _ = ledger.history()
    event = registered.event
    assert isinstance(event, RunRegistered)
    cheaper = tuple(value * 0.9 for value in event.quote_epsilon)
    for changed in ({"quote_epsilon": cheaper}, {"quote_epsilon": ()}, {"quote_counts": event.quote_counts[1:]}):
        forged = make_entry(_head(before), event.model_copy(update=changed), ledger._store.key)
        with pytest.raises(BudgetError, match="its quote is not what its plan costs"):
            audit([*before, forged], ledger.public_key)


def test_a_chain_with_a_second_plan_or_another_accountant_is_refused_by_the_audit(ledger: PrivacyLedger):
    register(ledger)
    *entries, _ = ledger.history()
    event = entries[-1].event
    assert isinstance(event, RunRegistered)
    second = event.model_copy(update={"run_id": "run-b"})
    with pytest.raises(BudgetError, match="refused it with account_not_shared"):
        audit([*entries, make_entry(_head(entries), second, ledger._store.key)], ledger.public_key)
    opened = entries[0].event
    assert isinstance(opened, AccountOpened)
    first = make_entry(_head([]), opened.model_copy(update={"accountant": "rdp"}), ledger._store.key)
    with pytest.raises(BudgetError, match="refused it with accountant_mismatch"):
        audit([first, make_entry(_head([first]), event, ledger._store.key)], ledger.public_key)


def _head(entries):
    return Head(entries[-1].sequence, entries[-1].hash) if entries else Head()
