"""The data owner's key service: an evidence service that gives second halves of keys straight to workers.

It is an orchestrator of its own, with its own secret, storage, signing key and evidence log, and decides on keys alone.
The run's orchestrator decides which worker hosts what. Without its half the other half is worth nothing, so any worker
whose evidence the policy accepts may have any half, as often as the quotas say.
"""

from dataclasses import dataclass, replace

from attestation.evidence import Challenge, Role
from attestation.evidence_desk import EvidenceDesk
from attestation.messages import Envelope
from attestation.orchestrator import RunSession
from attestation.release_desk import Grant
from metrics.errors import EvidenceError


@dataclass(frozen=True, slots=True)
class KeyService:
    """The decisions of an orchestrator that only gives keys.

    Guarantee: each release rests on evidence that was made for it. A member is forgotten once it has its keys. So
    evidence that still lasts holds up nobody who takes the member's place, on its machine or under its name.
    """

    session: RunSession

    def challenge(self, member_id: str, role: Role, identity_key: bytes = b"") -> Challenge:
        """Challenge as `Admissions.challenge`; EvidenceError ``release_denied`` for any role but a worker's."""
        if role != "worker":
            raise EvidenceError("release_denied", f"a key service attests workers, and '{member_id}' is none")
        return self.session.admission.challenge(member_id, role, identity_key)

    def grant(self, member_id: str, epoch: int, virtual_workers: tuple[int, ...], seen: int = 0) -> Grant:
        """Grant as `ReleaseDesk.grant`, once per attestation."""
        grant = self.session.keys.grant(member_id, epoch, virtual_workers, seen)
        self.session.admission.expel(member_id, "has its keys")
        return grant

    def record_data(self, envelope: Envelope) -> None:
        """Refuse: EvidenceError ``release_denied``. Data commitments concern the run, not a key service."""
        raise EvidenceError("release_denied", "a key service takes no data commitments")


def key_service_desk(session: RunSession, virtual_workers: int) -> EvidenceDesk:
    """Return the desk of a key service of ``virtual_workers``; it has no rosters."""
    desk, service = session.evidence_desk(), KeyService(session)
    return replace(
        desk,
        decisions=replace(
            desk.decisions, challenge=service.challenge, grant=service.grant, record_data=service.record_data
        ),
        hosted=lambda member_id: range(virtual_workers),
        newest_roster=lambda: None,
    )
