"""The other members of a run as one worker knows them: their appraised evidence, and the secrets it shares with them.

A worker believes of a member only what evidence says that it appraised itself, by the admission that it was given.
"""

from collections.abc import Callable, Sequence

from raycloak.attestation.appraisal.appraisal import Appraisal, appraise
from raycloak.attestation.appraisal.enrolment import check_enrolment
from raycloak.attestation.appraisal.mutual import appraise_orchestrator
from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import Member, Roster
from raycloak.attestation.trust.floors import SeenFacts
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.messages import Admission
from raycloak.workers.vectors.masks import PairSecret, roster_masks
from raycloak.workers.vectors.payload import VerifiedAttempt


class Peers:
    """One worker's view of its peers. Expects rosters and attempts that are already verified.

    Args:
        attester: the worker's own keys.
        clock: seconds since the epoch.
    """

    def __init__(self, attester: Attester, clock: Callable[[], float]) -> None:
        self._attester = attester
        self._clock = clock
        self._seen = SeenFacts()
        self._appraisals: dict[bytes, Appraisal] = {}
        self._pairs: dict[tuple[str, bytes], PairSecret] = {}

    def appraise_orchestrator(self, admission: Admission) -> None:
        """Appraise the orchestrator of ``admission``; EvidenceError says why its evidence is refused."""
        manifest = admission.manifest
        appraisal = appraise_orchestrator(
            admission.orchestrator,
            orchestrator_key=manifest.orchestrator_key,
            run_id=manifest.run_id,
            manifest_digest=manifest.digest(),
            policy=admission.policy,
            collateral=admission.collateral,
            now=int(self._clock()),
            floors=self._seen.floors,
        )
        # Kept, so that no peer is judged by older collateral from now on.
        self._seen.keep(appraisal.facts)

    def appraise(self, roster: Roster, presentations: Sequence[Envelope], admission: Admission) -> None:
        """Appraise every member that the last roster did not have; a member without valid evidence refuses the step.

        Raises:
            EvidenceError: ``peer_not_bound``, ``peer_expired``, ``key_not_bound``, or why evidence is refused.
        """
        shown = {digest(envelope.body): envelope for envelope in presentations}
        now = int(self._clock())
        for member in roster.members:
            known = self._appraisals.get(member.evidence_digest)
            if known is None:
                if member.evidence_digest not in shown:
                    raise EvidenceError("peer_not_bound", f"no evidence of {member.member_id} was shown")
                known = self._appraise(roster, member, shown[member.evidence_digest], admission, now)
                self._appraisals[member.evidence_digest] = known
            # Also for known evidence: an appraisal is kept over steps, and ages meanwhile.
            if known.expires_at <= now:
                raise EvidenceError("peer_expired", f"the evidence of {member.member_id} is too old")
            if (known.member_id, known.role) != (member.member_id, member.role):
                raise EvidenceError("peer_not_bound", f"the evidence shown for {member.member_id} is another member's")
            if (known.mask_key, known.identity_key) != (member.mask_key, member.identity_key):
                raise EvidenceError("key_not_bound", f"the roster's keys of {member.member_id} are not its evidence's")
        check_enrolment([self._appraisals[member.evidence_digest] for member in roster.members], admission.policy)
        # Members present themselves again every epoch: appraisals of earlier evidence would pile up.
        self._appraisals = {
            member.evidence_digest: self._appraisals[member.evidence_digest] for member in roster.members
        }

    def _appraise(
        self, roster: Roster, member: Member, envelope: Envelope, admission: Admission, now: int
    ) -> Appraisal:
        appraisal = appraise(
            envelope,
            run_id=roster.run_id,
            member_id=member.member_id,
            role=member.role,
            manifest_digest=roster.manifest_digest,
            policy=admission.policy,
            collateral=admission.collateral,
            now=now,
            floors=self._seen.floors,
        )
        self._seen.keep(appraisal.facts)
        return appraisal

    def meet(self, roster: Roster) -> None:
        """Forget workers that the roster does not have, and agree on a secret with each newcomer."""
        own = roster.member(self._attester.member_id)
        peers = {member.member_id: member for member in roster.workers if member.member_id != own.member_id}
        # By id and key: a replacement under an old id has another key, and needs another secret.
        self._pairs = {
            place: pair for place, pair in self._pairs.items() if place in {(i, m.mask_key) for i, m in peers.items()}
        }
        for peer_id, peer in peers.items():
            if (peer_id, peer.mask_key) not in self._pairs:
                self._pairs[peer_id, peer.mask_key] = PairSecret(
                    self._attester.agreement,
                    own,
                    peer,
                    run_id=roster.run_id,
                    manifest_digest=roster.manifest_digest,
                )

    def masks(self, attempt: VerifiedAttempt) -> Sequence[Sequence[tuple[Secret, int]]]:
        """Return (key, sign) towards every other worker, per range; see
        `raycloak.workers.vectors.masks.roster_masks`."""
        return roster_masks(
            {peer_id: pair for (peer_id, _), pair in self._pairs.items()},
            attempt.roster,
            self._attester.member_id,
            parameter_digest=attempt.parameter_digest,
            ranges=attempt.ranges,
        )
