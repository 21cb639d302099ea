"""The orchestrator's own evidence. Members appraise it by the run's policy before they send anything.

The orchestrator's signing key derives from the run secret and is in the manifest. Its presentation is made once per
execution, and binds that key, the run and the manifest into a quote. So it shows that the key was at work inside code
that the policy accepts, under this manifest. Evidence of another run, key or role is refused.
Not shown: that this still holds, because no member's challenge is in it. An attacker who takes the run secret out of
such a machine could continue elsewhere with earlier evidence.
"""

import secrets
from typing import Final

from raycloak.attestation.appraisal.appraisal import Appraisal, appraise
from raycloak.attestation.attester.attester import Attester, EvidenceSource
from raycloak.attestation.core.evidence import NONCE_BYTES, Challenge, CollateralBundle, Refusal, refuse
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.trust.floors import NO_FLOORS, Floors

ORCHESTRATOR: Final = "orchestrator"
"""The orchestrator's member id and role."""


def present_orchestrator(
    identity: IdentityKey, run_id: str, manifest_digest: bytes, source: EvidenceSource
) -> Envelope:
    """Make the evidence of ``source`` for the orchestrator with key ``identity``."""
    challenge = Challenge(
        nonce=secrets.token_bytes(NONCE_BYTES),
        run_id=run_id,
        member_id=ORCHESTRATOR,
        role=ORCHESTRATOR,
        manifest_digest=manifest_digest,
        expires_at=0,  # no book keeps this challenge
    )
    return Attester(ORCHESTRATOR, source, identity=identity).present(challenge, manifest_digest, b"")


def appraise_orchestrator(
    envelope: Envelope,
    *,
    orchestrator_key: bytes,
    run_id: str,
    manifest_digest: bytes,
    policy: Policy,
    collateral: CollateralBundle,
    now: int,
    floors: Floors = NO_FLOORS,
) -> Appraisal:
    """Judge the orchestrator's evidence at unix second ``now``.

    Guarantee: returns only if code that ``policy`` accepts bound ``orchestrator_key``, the manifest's, into a quote.
    The quote is for exactly this run and manifest, in the role of the orchestrator.

    Raises:
        EvidenceError: ``peer_not_bound`` if it is another orchestrator's, or as
        `raycloak.attestation.appraisal.appraisal.appraise`.
    """
    appraisal = appraise(
        envelope,
        run_id=run_id,
        member_id=ORCHESTRATOR,
        role=ORCHESTRATOR,
        manifest_digest=manifest_digest,
        policy=policy,
        collateral=collateral,
        now=now,
        floors=floors,
    )
    if appraisal.identity_key != orchestrator_key:
        refuse(Refusal.PEER_NOT_BOUND, "the orchestrator's evidence is for another key than the manifest's")
    return appraisal
