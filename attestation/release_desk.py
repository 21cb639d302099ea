"""The desk that hands out keys: who may have which, in the log before they leave.

Guarantee: a key leaves only for a member whose evidence is accepted and not expired, sealed to the key that the
evidence binds, and after the log says so; the member gets the proof that it does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from attestation.admissions import Admissions, Admitted, RunTerms
from attestation.evidence_log import EvidenceLog
from attestation.key_release import KeyPackage, KeyRelease, RunKeys, released_body, seal_keys
from attestation.keys import IdentityKey
from metrics.errors import EvidenceError


class ReleaseDesk:
    """Releases the keys of one run.

    Args:
        transaction: opens a transaction of the session that asks.
        clock: unix seconds.
    """

    def __init__(
        self,
        *,
        keys: RunKeys,
        signer: IdentityKey,
        admissions: Admissions,
        log: EvidenceLog,
        transaction: Callable[[], AbstractContextManager[None]],
        clock: Callable[[], int],
    ) -> None:
        self._keys = keys
        self._signer = signer
        self._admissions = admissions
        self._log = log
        self._transaction = transaction
        self._clock = clock

    def release(self, terms: RunTerms, member_id: str, epoch: int, virtual_workers: tuple[int, ...]) -> KeyRelease:
        """See `attestation.orchestrator.EvidenceOrchestrator.release`."""
        admitted = self._entitled(member_id, epoch)
        package = KeyPackage(
            run_id=self._keys.run_id,
            member_id=member_id,
            manifest_digest=terms.manifest_digest,
            policy_digest=terms.policy.digest(),
            evidence_digest=admitted.appraisal.evidence_digest,
            epoch=epoch,
            virtual_workers=virtual_workers,
            commitments=self._keys.commitments(terms.key_context, terms.virtual_workers, epoch),
            ciphertext=b"",
        )
        keys = [self._keys.of(terms.key_context, v, epoch) for v in virtual_workers]
        with self._transaction():
            self._admissions.keep(replace(admitted.row, epoch=epoch))
            entry = self._log.append("released", released_body(package))
        proof = self._log.prove(entry.sequence).encode()
        return KeyRelease(seal_keys(package, keys, admitted.presentation.hpke_key, self._signer), proof)

    def _entitled(self, member_id: str, epoch: int) -> Admitted:
        admitted = self._admissions.find(member_id)
        if admitted is None or admitted.appraisal.role != "worker":
            raise EvidenceError("release_denied", f"{member_id} is not an admitted worker")
        if admitted.appraisal.expires_at <= self._clock():
            raise EvidenceError("release_denied", f"the evidence of {member_id} expired", "Present fresh evidence.")
        if admitted.row.epoch not in (None, epoch):
            raise EvidenceError(
                "release_denied",
                f"the evidence of {member_id} was for epoch {admitted.row.epoch}, not {epoch}",
                "Present fresh evidence.",
            )
        return admitted
