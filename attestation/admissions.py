"""Admissions: who presented accepted evidence in this session, and still has it.

Nonce, decision and log entry of an admission are one transaction, and a member is admitted once they are on disk.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

from attestation.appraisal import Appraisal, appraise, open_presentation
from attestation.eat import claims_set
from attestation.enrolment import Enrolment
from attestation.evidence import Challenge, CollateralBundle, Presentation, Role
from attestation.evidence_log import EvidenceLog
from attestation.messages import Envelope
from attestation.nonce_book import NonceBook
from attestation.orchestrator_state import MemberRow, OrchestratorState
from attestation.refusal_log import RefusalLog
from attestation.revocations import Revocations
from attestation.roster import Member
from attestation.run_terms import OBSERVER, RunTerms
from metrics.errors import EvidenceError

MAX_OBSERVERS: Final = 256
MAX_PASSING: Final = 4096
"""Members at a time that nothing depends on; see `RunTerms.lasting`."""

RENEWED_AFTER = 2 / 3
"""Share of its life after which evidence is renewed; the rest is for members that are slow to answer."""


@dataclass(frozen=True, slots=True)
class OrchestratorView:
    """What may be shown of the orchestrator at any time."""

    admitted: Mapping[str, str]
    evidence_class: str
    earliest_expiry: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MemberReview:
    """What has to be done about the members of a session.

    Attributes:
        revoked: (member id, message) of members that were revoked since they were admitted.
        renew_in_s: seconds until the first of the others should present anew; not above zero if it should now.
    """

    revoked: tuple[tuple[str, str], ...]
    renew_in_s: float

    @property
    def ages(self) -> bool:
        """Whether fresh evidence is needed now."""
        return self.renew_in_s <= 0


@dataclass(slots=True)
class Admitted:
    """A member: the result of its appraisal, what it presented, what is kept of it, and when it was appraised."""

    appraisal: Appraisal
    presentation: Presentation
    row: MemberRow
    since: int


class Admissions:
    """The members of one session.

    Args:
        transaction: opens a transaction of the session that asks.
        clock: unix seconds.
    """

    def __init__(
        self,
        state: OrchestratorState,
        log: EvidenceLog,
        refusals: RefusalLog,
        transaction: Callable[[], AbstractContextManager[None]],
        run_id: str,
        clock: Callable[[], int],
    ) -> None:
        self._transaction = transaction
        self._state = state
        self._log = log
        self._refusals = refusals
        self._nonces = NonceBook(state.db)
        self._facts = state.facts
        self._revocations = Revocations(state.db, log, state.transactions)
        self._run_id = run_id
        self._clock = clock
        self._members: dict[str, Admitted] = {}
        self._enrolment = Enrolment()
        self._swept_at = 0

    def begin(self, terms: RunTerms) -> None:
        """Take back who was admitted in this session; whose evidence is not accepted any more must present anew."""
        self._terms, self._members, self._enrolment = terms, {}, Enrolment()
        self._nonces.forget_expired(self._clock())
        with self._state.transaction():
            known = [row for row in self._state.members() if not self._is_over(row)]
        for row in known:
            try:
                presentation = open_presentation(row.presentation)
                self._facts.check_clock(self._clock())
                appraisal = self._appraise(row.presentation, presentation)
            except EvidenceError:
                continue
            # The evidence is no younger than it was: appraising it again must not prolong it.
            appraisal = replace(appraisal, expires_at=min(row.expires_at, appraisal.expires_at))
            self._enter(Admitted(appraisal, presentation, row, self._clock()))

    def take_collateral(self, collateral: CollateralBundle) -> None:
        """See `attestation.orchestrator.EvidenceOrchestrator.take_collateral`."""
        self._terms = replace(self._terms, collateral=collateral)

    def end_session(self) -> None:
        """Take back the challenges of a session that is over, in a transaction of the caller's."""
        self._nonces.forget_unused()

    def challenge(self, member_id: str, role: Role, identity_key: bytes = b"") -> Challenge:
        """See `attestation.orchestrator.EvidenceOrchestrator.challenge`."""
        with self._transaction():
            if member_id in self._members:
                self.keep(replace(self._members[member_id].row, superseded=True))
            return self._nonces.issue(
                run_id=self._run_id,
                member_id=member_id,
                role=role,
                manifest_digest=self._terms.manifest_digest,
                now=self._clock(),
                identity_key=identity_key,
            )

    def admit(self, envelope: Envelope) -> Appraisal:
        """See `attestation.orchestrator.EvidenceOrchestrator.admit`."""
        admitted: Admitted | EvidenceError | None = self._admitted_by(envelope)
        if admitted is None:
            with self._transaction():
                admitted = self._decide(envelope)
        if isinstance(admitted, EvidenceError):
            raise admitted
        self._enter(admitted)
        return admitted.appraisal

    def find(self, member_id: str) -> Admitted | None:
        """The member, if it is admitted and nobody has revoked it since; its evidence may have expired."""
        admitted = self._members.get(member_id)
        return None if admitted is None or self._revoked(admitted) else admitted

    def entry(self, member_id: str, virtual_workers: tuple[int, ...]) -> Member:
        """The member as rosters and orders name it; EvidenceError ``evidence_expired`` without valid evidence."""
        admitted = self.find(member_id)
        if admitted is None or admitted.appraisal.expires_at <= self._clock():
            raise EvidenceError("evidence_expired", f"{member_id} has no valid evidence", "Present fresh evidence.")
        return Member(
            member_id=member_id,
            role=admitted.appraisal.role,
            mask_key=admitted.presentation.mask_key,
            identity_key=admitted.presentation.identity_key,
            evidence_digest=admitted.appraisal.evidence_digest,
            virtual_workers=tuple(sorted(virtual_workers)),
            joined=admitted.row.joined,
        )

    def keep(self, row: MemberRow) -> None:
        """Note what a member's evidence has served, in a transaction of the caller's."""
        self._state.mark_member(row)
        self._members[row.member_id].row = row

    def expel(self, member_id: str, cause: str) -> None:
        """See `attestation.orchestrator.EvidenceOrchestrator.expel`."""
        if self._members.pop(member_id, None) is not None:
            self._enrolment.drop(member_id)
            with self._transaction():
                self._state.drop_member(member_id)
                self._log.append("expelled", {"member_id": member_id, "cause": cause})

    def review(self) -> MemberReview:
        """See `attestation.orchestrator.EvidenceOrchestrator.review`; in a transaction of the caller's."""
        self._revocations.record()
        refusals = {i: self._revoked(each) for i, each in self._participants()}
        ages = [
            each.since + RENEWED_AFTER * (each.appraisal.expires_at - each.since)
            for i, each in self._participants()
            if refusals[i] is None
        ]
        revoked = tuple((i, refusal.message) for i, refusal in refusals.items() if refusal is not None)
        return MemberReview(revoked, min(ages, default=math.inf) - self._clock())

    def view(self) -> OrchestratorView:
        """Facts for metrics: members that take part by role, evidence class, earliest expiry per role."""
        members = [admitted.appraisal for _, admitted in self._participants()]
        expiry: dict[str, int] = {}
        for appraisal in members:
            expiry[appraisal.role] = min(appraisal.expires_at, expiry.get(appraisal.role, appraisal.expires_at))
        classes = sorted({each for appraisal in members for each in appraisal.evidence_classes})
        return OrchestratorView(
            admitted={a.member_id: a.role for a in members},
            evidence_class="+".join(classes),
            earliest_expiry=expiry,
        )

    def _enter(self, admitted: Admitted) -> None:
        if self._terms.lasting is not None:
            self._members.pop(admitted.row.member_id, None)  # so that whoever came first is the first of them
        self._members[admitted.row.member_id] = admitted
        self._enrolment.put(admitted.appraisal)

    def _participants(self) -> Iterator[tuple[str, Admitted]]:
        """Everybody but observers, who renew their evidence themselves, or not."""
        return ((i, each) for i, each in list(self._members.items()) if each.appraisal.role != OBSERVER)

    def _make_room(self, newcomer: Appraisal) -> None:
        """Forget observers whose evidence expired; EvidenceError ``busy`` if there are too many for another one."""
        if newcomer.role != OBSERVER:
            return
        known = {i: each.appraisal for i, each in self._members.items() if each.appraisal.role == OBSERVER}
        expired = {i for i, appraisal in known.items() if appraisal.expires_at <= self._clock()}
        for member_id in expired:
            self._forget(member_id)
        if len(known.keys() - expired - {newcomer.member_id}) >= MAX_OBSERVERS:
            raise EvidenceError("busy", f"there are {MAX_OBSERVERS} observers already.", "Ask again later.")

    def _forget_passing(self) -> None:
        """Forget who does not last once its evidence expired, and the oldest where there are too many.

        Guarantee: once a second at most, and then there are no more than ``MAX_PASSING`` of them, here and on disk.
        """
        now = self._clock()
        if self._terms.lasting is None or now == self._swept_at:
            return
        self._swept_at = now
        passing = [(i, each.appraisal) for i, each in self._participants() if not self._terms.lasts(i)]
        valid = [i for i, appraisal in passing if appraisal.expires_at > now]
        for member_id in {i for i, _ in passing}.difference(valid):
            self._forget(member_id)
        for member_id in valid[: max(0, len(valid) - MAX_PASSING)]:
            self._forget(member_id)
            self._log.append("expelled", {"member_id": member_id, "cause": f"{MAX_PASSING} attested after it"})

    def _is_over(self, row: MemberRow) -> bool:
        """Whether the evidence in a row has expired; forgets who does not last, in a transaction of the caller's."""
        if row.expires_at > self._clock():
            return False
        if not self._terms.lasts(row.member_id):
            self._state.drop_member(row.member_id)
        return True

    def _displace(self, newcomer: Appraisal) -> None:
        """Forget who is in the way of ``newcomer``, where the terms say so; in a transaction of the caller's."""
        if self._terms.displaces:
            for member_id in self._enrolment.in_the_way(newcomer, self._terms.policy):
                self._forget(member_id)
                cause = f"{newcomer.member_id} attested on its machine"
                self._log.append("expelled", {"member_id": member_id, "cause": cause})

    def _forget(self, member_id: str) -> None:
        self._state.drop_member(member_id)
        del self._members[member_id]
        self._enrolment.drop(member_id)

    def _revoked(self, admitted: Admitted) -> EvidenceError | None:
        return self._revocations.find(admitted.appraisal.member_id, admitted.appraisal.platform_id)

    def _admitted_by(self, envelope: Envelope) -> Admitted | None:
        """The member that this very presentation has admitted, unless a newer challenge asks it for another."""
        try:
            member = self._members.get(open_presentation(envelope).member_id)
        except EvidenceError:
            return None  # The decision says why.
        if member is None or member.row.presentation != envelope or member.row.superseded:
            return None
        return member

    def _decide(self, envelope: Envelope) -> Admitted | EvidenceError:
        """Use up the nonce, appraise, and log the decision; see `attestation.refusal_log` for refusals."""
        claimed = ""
        try:
            presentation = open_presentation(envelope)
            claimed = presentation.member_id
            self._nonces.consume(presentation, self._clock())
            self._facts.check_clock(self._clock())
            appraisal = self._appraise(envelope, presentation)
            self._facts.keep(appraisal.facts)
            self._make_room(appraisal)
            self._forget_passing()
            if (revoked := self._revocations.find(claimed, appraisal.platform_id)) is not None:
                raise revoked
            self._displace(appraisal)
            self._enrolment.check(appraisal, self._terms.policy)
        except EvidenceError as refusal:
            self._refusals.append("refused", claimed, refusal.code)
            return refusal
        self._log.append(
            "admitted",
            {
                "member_id": claimed,
                "role": appraisal.role,
                "evidence_class": appraisal.evidence_class,
                "evidence_digest": appraisal.evidence_digest.hex(),
                "platform_id": appraisal.platform_id.hex(),
                "identity_key": presentation.identity_key.hex(),
                "mask_key": presentation.mask_key.hex(),
                "expires_at": appraisal.expires_at,
                "claims": claims_set(appraisal),
            },
        )
        known = self._members.get(claimed)
        joined = known.row.joined if known else self._state.ratchet
        row = MemberRow(claimed, envelope, appraisal.expires_at, joined)
        self._state.keep_member(row)
        return Admitted(appraisal, presentation, row, self._clock())

    def _appraise(self, envelope: Envelope, presentation: Presentation) -> Appraisal:
        appraisal = appraise(
            envelope,
            run_id=self._run_id,
            member_id=presentation.member_id,
            role=presentation.role,
            manifest_digest=self._terms.manifest_digest,
            policy=self._terms.policy,
            collateral=self._terms.collateral,
            now=self._clock(),
            floors=self._facts.floors(),
        )
        if presentation.role == "worker" and presentation.known_answer != self._terms.known_answer:
            raise EvidenceError(
                "numerics_mismatch",
                f"{presentation.member_id} computes other bytes than this run's numerics class",
                "Run all workers on the same device model, instruction set and library versions.",
            )
        return appraisal
