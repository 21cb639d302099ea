"""A client's own orchestrator: it appraises the adapter's worker under the client's policy, and logs the release.

It is the orchestrator of runs and key services (`raycloak.attestation.orchestrator`), in the client's process, for one
worker and one key. So evidence, appraisal, log and key package are the same as everywhere.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.orchestrator.orchestrator import open_run
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.policy.policy import Policy
from raycloak.metrics.errors import EvidenceError
from raycloak_lab.encrypted.adapter_worker import MEMBER_ID
from raycloak_lab.encrypted.parameters import SET_F
from raycloak_lab.encrypted.released_keys import seal_released, stated_answer


@dataclass(frozen=True, slots=True)
class ReleasedAdapter:
    """The keys of a client, sealed for the worker whose evidence was accepted."""

    release: KeyRelease
    sealed: bytes
    evidence_class: str


class ClientOrchestrator:
    """The orchestrator of one client session.

    Args:
        folder: of its books; created 0700. When the session ends, its log stays in ``<run id>/``.
        policy, collateral: that the worker's evidence is judged by.
        fingerprint: of the keys to release.
        adapter_digest: of the adapter that they are for.
        worker_key: the worker's identity key, which the channel is certified by.

    Raises:
        ConfigError: as `open_run`.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        collateral: CollateralBundle,
        *,
        fingerprint: bytes,
        adapter_digest: bytes,
        worker_key: bytes,
    ) -> None:
        self._folder, self._fingerprint, self._worker_key = folder, fingerprint, worker_key
        self._adapter_digest = adapter_digest
        self._run = run = open_run(str(folder), time.time, None)
        unkeyed = ServiceContract(
            run_id=run.run_id,
            orchestrator_key=run.public.ed25519,
            orchestrator_ml_dsa=run.public.ml_dsa_65,
            policy_digest=policy.digest(),
            virtual_workers=1,
            known_answer=stated_answer(fingerprint, adapter_digest),
            key_commitments=(),
        )
        self._contract = unkeyed.with_keys(run.key_commitments(unkeyed.key_context, 1, 1))
        self._session = run.begin(RunTerms(self._contract, policy, collateral), "encrypted adapter")
        self.contract = self._contract.encode()
        self.policy = policy.encode()

    def challenge(self) -> bytes:
        """Return a fresh challenge that only the worker's identity key can answer."""
        return self._session.admission.challenge(MEMBER_ID, "worker", self._worker_key).encode()

    def release(self, presentation: Envelope, released: bytes) -> ReleasedAdapter:
        """Appraise the worker, log its keys' fingerprint and parameters, and release the key to them.

        Guarantee: nothing is released for evidence that the policy refuses, or before the log has it.

        Raises:
            EvidenceError: why the evidence is refused.
        """
        if digest(released) != self._fingerprint:
            raise EvidenceError("key_package_mismatch", "these are not the keys that the contract states")
        appraisal = self._session.admission.admit(presentation)
        books = self._run.books
        with books.state.transaction():
            stated = {
                "member_id": MEMBER_ID,
                "fingerprint": self._fingerprint.hex(),
                "parameters": SET_F.digest().hex(),
                "adapter": self._adapter_digest.hex(),
            }
            books.log.append("adapter_keys", stated)
            grant = self._session.keys.grant(MEMBER_ID, 0, (0,), 0)
        key = self._run.keys.of(self._contract.key_context, 0, 0).stream
        sealed = seal_released(key, self._fingerprint, released)
        return ReleasedAdapter(grant.proved(books.log), sealed, appraisal.evidence_class.value)

    def finish(self) -> Path:
        """Export the log, destroy the secret that the key came from, and return the log's file."""
        # A folder of its own: the documents that a log names lie beside it under one name.
        log = self._folder / self._run.run_id / "evidence.jsonl"
        log.parent.mkdir(mode=0o700, exist_ok=True)
        self._run.finish(str(log), True)
        self._run.close()
        return log
