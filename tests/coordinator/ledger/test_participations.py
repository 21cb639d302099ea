"""Charges of a run whose examples a client sends: each step is charged, and k of them cost something."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from raycloak.coordinator.accounting import pld
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.accounting.renyi import accountant_delta, delta_slack
from raycloak.coordinator.ledger.audit import audit
from raycloak.coordinator.ledger.entries import StepCharged
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms, check_claims
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.mechanism import Mechanism
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DELTA,
    MANIFEST,
    PARAMETERS,
    affordable,
    expected_epsilon,
    mechanism,
    receipt_of,
    register,
    spent,
)

BOUND = 3


def sent(bound: int = BOUND, **changes: object) -> Mechanism:
    """20 steps, of which one example takes part in ``bound``."""
    return mechanism(max_participations=bound, **changes)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[PrivacyLedger]:
    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    yield ledger
    ledger.close()


def charge(ledger: PrivacyLedger, run_id: str, step: int) -> float:
    receipt = receipt_of(ledger, ledger.charge(run_id, step, PARAMETERS, MANIFEST))
    assert (receipt.run_id, receipt.step) == (run_id, step)
    return receipt.charged_epsilon


def test_each_step_is_charged_recorded_and_receipted_and_those_beyond_the_bound_cost_nothing(ledger: PrivacyLedger):
    register(ledger, "run-a", sent())
    stated = [charge(ledger, "run-a", step) for step in range(20)]
    assert stated == pytest.approx([expected_epsilon(min(step + 1, BOUND)) for step in range(20)], rel=1e-9)
    recorded = [entry.event for entry in ledger.history() if isinstance(entry.event, StepCharged)]
    assert [event.step for event in recorded] == list(range(20))
    with pytest.raises(BudgetError, match="step"):
        ledger.charge("run-a", 20, PARAMETERS, MANIFEST)
    audit(ledger.history(), ledger.public_key)


def test_runs_of_one_account_pay_for_themselves_in_whatever_order_they_are_charged(ledger: PrivacyLedger):
    """The sum of their bounds limits what any example can have lost, whichever runs it took part in."""
    for run_id, each in (("sent-a", sent()), ("sent-b", sent(bound=2)), ("dataset", mechanism())):
        register(ledger, run_id, each)
    charged = dict.fromkeys(("sent-a", "sent-b", "dataset"), 0)
    for run_id in ("sent-a", "dataset", "sent-b", "sent-a", "sent-b", "sent-b", "dataset", *["sent-a"] * 5):
        stated = charge(ledger, run_id, charged[run_id])
        charged[run_id] += 1
        paid = min(charged["sent-a"], BOUND) + min(charged["sent-b"], 2) + charged["dataset"]
        assert stated == pytest.approx(expected_epsilon(paid), rel=1e-9)


def test_an_account_that_others_have_spent_still_admits_the_steps_that_cost_nothing(ledger: PrivacyLedger):
    register(ledger, "sent-a", sent())
    register(ledger, "sent-b", sent())
    register(ledger, "dataset", mechanism())
    for step in range(BOUND):
        charge(ledger, "sent-a", step)
    for step in range(affordable() - BOUND):
        charge(ledger, "dataset", step)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        charge(ledger, "sent-b", 0)
    assert charge(ledger, "sent-a", BOUND) == spent(ledger) <= CAP


def test_a_prepaid_run_pays_for_its_bound_at_once(ledger: PrivacyLedger):
    ledger.register_run(RegistrationTerms("run-a", "patients", (sent(),), MANIFEST, prepaid=True))
    assert spent(ledger) == pytest.approx(expected_epsilon(BOUND), rel=1e-9)


def test_an_account_of_pld_states_the_closed_form_of_as_many_gaussians_as_one_example_is_in(tmp_path: Path):
    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'pld.db'}")
    ledger.open_account("patients", OpeningTerms(CAP, DELTA, "pld"))
    register(ledger, "run-a", sent(accountant="pld"))
    stated = [charge(ledger, "run-a", step) for step in range(6)]
    exact = [pld.epsilon((Release(1.0, 2.6, min(step + 1, BOUND)),), accountant_delta(DELTA)) for step in range(6)]
    # An own account states what its quote or RDP gives, which is never less than the exact value.
    assert all(one <= other * (1 + 1e-9) for one, other in zip(exact, stated, strict=True))
    assert stated[BOUND - 1 :] == pytest.approx([exact[-1]] * (7 - BOUND), rel=1e-6)
    audit(ledger.history(), ledger.public_key)
    ledger.close()


def test_delta_pays_for_the_noise_of_every_step(tmp_path: Path):
    """An example is in k steps, but each step's noise is as far from its law as any other's."""
    assert delta_slack(sent(), CAP) == delta_slack(mechanism(), CAP)


def test_examples_that_a_step_has_no_room_for_are_cut_by_no_mechanism():
    check_claims("run-a", sent())
    with pytest.raises(BudgetError, match=r"mechanism_inconsistent: .* cuts batches to"):
        check_claims("run-a", sent(num_examples=801))
