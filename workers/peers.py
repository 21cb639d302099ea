"""The other members of a run as one worker knows them: their appraised evidence, and the secrets it shares with them.

A worker believes about a member only what its evidence says. It appraises that evidence itself, by the admission that
it was given.
"""

from collections.abc import Callable, Sequence

from raycloak.attestation.appraisal.appraisal import Appraisal, appraise
from raycloak.attestation.appraisal.enrolment import check_enrolment
from raycloak.attestation.appraisal.mutual import appraise_orchestrator
from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.mask_graph import MaskGraph
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import Roster
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
        """Appraise the members that this worker deals with: itself, its neighbours in the mask graph, the aggregators.

        Guarantee: no mask and no tag is ever made for a member without valid evidence. An appraisal is kept while its
        member stays near.

        Raises:
            EvidenceError: ``peer_not_bound``, ``peer_expired``, ``key_not_bound``, or why evidence is refused.
        """
        shown = {digest(envelope.body): envelope for envelope in presentations}
        now = int(self._clock())
        own_id = self._attester.member_id
        near = (roster.member(own_id), *MaskGraph(roster).neighbours(own_id), *roster.aggregators)
        for member in near:
            known = self._appraisals.get(member.evidence_digest)
            if known is None:
                if member.evidence_digest not in shown:
                    raise EvidenceError("peer_not_bound", f"no evidence of {member.member_id} was shown")
                known = appraise(
                    shown[member.evidence_digest],
                    run_id=roster.run_id,
                    member_id=member.member_id,
                    role=member.role,
                    manifest_digest=roster.manifest_digest,
                    policy=admission.policy,
                    collateral=admission.collateral,
                    now=now,
                    floors=self._seen.floors,
                )
                self._seen.keep(known.facts)
                self._appraisals[member.evidence_digest] = known
            # Also for known evidence: an appraisal is kept over steps, and ages meanwhile.
            if known.expires_at <= now:
                raise EvidenceError("peer_expired", f"the evidence of {member.member_id} is too old")
            if (known.member_id, known.role) != (member.member_id, member.role):
                raise EvidenceError("peer_not_bound", f"the evidence shown for {member.member_id} is another member's")
            if (known.mask_key, known.identity_key) != (member.mask_key, member.identity_key):
                raise EvidenceError("key_not_bound", f"the roster's keys of {member.member_id} are not its evidence's")
        check_enrolment([self._appraisals[member.evidence_digest] for member in near], admission.policy)
        # Members present themselves again every epoch: appraisals of earlier evidence would pile up.
        self._appraisals = {member.evidence_digest: self._appraisals[member.evidence_digest] for member in near}

    def meet(self, roster: Roster) -> None:
        """Forget workers that the roster does not have, agree on a secret with each newcomer, and ratchet all secrets.

        All, also those that no mask needs now: an old secret that was kept would tell the masks of earlier steps.
        """
        own = roster.member(self._attester.member_id)
        # By id and key: a replacement under an old id has another key, and needs another secret.
        peers = {(each.member_id, each.mask_key): each for each in roster.workers if each.member_id != own.member_id}
        self._pairs = {place: pair for place, pair in self._pairs.items() if place in peers}
        for place, peer in peers.items():
            if place not in self._pairs:
                self._pairs[place] = PairSecret(
                    self._attester.agreement,
                    own,
                    peer,
                    run_id=roster.run_id,
                    manifest_digest=roster.manifest_digest,
                )
            self._pairs[place].advance_to(roster.ratchet)

    def masks(self, attempt: VerifiedAttempt) -> Sequence[Sequence[tuple[Secret, int]]]:
        """Return (key, sign) towards every neighbour, per range; see
        `raycloak.workers.vectors.masks.roster_masks`."""
        return roster_masks(
            {peer_id: pair for (peer_id, _), pair in self._pairs.items()},
            attempt.roster,
            self._attester.member_id,
            input_digest=attempt.input_digest,
            ranges=attempt.ranges,
        )
