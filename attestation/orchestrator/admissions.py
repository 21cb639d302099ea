"""Admissions: the members of a session, each with accepted evidence.

The nonce, decision and log entry of an admission share one transaction. A member is admitted once they are on disk.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pydantic import JsonValue

from raycloak.attestation.appraisal.appraisal import Appraisal, appraise, open_presentation
from raycloak.attestation.appraisal.eat import claims_set
from raycloak.attestation.appraisal.enrolment import Enrolment
from raycloak.attestation.collateral.keeper import ends_at
from raycloak.attestation.core.evidence import Challenge, CollateralBundle, Links, Presentation, Role
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import Member
from raycloak.attestation.gpu.switches import weakest_links
from raycloak.attestation.keys.release import KeyContract
from raycloak.attestation.orchestrator.documents import Document
from raycloak.attestation.orchestrator.hosting import RunHosting
from raycloak.attestation.orchestrator.run_terms import OBSERVER, RunTerms
from raycloak.attestation.orchestrator.state import MemberRow, SessionId
from raycloak.metrics.errors import EvidenceError

if TYPE_CHECKING:
    from raycloak.attestation.orchestrator.orchestrator import OpenRun

# Anybody with accepted evidence may observe, so their number bounds the memory that they take.
MAX_OBSERVERS: Final = 256
# Members that the run does not depend on; see `RunTerms.lasting`. Anybody with accepted evidence may become one.
MAX_PASSING: Final = 4096
# Share of its life after which evidence is renewed; the rest is for members that are slow to answer.
RENEWED_AFTER: Final = 2 / 3


@dataclass(frozen=True, slots=True)
class OrchestratorView:
    """The members of a session, as metrics show them.

    Attributes:
        links: between the GPUs of a member, the weakest that is known of; None if no member showed a GPU.
        collateral_ends: unix second at which the collateral in use ends; 0 if it does not say.
    """

    admitted: Mapping[str, str]
    evidence_class: str
    earliest_expiry: Mapping[str, int]
    links: Links | None = None
    collateral_ends: int = 0


@dataclass(frozen=True, slots=True)
class MemberReview:
    """The members of a session that need attention.

    Attributes:
        revoked: (member id, message) of members that were revoked since they were admitted.
        renew_in_s: seconds until the first other member should present again, zero or less if it should now; None if
            no member needs to.
    """

    revoked: tuple[tuple[str, str], ...]
    renew_in_s: float | None

    @property
    def ages(self) -> bool:
        """Return whether a member needs fresh evidence now."""
        return self.renew_in_s is not None and self.renew_in_s <= 0


@dataclass(slots=True)
class AdmittedMember:
    """An admitted member.

    Attributes:
        row: the part that is on disk.
        since: unix seconds of its appraisal.
    """

    appraisal: Appraisal
    presentation: Presentation
    row: MemberRow
    since: int


def admitted_body(appraisal: Appraisal, appraised_at: int, collateral: bytes) -> dict[str, JsonValue]:
    """Return the body of the log entry, kind ``admitted``, that records an admission.

    Args:
        appraised_at: unix seconds at which the evidence was judged.
        collateral: name of the document it was judged by.
    """
    return {
        "member_id": appraisal.member_id,
        "appraised_at": appraised_at,
        "collateral": collateral.hex(),
        "role": appraisal.role,
        "evidence_class": appraisal.evidence_class,
        "evidence_digest": appraisal.evidence_digest.hex(),
        "platform_id": appraisal.platform_id.hex(),
        "gpus": [gpu.platform_id.hex() for gpu in appraisal.gpus],
        # Left out where it has nothing to say, like the claims about them.
        **({"switches": [each.platform_id.hex() for each in appraisal.switches]} if appraisal.switches else {}),
        "identity_key": appraisal.identity_key.hex(),
        "mask_key": appraisal.mask_key.hex(),
        "expires_at": appraisal.expires_at,
        "claims": claims_set(appraisal),
    }


class Admissions:
    """The admission face of a session: challenges, decisions, and the members that they leave.

    A resumed session has its members back. A member whose evidence is no longer accepted presents again.

    Args:
        terms: of the run; they say how evidence is judged.
        hosting: told of each expelled member.
    """

    def __init__(self, run: "OpenRun", session: SessionId, terms: RunTerms[KeyContract], hosting: RunHosting) -> None:
        self._run = run
        self._books = run.books
        self._transaction = partial(run.books.transaction_of, session)
        self._terms = terms
        # Made once: real collateral is megabytes, and every admission names it.
        self._collateral = Document.of(terms.collateral)
        self.collateral_ends = ends_at(terms.collateral)
        self._hosting = hosting
        self._members: dict[str, AdmittedMember] = {}
        self._enrolment = Enrolment()
        self._swept_at = 0
        self._books.nonces.forget_expired(run.now())
        self._restore()

    def take_collateral(self, collateral: CollateralBundle) -> None:
        """Judge evidence by newer ``collateral`` from now on; members stay admitted until their evidence expires."""
        self._terms = replace(self._terms, collateral=collateral)
        self._collateral = Document.of(collateral)
        self.collateral_ends = ends_at(collateral)

    def challenge(self, member_id: str, role: Role, identity_key: bytes = b"") -> Challenge:
        """Issue a fresh nonce for one presentation by ``member_id`` in ``role``.

        Args:
            identity_key: the only key that can use the nonce; empty for any key.
        """
        with self._transaction():
            if member_id in self._members:
                # A challenge asks for fresh evidence, so the old presentation admits no more.
                self.keep(replace(self._members[member_id].row, superseded=True))
            return self._books.nonces.issue(
                run_id=self._run.run_id,
                member_id=member_id,
                role=role,
                manifest_digest=self._terms.manifest_digest,
                now=self._run.now(),
                identity_key=identity_key,
            )

    def admit(self, envelope: Envelope) -> Appraisal:
        """Appraise a presentation and admit its sender; either way the decision is logged.

        A refusal may only be counted; see `raycloak.attestation.orchestrator.refusal_log`.

        Guarantee: returns only for evidence that the policy accepts and that binds the presented keys. The evidence
        answers an unused challenge that this orchestrator issued to the same member, role and run. The first
        presentation that proves possession of its key consumes the nonce, whatever the outcome. Nonce, decision and log
        entry are one transaction.

        The presentation that admitted a member gives the same appraisal again, until the member is challenged again, is
        revoked, or its evidence expires.

        Raises:
            EvidenceError: with the code of the first failing check; ``evidence_expired`` for a member whose stored
                appraisal is over.
            ProtocolError: ``session_over`` once another session has begun.
        """
        with self._transaction():
            # An answer may have been lost. Its nonce is used up, so deciding again would refuse the member.
            known = self._admitted_by(envelope)
            admitted = self._decide(envelope) if known is None else self._still(known)
        # Raised outside the transaction, which commits the used nonce and the entry of a refusal.
        if isinstance(admitted, EvidenceError):
            raise admitted
        # Only now, because the decision is on disk.
        self._enter(admitted)
        return admitted.appraisal

    def find(self, member_id: str) -> AdmittedMember | None:
        """Return the member if it is admitted and not revoked since; its evidence may have expired."""
        admitted = self._members.get(member_id)
        return None if admitted is None or self._books.revocations.find(admitted.appraisal) else admitted

    def workers(self) -> list[Appraisal]:
        """Return the appraisals of the admitted workers."""
        return [each.appraisal for _, each in self._participants() if each.appraisal.role == "worker"]

    def entry(self, member_id: str, virtual_workers: tuple[int, ...]) -> Member:
        """Return the member's place in a roster or order; EvidenceError ``evidence_expired`` without valid evidence."""
        admitted = self.find(member_id)
        if admitted is None or admitted.appraisal.expires_at <= self._run.now():
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
        """Record how a member's evidence was used, in a transaction of the caller's."""
        self._books.state.mark_member(row)
        self._members[row.member_id].row = row

    def expel(self, member_id: str, cause: str) -> None:
        """Remove a member; it gets no more keys and no place in a roster."""
        if self._members.pop(member_id, None) is not None:
            self._enrolment.drop(member_id)
            with self._transaction():
                self._books.state.drop_member(member_id)
                self._books.log.append("expelled", {"member_id": member_id, "cause": cause})
        self._hosting.expelled(member_id)

    def review(self) -> MemberReview:
        """Log new revocations, and report which members are revoked and when the others have to present again.

        Guarantee: a revoked member gets no keys and no roster entry, whether or not this is called.
        """
        with self._transaction():
            self._books.revocations.record()
            refusals = {i: self._books.revocations.find(each.appraisal) for i, each in self._participants()}
            ages = [
                each.since + RENEWED_AFTER * (each.appraisal.expires_at - each.since)
                for i, each in self._participants()
                if refusals[i] is None
            ]
            revoked = tuple((i, refusal.message) for i, refusal in refusals.items() if refusal is not None)
            return MemberReview(revoked, min(ages) - self._run.now() if ages else None)

    def view(self) -> OrchestratorView:
        """Return facts for metrics: the participants' roles, evidence class, and earliest expiry per role."""
        members = [admitted.appraisal for _, admitted in self._participants()]
        expiry: dict[str, int] = {}
        for appraisal in members:
            expiry[appraisal.role] = min(appraisal.expires_at, expiry.get(appraisal.role, appraisal.expires_at))
        classes = sorted({each for appraisal in members for each in appraisal.evidence_classes})
        return OrchestratorView(
            admitted={a.member_id: a.role for a in members},
            evidence_class="+".join(classes),
            earliest_expiry=expiry,
            links=weakest_links(each.links for each in members),
            collateral_ends=self.collateral_ends,
        )

    def _restore(self) -> None:
        """Admit again the members of this session that are on disk."""
        with self._books.state.transaction():
            known = [row for row in self._books.state.members() if not self._is_over(row)]
        for row in known:
            try:
                presentation = open_presentation(row.presentation)
                self._books.state.facts.check_clock(self._run.now())
                appraisal = self._appraise(row.presentation, presentation, self._run.now())
            except EvidenceError:
                continue
            # The evidence is no younger than it was: appraising it again must not prolong it.
            appraisal = replace(appraisal, expires_at=min(row.expires_at, appraisal.expires_at))
            self._enter(AdmittedMember(appraisal, presentation, row, self._run.now()))

    def _enter(self, admitted: AdmittedMember) -> None:
        if self._terms.lasting is not None:
            # Moved to the end, so that the member that attested longest ago comes first and is forgotten first.
            self._members.pop(admitted.row.member_id, None)
        self._members[admitted.row.member_id] = admitted
        self._enrolment.put(admitted.appraisal)

    def _participants(self) -> Iterator[tuple[str, AdmittedMember]]:
        """Yield all members but observers, which renew their evidence on their own or leave."""
        # A copy: `view` runs beside other calls, which may admit or forget members meanwhile.
        return ((i, each) for i, each in list(self._members.items()) if each.appraisal.role != OBSERVER)

    def _make_room(self, newcomer: Appraisal) -> None:
        """Forget observers whose evidence expired; EvidenceError ``busy`` if there is still no room for another."""
        if newcomer.role != OBSERVER:
            return
        known = {i: each.appraisal for i, each in self._members.items() if each.appraisal.role == OBSERVER}
        expired = {i for i, appraisal in known.items() if appraisal.expires_at <= self._run.now()}
        for member_id in expired:
            self._forget(member_id)
        if len(known.keys() - expired - {newcomer.member_id}) >= MAX_OBSERVERS:
            raise EvidenceError("busy", f"there are {MAX_OBSERVERS} observers already.", "Ask again later.")

    def _forget_passing(self) -> None:
        """Forget passing members whose evidence expired, and the oldest beyond ``MAX_PASSING``.

        Guarantee: after a sweep there are at most ``MAX_PASSING`` of them, in memory and on disk.
        """
        now = self._run.now()
        # One sweep a second: each costs a pass over all members, and a flood of admissions would ask for it each time.
        if self._terms.lasting is None or now == self._swept_at:
            return
        self._swept_at = now
        passing = [(i, each.appraisal) for i, each in self._participants() if not self._terms.lasts(i)]
        valid = [i for i, appraisal in passing if appraisal.expires_at > now]
        for member_id in {i for i, _ in passing}.difference(valid):
            self._forget(member_id)
        for member_id in valid[: max(0, len(valid) - MAX_PASSING)]:
            self._forget(member_id)
            self._books.log.append("expelled", {"member_id": member_id, "cause": f"{MAX_PASSING} attested after it"})

    def _is_over(self, row: MemberRow) -> bool:
        """Return whether a row's evidence has expired; drops a passing member, in a transaction of the caller's."""
        if row.expires_at > self._run.now():
            return False
        if not self._terms.lasts(row.member_id):
            self._books.state.drop_member(row.member_id)
        return True

    def _forget(self, member_id: str) -> None:
        self._books.state.drop_member(member_id)
        del self._members[member_id]
        self._enrolment.drop(member_id)

    def _admitted_by(self, envelope: Envelope) -> AdmittedMember | None:
        """Return the member that this very presentation admitted; None once a newer challenge asks for another."""
        with suppress(EvidenceError):  # _decide finds the same error, and logs it
            member = self._members.get(open_presentation(envelope).member_id)
            if member is not None and member.row.presentation == envelope and not member.row.superseded:
                return member
        return None

    def _still(self, member: AdmittedMember) -> AdmittedMember | EvidenceError:
        """Return the member if its stored appraisal holds at this moment; otherwise log and return the refusal."""
        name = member.appraisal.member_id
        refusal = self._books.revocations.find(member.appraisal)
        if refusal is None and member.appraisal.expires_at <= self._run.now():
            refusal = EvidenceError("evidence_expired", f"the evidence of {name} expired", "Present fresh evidence.")
        if refusal is None:
            return member
        self._books.refusals.append("refused", name, refusal.code)
        return refusal

    def _decide(self, envelope: Envelope) -> AdmittedMember | EvidenceError:
        """Use up the nonce, appraise, and log the decision; see `raycloak.attestation.orchestrator.refusal_log` for
        refusals."""
        claimed = ""
        try:
            presentation = open_presentation(envelope)
            claimed = presentation.member_id
            # First, so that the nonce is used up whatever the appraisal says.
            self._books.nonces.consume(presentation, self._run.now())
            # With a clock set back, expired collateral would pass for valid.
            self._books.state.facts.check_clock(self._run.now())
            appraised_at = self._run.now()
            appraisal = self._appraise(envelope, presentation, appraised_at)
            # Kept even if a later check refuses: the collateral was genuine.
            self._books.state.facts.keep(appraisal.facts)
            self._make_room(appraisal)
            self._forget_passing()
            if (revoked := self._books.revocations.find(appraisal)) is not None:
                raise revoked
            # Before the check, which would refuse the newcomer because of the members that it displaces.
            if self._terms.displaces:
                for member_id in self._enrolment.in_the_way(appraisal, self._terms.policy):
                    self._forget(member_id)
                    cause = f"{appraisal.member_id} attested on its machine"
                    self._books.log.append("expelled", {"member_id": member_id, "cause": cause})
            self._enrolment.check(appraisal, self._terms.policy)
        except EvidenceError as refusal:
            self._books.refusals.append("refused", claimed, refusal.code)
            return refusal
        # So that an auditor can appraise again a member that may get keys. A standalone service admits anybody with
        # accepted evidence, and would keep it all for ever.
        if self._terms.lasting is None and appraisal.role != OBSERVER:
            self._books.state.keep_document(Document.presentation(envelope))
            self._books.state.keep_document(self._collateral)
        self._books.log.append("admitted", admitted_body(appraisal, appraised_at, self._collateral.name))
        known = self._members.get(claimed)
        # A member that presents anew keeps its place in the ratchet.
        joined = known.row.joined if known else self._books.state.ratchet
        row = MemberRow(claimed, envelope, appraisal.expires_at, joined)
        self._books.state.keep_member(row)
        return AdmittedMember(appraisal, presentation, row, self._run.now())

    def _appraise(self, envelope: Envelope, presentation: Presentation, now: int) -> Appraisal:
        appraisal = appraise(
            envelope,
            run_id=self._run.run_id,
            member_id=presentation.member_id,
            role=presentation.role,
            manifest_digest=self._terms.manifest_digest,
            policy=self._terms.policy,
            collateral=self._terms.collateral,
            now=now,
            floors=self._books.state.facts.floors(),
        )
        if presentation.role == "worker" and presentation.known_answer != self._terms.contract.known_answer:
            raise EvidenceError(
                "numerics_mismatch",
                f"{presentation.member_id} computes other bytes than this run's numerics class",
                "Run all workers on the same device model, instruction set and library versions.",
            )
        return appraisal
