"""Runs from before and after a rotation of their ledger's key are proved, whichever of its keys an auditor trusts."""

from contextlib import closing

import pytest

from raycloak.attestation.core.keys import IdentityKey
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.proof import budget_claims, run_claims
from raycloak.coordinator.proof.bundle import RecordParts
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.claims import Broken
from raycloak.coordinator.proof.gather import gather, trust_of
from raycloak.coordinator.proof.trust import Trust
from raycloak.coordinator.proof.verify import verify_parts
from raycloak.coordinator.training.assignment import ResumedRun
from raycloak.metrics.errors import RefusedError
from tests.coordinator.proof.proof_cases import packed, proved, train, whole

LATER = "cd" * 32
SMALL = {"steps": 2, "measurements": {}}


def failed(parts: RecordParts, trust: Trust, ledger: bytes) -> dict[str, str]:
    """Return the claims that an auditor who trusts this key of the ledger finds wrong."""
    report = verify_parts(parts, trust.model_copy(update={"ledger": ledger}))
    return {claim.name: claim.says for claim in report.failed}


def test_runs_from_before_and_after_a_rotation_are_proved_to_who_trusts_either_key(tmp_path, monkeypatch):
    first = proved(tmp_path, train(tmp_path, **SMALL))
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")) as ledger:
        former, new = ledger.public_key, ledger.rotate_key()
    # It cannot go on: its manifest is of the former key.
    with pytest.raises(RefusedError, match=r"resume_differs.*ledger_key"):
        whole(tmp_path, assignment=ResumedRun(first.manifest, packed(tmp_path)), **SMALL).train()
    second = proved(tmp_path, train(tmp_path, secret=LATER, ledger={"account": first.manifest.account}, **SMALL), LATER)
    assert (first.manifest.ledger_key, second.manifest.ledger_key) == (former, new)
    # The orchestrator needs no rotation: each run has keys of its own.
    assert first.manifest.log_owner != second.manifest.log_owner
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path))
    _, again = gather(first.folder)
    assert trust_of(first.folder).ledger == new
    for key in (former, new):
        for parts, trust in ((again, first.trust), (second.parts, second.trust)):
            assert failed(parts, trust, key) == {}
    # What was gathered before has no word of the new key.
    assert failed(first.parts, first.trust, former) == {}
    assert "manifest" in failed(first.parts, first.trust, new)
    assert "manifest" in failed(again, first.trust, IdentityKey.generate().public)
    case = ProofCase(second.parts, second.trust, None)
    for derive in (run_claims.manifest, run_claims.log, budget_claims.ledger):
        derive(case)
    assert [len(run.charges["gradient"]) for run in case.extract.audited.runs.values()] == [2, 2]
    # Its workers would have taken receipts of the former key, after somebody else had found that.
    case.manifest = second.manifest.model_copy(update={"ledger_key": former})
    case.run.registered = case.run.registered.model_copy(update={"manifest_digest": case.manifest.digest()})
    assert run_claims.manifest(case)
    with pytest.raises(Broken, match="it registers the run with another ledger key"):
        run_claims.contract(case)
