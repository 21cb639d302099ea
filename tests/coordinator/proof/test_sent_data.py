"""What a proof says of data that a client sends: what was charged, and whose word the bound is."""

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from raycloak.coordinator.accounting.calibration import composed_epsilon
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.config import home
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.proof.budget_claims import epsilon, ledger
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.claims import ClaimOutcome
from raycloak.coordinator.proof.verify import LIMITS, verify_parts
from raycloak.coordinator.training.assignment import NewRun
from raycloak.workers.terms.manifest import Manifest
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, PARAMETERS, expected_epsilon, mechanism
from tests.coordinator.proof.proof_cases import CHECKPOINT, STEPS, Proved, joined, packed, parts_of, proved
from tests.owner import key_service
from tests.protocol import whole_run
from tests.sent import PRIVATE, Client, examples, fields

BOUND, CHARGED = 3, 7


@pytest.fixture
def case(record: Proved, tmp_path) -> Iterator[ProofCase]:
    """The manifest and the account of a run whose client sends examples; seven of its steps were charged."""
    sent = mechanism(max_participations=BOUND)
    computation = record.manifest.computation.model_copy(update={"mechanism": sent, "measurements": ()})
    manifest: Manifest = record.manifest.model_copy(update={"computation": computation, "account": "patients"})
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.db'}")) as kept:
        kept.open_account("patients", OpeningTerms(CAP, DELTA))
        kept.register_run(RegistrationTerms(manifest.run_id, "patients", (sent,), manifest.digest()))
        kept.bind_data(manifest.run_id, manifest.digest(), DATA)
        for step in range(CHARGED):
            kept.charge(manifest.run_id, step, PARAMETERS, manifest.digest())
        contents = {"manifest.json": manifest.encode() + b"\n", "ledger.jsonl": joined(kept.extract("patients"))}
        trust = record.trust.model_copy(update={"ledger": kept.public_key})
        yield ProofCase(parts_of(contents), trust, None)


def test_the_epsilon_of_bounded_participations_is_derived_again_and_said_with_whose_word_it_rests_on(case: ProofCase):
    ledger(case)
    said = epsilon(case)
    assert said.startswith(f"{epsilon_text(expected_epsilon(BOUND))} at delta {DELTA:g}")
    assert "no amplification is claimed" in said
    assert f"at most {BOUND} of 20 steps is the service's word" in said
    assert any("no example took part in more steps than the manifest's bound" in limit for limit in LIMITS)


def test_the_claim_of_a_run_beyond_its_bound_is_its_whole_plans(case: ProofCase):
    ledger(case)
    assert case.own_claim.within == case.own_claim.whole > 0


def test_a_run_on_a_dataset_says_nothing_of_a_bound(record: Proved):
    case = ProofCase(record.parts, record.trust, None)
    ledger(case)
    assert "word" not in epsilon(case)


def test_a_whole_run_on_sent_data_is_charged_for_its_bound_and_its_files_say_so(tmp_path):
    """Four steps with the same example in two of them; the verdict repeats the bound of the signed manifest."""
    with key_service(tmp_path) as owner:
        client = Client(owner, tmp_path, {step: [examples(step % 2)] for step in range(STEPS)})
        options = {"assignment": NewRun(packed(home.home())), "checkpoint": CHECKPOINT.model_dump(), "steps": STEPS}
        run = whole_run(home.home(), pace=client, **fields(owner), **options)
        run.train()
    made = proved(home.home(), run)
    verdict = json.loads(made.contents["verdict.json"])
    alone = composed_epsilon((Release(1.0, PRIVATE["noise_multiplier"], 2),), 1e-5, "pld")
    assert (verdict["steps"], verdict["max_participations"]) == (STEPS, 2)
    assert verdict["privacy_epsilon_charged"] == pytest.approx(alone, rel=1e-3)
    claims = {claim.name: claim for claim in verify_parts(made.parts, made.trust).claims}
    assert claims["epsilon"].outcome is ClaimOutcome.PROVED
    assert f"at most 2 of {STEPS} steps is the service's word" in claims["epsilon"].says
    assert "nobody signs it" in claims["verdict.json"].says
    forged = made.contents["verdict.json"].replace(b'"max_participations": 2', b'"max_participations": 1')
    assert forged != made.contents["verdict.json"]
    claims = {
        claim.name: claim
        for claim in verify_parts(parts_of(made.contents | {"verdict.json": forged}), made.trust).claims
    }
    assert "states max_participations 1, the signed records 2" in claims["verdict.json"].says
