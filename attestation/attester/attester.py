"""The attesting side of an actor: its keys, and the presentation that binds them to its evidence."""

from dataclasses import dataclass
from typing import Protocol

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import Challenge, Presentation, QuoteFamily
from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.keys import AgreementKey, IdentityKey
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.attestation.core.report_data import expected_report_data
from raycloak.attestation.core.roster import Member
from raycloak.attestation.gpu.verify import gpu_nonce
from raycloak.metrics.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class CpuEvidence:
    """A platform's statement about the guest on it. Its fields are also fields of `Presentation`."""

    quote: bytes
    quote_family: QuoteFamily = "tdx"
    certificates: tuple[bytes, ...] = ()


class EvidenceSource(Protocol):
    """The platform under an actor: a TEE's report interface, or the simulated platform of its node."""

    def collect(self, report_data: bytes) -> CpuEvidence:
        """Return evidence over 64 bytes of report data."""
        ...


class GpuSource(Protocol):
    """A source of evidence about an actor's GPUs."""

    def collect(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return one encoded `GpuEvidence` per GPU over a 32-byte nonce, always in the same order."""
        ...

    def collect_switches(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return one encoded `SwitchEvidence` per switch of GPUs in protected-PCIe mode over ``nonce``, likewise."""
        ...


class Attester:
    """The keys and evidence of one actor incarnation. A restarted actor has new keys and presents itself again.

    Args:
        gpus: the actor's confidential GPUs; None if it has none.
        identity: given if another decides the key. The orchestrator's, for example, is the run's.
    """

    def __init__(
        self,
        member_id: str,
        source: EvidenceSource,
        gpus: GpuSource | None = None,
        identity: IdentityKey | None = None,
    ) -> None:
        self.member_id = member_id
        self.identity = identity or IdentityKey.generate()
        self.agreement = AgreementKey.generate()
        self.hpke = HpkeKey.generate()
        self._source = source
        self._gpus = gpus
        self.evidence_digest = b""

    def beside(self) -> "Attester":
        """Return an attester on the same platform and GPUs for another verifier, with its own keys and a unique name.

        The name is unique because member names repeat in each execution. The verifier may still know a dead member of
        the same name.
        """
        identity = IdentityKey.generate()
        return Attester(f"{self.member_id}.{identity.public.hex()[:8]}", self._source, self._gpus, identity)

    def require_own(self, entry: Member) -> None:
        """Raise ProtocolError ``roster_own_entry`` unless ``entry`` states this worker's own keys and evidence."""
        stated = (entry.role, entry.identity_key, entry.mask_key, entry.evidence_digest)
        if stated != ("worker", self.identity.public, self.agreement.public, self.evidence_digest):
            raise ProtocolError("roster_own_entry", "the roster states other keys or evidence for this worker")

    def present(self, challenge: Challenge, manifest_digest: bytes, known_answer: bytes, code: bytes = b"") -> Envelope:
        """Answer a challenge with signed evidence that binds this actor's keys. The signature proves possession.

        GPUs and switches report first, over a nonce that follows from the challenge and this actor's key. The quote can
        then bind their reports.

        Args:
            code: as the run's manifest states it.

        Raises:
            ProtocolError: ``challenge_mismatch`` if the challenge is for another member or manifest.
        """
        if (challenge.member_id, challenge.manifest_digest) != (self.member_id, manifest_digest):
            raise ProtocolError("challenge_mismatch", f"{self.member_id} was sent a challenge that is not its own")
        nonce = gpu_nonce(challenge.nonce, self.hpke.public)
        presentation = Presentation(
            nonce=challenge.nonce,
            run_id=challenge.run_id,
            member_id=self.member_id,
            role=challenge.role,
            manifest_digest=manifest_digest,
            hpke_key=self.hpke.public,
            mask_key=self.agreement.public,
            identity_key=self.identity.public,
            known_answer=known_answer,
            quote=b"",
            gpu_evidence=self._gpus.collect(nonce) if self._gpus else (),
            switch_evidence=self._gpus.collect_switches(nonce) if self._gpus else (),
            code=code,
        )
        # Only now, because the quote's report data covers the devices' reports.
        found = self._source.collect(expected_report_data(presentation))
        fields = {name: getattr(found, name) for name in ("quote", "quote_family", "certificates")}
        envelope = seal(presentation.model_copy(update=fields), self.identity)
        # Kept, because a roster names it: `require_own` compares the two.
        self.evidence_digest = digest(envelope.body)
        return envelope
