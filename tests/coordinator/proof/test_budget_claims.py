"""Claims about the budget where caps moved: whatever an honest account went through, it is proved."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.proof import budget_claims
from raycloak.coordinator.proof.case import ProofCase
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.mechanism import Mechanism
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, PARAMETERS, expected_epsilon, mechanism
from tests.coordinator.proof.proof_cases import Proved, joined, parts_of

CaseOf = Callable[[PrivacyLedger, Mechanism], ProofCase]


@pytest.fixture
def ledger(tmp_path) -> Iterator[PrivacyLedger]:
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.db'}")) as kept:
        yield kept


@pytest.fixture
def case_of(record: Proved) -> CaseOf:
    """Return the case of a run on account `patients`, whose ledger was accepted."""

    def make(ledger: PrivacyLedger, planned: Mechanism) -> ProofCase:
        contents = {
            "manifest.json": manifest_of(record, planned).encode() + b"\n",
            "ledger.jsonl": joined(ledger.extract("patients")),
        }
        case = ProofCase(parts_of(contents), record.trust.model_copy(update={"ledger": ledger.public_key}), None)
        budget_claims.ledger(case)
        return case

    return make


def manifest_of(record: Proved, planned: Mechanism) -> Manifest:
    computation = record.manifest.computation.model_copy(update={"mechanism": planned, "measurements": ()})
    manifest: Manifest = record.manifest.model_copy(update={"computation": computation, "account": "patients"})
    return manifest


def charge(ledger: PrivacyLedger, manifest: Manifest, steps: int) -> None:
    ledger.bind_data(manifest.run_id, manifest.digest(), DATA)
    for step in range(steps):
        ledger.charge(manifest.run_id, step, PARAMETERS, manifest.digest())


def test_a_cap_that_was_lowered_between_two_points_of_a_quote_leaves_the_epsilon_proved(ledger, case_of, record):
    """A pld account states the next point of its quote, and above the cap the charges themselves."""
    planned = mechanism(accountant="pld", steps=60, noise_multiplier=5.0, sigma=5.0 * 2**20 / 8**0.5 * 1.001)
    manifest = manifest_of(record, planned)
    ledger.open_account("patients", OpeningTerms(CAP, DELTA, "pld"))
    ledger.register_run(RegistrationTerms(manifest.run_id, "patients", (planned,), manifest.digest()))
    charge(ledger, manifest, 1)
    stated = ledger.view().accounts[0].spent_epsilon
    ledger.change_cap("patients", stated * 0.95)
    spent = ledger.view().accounts[0].spent_epsilon
    assert spent < stated
    assert budget_claims.epsilon(case_of(ledger, planned)).startswith(f"{epsilon_text(spent)} at delta")


def test_a_prepaid_run_that_was_charged_for_no_step_is_proved_to_have_cost_its_plan(ledger, case_of, record):
    planned = mechanism(steps=3)
    manifest = manifest_of(record, planned)
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms(manifest.run_id, "patients", (planned,), manifest.digest(), prepaid=True))
    assert budget_claims.epsilon(case_of(ledger, planned)).startswith(f"{epsilon_text(expected_epsilon(3))} at delta")
