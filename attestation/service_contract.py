"""What a standalone evidence service promises, for members that train with code of their own.

It takes the place of a run's manifest: its digest is in every piece of evidence and key package. Hand it to members by
a way that an attacker cannot take.
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
        orchestrator_key, orchestrator_ml_dsa: Ed25519, who certifies the service's channels and signs its packages and
            rosters; and the ML-DSA-65 key that signs the heads of its evidence log as well.
        policy_digest: of the policy that evidence is judged by.
        virtual_workers: how many key owners there are.
        known_answer: what every worker has to present as the digest of what it computes on a public input.
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
        """Both keys; pydantic's ValidationError if one is of another length."""
        return SignerPublic(ed25519=self.orchestrator_key, ml_dsa_65=self.orchestrator_ml_dsa)


def contract_context(virtual_workers: int, known_answer: bytes) -> bytes:
    """What the keys of a contract derive from, beside the run secret."""
    return digest(length_prefixed("raycloak/service-key-context/v1", virtual_workers, known_answer))
