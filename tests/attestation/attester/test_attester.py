"""The attesting side: its evidence binds its keys, and a restarted actor has new ones."""

from dataclasses import dataclass

import pytest

from raycloak.attestation.attester.attester import Attester, CpuEvidence
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import Challenge, Presentation
from raycloak.attestation.core.messages import open_envelope, seal
from raycloak.attestation.simulators.tdx_platform import SimulatedPlatform
from raycloak.metrics.errors import EvidenceError, ProtocolError
from tests.attestation.conftest import MANIFEST, MEASUREMENT, NOW, RUN, Session


@dataclass(frozen=True)
class Source:
    """A platform that runs the measured code."""

    platform: SimulatedPlatform

    def collect(self, report_data: bytes) -> CpuEvidence:
        return CpuEvidence(self.platform.quote(report_data, MEASUREMENT))


def challenge(**changes) -> Challenge:
    fields = {
        "nonce": b"n" * 32,
        "run_id": RUN,
        "member_id": "worker-0",
        "role": "worker",
        "manifest_digest": MANIFEST,
        "expires_at": NOW + 60,
    }
    return Challenge(**fields | changes)


@pytest.fixture
def attester(session: Session) -> Attester:
    return Attester("worker-0", Source(session.platform))


def test_its_evidence_is_accepted_and_binds_its_keys(session, attester):
    envelope = attester.present(challenge(), MANIFEST, b"k" * 32)
    appraisal = session.appraise(envelope)
    assert appraisal.identity_key == attester.identity.public
    assert appraisal.mask_key == attester.agreement.public
    assert appraisal.mask_key == attester.agreement.public
    assert appraisal.known_answer == b"k" * 32
    assert attester.evidence_digest == digest(envelope.body) == appraisal.evidence_digest


def test_it_answers_in_the_role_it_was_challenged_in(session):
    attester = Attester("aggregator-0", Source(session.platform))
    envelope = attester.present(challenge(member_id="aggregator-0", role="aggregator"), MANIFEST, b"")
    assert session.appraise(envelope, member_id="aggregator-0", role="aggregator").role == "aggregator"


@pytest.mark.parametrize("changes", [{"member_id": "worker-1"}, {"manifest_digest": bytes(32)}])
def test_a_challenge_for_another_member_or_manifest_is_not_answered(attester, changes):
    with pytest.raises(ProtocolError) as error:
        attester.present(challenge(**changes), MANIFEST, b"k" * 32)
    assert error.value.code == "challenge_mismatch"
    assert attester.evidence_digest == b""


def test_each_incarnation_has_keys_of_its_own(session, attester):
    again = Attester("worker-0", Source(session.platform))
    for name in ("identity", "agreement", "hpke"):
        assert getattr(attester, name).public != getattr(again, name).public


def test_keys_swapped_after_the_quote_are_not_bound(session, attester):
    """Somebody else's key over honest evidence: signed by the honest worker, or by the thief himself."""
    thief = Attester("worker-0", Source(session.platform))
    envelope = attester.present(challenge(), MANIFEST, b"k" * 32)
    honest = open_envelope(Presentation, envelope, attester.identity.public)
    for changes, signer in (
        ({"mask_key": thief.agreement.public}, attester),
        ({"hpke_key": thief.hpke.public}, attester),
        ({"identity_key": thief.identity.public}, thief),
    ):
        swapped = seal(honest.model_copy(update=changes), signer.identity)
        with pytest.raises(EvidenceError) as error:
            session.appraise(swapped)
        assert error.value.code == "key_not_bound"
    stolen = envelope.model_copy(update={"signature": thief.identity.sign(envelope.body)})
    with pytest.raises(EvidenceError) as error:
        session.appraise(stolen)
    assert error.value.code == "peer_not_bound"
