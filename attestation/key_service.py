"""The data owner's key service: an evidence service that gives second halves of keys straight to workers.

It is an orchestrator of its own, with its own secret, storage, signing key and evidence log, which decides on nothing
but keys. Who hosts what, the run's orchestrator decides: without its half the other one is worth nothing, so any worker
whose evidence the policy accepts may have any half, as often as the quotas say.
"""

from dataclasses import dataclass, replace

from attestation.appraisal import Appraisal
from attestation.evidence import Challenge, Role
from attestation.evidence_desk import EvidenceDesk
from attestation.messages import Envelope
from attestation.orchestrator import EvidenceOrchestrator
from attestation.release_desk import Grant
from metrics.errors import EvidenceError


@dataclass(frozen=True, slots=True)
class KeyService:
    """What an evidence desk asks of an orchestrator, where only keys are given.

    Guarantee: each release rests on evidence that was made for it. A member is forgotten once it has its keys, so that
    whoever takes its place, on the same machine or under the same name, is not held up by evidence that still lasts.
    """

    orchestrator: EvidenceOrchestrator

    def challenge(self, member_id: str, role: Role, identity_key: bytes = b"") -> Challenge:
        """As `EvidenceOrchestrator.challenge`; EvidenceError ``release_denied`` for anybody but a worker."""
        if role != "worker":
            raise EvidenceError("release_denied", f"a key service attests workers, and '{member_id}' is none")
        return self.orchestrator.challenge(member_id, role, identity_key)

    def admit(self, envelope: Envelope) -> Appraisal:
        """See `EvidenceOrchestrator.admit`."""
        return self.orchestrator.admit(envelope)

    def grant(self, member_id: str, epoch: int, virtual_workers: tuple[int, ...], seen: int = 0) -> Grant:
        """As `EvidenceOrchestrator.grant`, once per attestation."""
        grant = self.orchestrator.grant(member_id, epoch, virtual_workers, seen)
        self.orchestrator.expel(member_id, "has its keys")
        return grant

    def record_data(self, envelope: Envelope) -> None:
        """EvidenceError ``release_denied``: commitments to data are the run's, and none of a key service's business."""
        raise EvidenceError("release_denied", "a key service takes no data commitments")


def key_service_desk(orchestrator: EvidenceOrchestrator, virtual_workers: int) -> EvidenceDesk:
    """What the gRPC service of a key service of ``virtual_workers`` answers from; it has no rosters."""
    desk = orchestrator.evidence_desk()
    return replace(
        desk,
        orchestrator=KeyService(orchestrator),
        hosted=lambda member_id: range(virtual_workers),
        newest_roster=lambda: None,
    )
