"""Members appraise the orchestrator's own evidence before they send anything."""

import pytest

from raycloak.attestation.appraisal.mutual import ORCHESTRATOR, appraise_orchestrator, present_orchestrator
from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.evidence import Challenge, EvidenceClass
from raycloak.attestation.core.keys import IdentityKey
from raycloak.metrics.errors import EvidenceError
from tests.anchors import INTEL_TDX_ANCHOR
from tests.attestation.attester.test_attester import Source
from tests.attestation.conftest import MANIFEST, NOW, RUN

KEY = IdentityKey.generate()


@pytest.fixture
def source(session):
    return Source(session.platform)


def appraised(session, envelope, **changes):
    arguments = {
        "orchestrator_key": KEY.public,
        "run_id": RUN,
        "manifest_digest": MANIFEST,
        "policy": session.policy,
        "collateral": session.collateral,
        "now": NOW,
    }
    return appraise_orchestrator(envelope, **arguments | changes)


def refusal(session, envelope, **changes):
    with pytest.raises(EvidenceError) as error:
        appraised(session, envelope, **changes)
    return error.value.code


def test_the_orchestrators_evidence_binds_its_key_run_and_manifest(session, source):
    envelope = present_orchestrator(KEY, RUN, MANIFEST, source)
    appraisal = appraised(session, envelope)
    assert (appraisal.member_id, appraisal.role, appraisal.identity_key) == (ORCHESTRATOR, ORCHESTRATOR, KEY.public)
    assert refusal(session, envelope, orchestrator_key=IdentityKey.generate().public) == "peer_not_bound"
    assert refusal(session, envelope, run_id="run-2") == "nonce_foreign"
    assert refusal(session, envelope, manifest_digest=b"x" * 32) == "nonce_foreign"


def test_evidence_of_a_worker_or_an_aggregator_does_not_serve_for_the_orchestrator(session, source):
    for role, answer in (("worker", b"k" * 32), ("aggregator", b"")):
        fields = {"nonce": b"n" * 32, "run_id": RUN, "manifest_digest": MANIFEST, "expires_at": 0}
        challenge = Challenge(member_id=ORCHESTRATOR, role=role, **fields)
        member = Attester(ORCHESTRATOR, source, identity=KEY)
        assert refusal(session, member.present(challenge, MANIFEST, answer)) == "nonce_foreign"


def test_a_simulated_orchestrator_does_not_pass_a_policy_for_hardware(session, source):
    changes = {
        "accepted_classes": (EvidenceClass.INTEL_TDX,),
        "anchors": (*session.policy.anchors, INTEL_TDX_ANCHOR),
    }
    policy = session.policy.model_copy(update=changes)
    envelope = present_orchestrator(KEY, RUN, MANIFEST, source)
    assert refusal(session, envelope, policy=policy) == "simulator_not_allowed"
