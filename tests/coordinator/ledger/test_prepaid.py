"""A prepaid run is charged for its whole plan when it is registered, or not registered."""

from collections.abc import Iterator

import pytest

from raycloak.coordinator.ledger.audit import audit
from raycloak.coordinator.ledger.entries import RunPrepaid, StepCharged, make_entry
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.metrics.errors import BudgetError
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DATA,
    DELTA,
    MANIFEST,
    PARAMETERS,
    affordable,
    expected_epsilon,
    mechanism,
    register,
    spent,
)

STEPS = 6
TRIAL = mechanism(steps=STEPS)


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[PrivacyLedger]:
    """An account that two such trials fit, and not a third, on each kind of database."""
    assert 2 * STEPS <= affordable() < 3 * STEPS
    instance = PrivacyLedger(ledger_url)
    instance.open_account("patients", OpeningTerms(CAP, DELTA))
    yield instance
    instance.close()


def prepay(ledger: PrivacyLedger, run_id: str) -> None:
    ledger.register_run(RegistrationTerms(run_id, "patients", (TRIAL,), MANIFEST, prepaid=True))


def test_a_prepaid_run_is_charged_before_anything_is_computed(ledger: PrivacyLedger):
    prepay(ledger, "trial-a")
    assert spent(ledger) == pytest.approx(expected_epsilon(STEPS))
    ledger.bind_data("trial-a", MANIFEST, DATA)
    for step in range(STEPS):
        ledger.charge("trial-a", step, PARAMETERS, MANIFEST)
        assert spent(ledger) == pytest.approx(expected_epsilon(STEPS))
    (run,) = ledger.view().accounts[0].runs
    assert (run.prepaid, run.charged_steps, run.planned_steps) == (True, STEPS, STEPS)
    ledger.verify()


def test_a_prepaid_run_is_registered_only_if_all_that_it_plans_fits_the_cap(ledger: PrivacyLedger):
    for run_id in ("trial-a", "trial-b", "trial-b"):
        prepay(ledger, run_id)
    with pytest.raises(BudgetError, match="cap_exceeded: all that the run plans would bring account"):
        prepay(ledger, "trial-c")
    assert [run.run_id for run in ledger.view().accounts[0].runs] == ["trial-a", "trial-b"]
    assert spent(ledger) == pytest.approx(expected_epsilon(2 * STEPS))
    # What is left of the cap pays for single steps.
    register(ledger, "run", TRIAL)
    for step in range(affordable() - 2 * STEPS):
        ledger.charge("run", step, PARAMETERS, MANIFEST)
    with pytest.raises(BudgetError, match="cap_exceeded: the step"):
        ledger.charge("run", affordable() - 2 * STEPS, PARAMETERS, MANIFEST)
    ledger.bind_data("trial-a", MANIFEST, DATA)
    ledger.charge("trial-a", 0, PARAMETERS, MANIFEST)
    ledger.verify()


def test_a_plan_foresees_what_a_prepaid_run_would_be_refused(ledger: PrivacyLedger):
    prepay(ledger, "trial-a")
    foreseen = ledger.outlook(RegistrationTerms("(planned)", "patients", (TRIAL,), b"", prepaid=True))
    assert foreseen.epsilon_after({"gradient": 0}) == pytest.approx(expected_epsilon(2 * STEPS))
    prepay(ledger, "trial-b")
    with pytest.raises(BudgetError, match="cap_exceeded: all that the run plans"):
        ledger.outlook(RegistrationTerms("(planned)", "patients", (TRIAL,), b"", prepaid=True))
    ledger.outlook(RegistrationTerms("(planned)", "patients", (TRIAL,), b""))


def test_no_cap_falls_below_what_is_prepaid(ledger: PrivacyLedger):
    prepay(ledger, "trial-a")
    with pytest.raises(BudgetError, match="cap_below_spent"):
        ledger.change_cap("patients", expected_epsilon(STEPS - 1))


@pytest.mark.parametrize("prepaid", [True, False])
def test_a_run_stays_prepaid_or_not(ledger: PrivacyLedger, prepaid: bool):
    ledger.register_run(RegistrationTerms("run", "patients", (TRIAL,), MANIFEST, prepaid=prepaid))
    with pytest.raises(BudgetError, match="run_mismatch"):
        ledger.register_run(RegistrationTerms("run", "patients", (TRIAL,), MANIFEST, prepaid=not prepaid))


def test_the_audit_refuses_a_prepaid_run_beyond_the_cap_and_a_step_that_forgets_one(ledger: PrivacyLedger):
    for run_id in ("trial-a", "trial-b"):
        prepay(ledger, run_id)
    ledger.bind_data("trial-a", MANIFEST, DATA)
    ledger.charge("trial-a", 0, PARAMETERS, MANIFEST)
    *others, entry = ledger.history()
    charge, event = entry.event, ledger.history()[1].event
    assert isinstance(charge, StepCharged)
    assert isinstance(event, RunPrepaid)
    assert charge.charged_epsilon == pytest.approx(expected_epsilon(2 * STEPS))
    for forged, head, why in (
        (event.model_copy(update={"run_id": "trial-c"}), [*others, entry], "it crosses the cap"),
        (charge.model_copy(update={"charged_epsilon": expected_epsilon(1)}), others, "not what the charges add up to"),
    ):
        last = audit(head, ledger.public_key).head
        with pytest.raises(BudgetError, match=why):
            audit([*head, make_entry(last, forged, ledger._store.key)], ledger.public_key)
