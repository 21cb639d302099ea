"""The contract of a standalone evidence service, for members that train with code of their own.

It takes the place of a run's manifest: its digest is in every piece of evidence and key package. Hand it to members
through a channel that an attacker cannot control.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from attestation.canonical import digest, length_prefixed
from attestation.evidence import Bytes32
from attestation.hybrid_signature import SignerPublic
from attestation.messages import Message


class ServiceContract(Message):
    """The terms of a service.

    Attributes:
        orchestrator_key: the Ed25519 key that certifies the service's channels and signs its packages and rosters.
        orchestrator_ml_dsa: the ML-DSA-65 key that co-signs the heads of its evidence log.
        policy_digest: digest of the policy that evidence is judged by.
        virtual_workers: number of key owners.
        known_answer: the digest of its result on a public input that every worker must present.
        key_commitments: per epoch, digest of the commitments to all keys.
    """

    DOMAIN: ClassVar[str] = "raycloak/service-contract/v1"

    run_id: str
    orchestrator_key: Bytes32
    orchestrator_ml_dsa: bytes
    policy_digest: Bytes32
    virtual_workers: Annotated[int, Field(gt=0)]
    known_answer: Bytes32
    key_commitments: tuple[bytes, ...]

    @property
    def orchestrator(self) -> SignerPublic:
        """Both public keys; pydantic's ValidationError if one has a wrong length."""
        return SignerPublic(ed25519=self.orchestrator_key, ml_dsa_65=self.orchestrator_ml_dsa)


def contract_context(virtual_workers: int, known_answer: bytes) -> bytes:
    """Return the context that a contract's keys derive from, beside the run secret."""
    return digest(length_prefixed("raycloak/service-key-context/v1", virtual_workers, known_answer))
