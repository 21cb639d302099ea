"""Keys in two halves: one from the run's orchestrator, one from a key service of the data owner.

Each side derives its halves from its own secret and commits to them before the run begins; the manifest pins both
commitments. Only the worker that hosts a virtual worker receives both halves. Each is sealed to a key that the worker's
evidence binds. Only the worker combines them: HKDF over their concatenation, as a key combiner of SP 800-56C.

A standalone service has a contract in place of a run's manifest. The contract's digest is in every piece of evidence
and every key package. Hand it to members over a channel that an attacker cannot change.

Guarantee: a party that knows only one half, the orchestrator or the owner, cannot tell the combined key from random
bytes. So it learns neither a virtual worker's noise, sampling and tags, nor the key of its data commitment.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from raycloak.attestation.core.evidence import Bytes32
from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.keys.release import KeyContract, VirtualWorkerKeys
from raycloak.metrics.errors import EvidenceError


class ServiceContract(KeyContract):
    """The terms of a service; its keys derive from its :attr:`key_context`.

    Attributes:
        orchestrator_key: the Ed25519 key that certifies the service's channels and signs its packages and rosters.
        orchestrator_ml_dsa: the ML-DSA-65 key that co-signs the heads of its evidence log.
        virtual_workers: number of virtual workers.
    """

    DOMAIN: ClassVar[str] = "raycloak/service-contract/v1"

    orchestrator_key: Bytes32
    orchestrator_ml_dsa: bytes
    policy_digest: Bytes32
    virtual_workers: Annotated[int, Field(gt=0)]
    known_answer: Bytes32

    @property
    def key_owners(self) -> int:
        """The number of virtual workers."""
        return self.virtual_workers

    @property
    def orchestrator(self) -> SignerPublic:
        """Both public keys; pydantic's ValidationError if one has a wrong length."""
        return SignerPublic(ed25519=self.orchestrator_key, ml_dsa_65=self.orchestrator_ml_dsa)


def combine_halves(
    first: VirtualWorkerKeys, second: VirtualWorkerKeys, *, run_id: str, key_context: bytes, v: int, epoch: int
) -> VirtualWorkerKeys:
    """Combine the orchestrator's and the owner's halves into the keys of virtual worker ``v`` in ``epoch``.

    Args:
        run_id, key_context: of the run. The owner's half is for no run in particular, so this binds the result.
    """
    # Both parts have a fixed length, so the concatenation is injective.
    stream = Secret(first.stream.reveal() + second.stream.reveal())
    data = Secret(first.data.reveal() + second.data.reveal())
    return VirtualWorkerKeys(
        stream=derive(stream, Purpose.VIRTUAL_WORKER_HALVES, run_id, key_context, v, epoch),
        data=derive(data, Purpose.DATA_COMMITMENT_HALVES, run_id, v),
        sent=sent_key(second, run_id=run_id, key_context=key_context, v=v, epoch=epoch),
    )


def sent_key(second: VirtualWorkerKeys, *, run_id: str, key_context: bytes, v: int, epoch: int) -> Secret:
    """Derive the key of the examples that the owner's clients send virtual worker ``v`` in ``epoch``.

    Guarantee: only the owner, and workers that the owner's key service gave this half, can derive it. Another run, or
    the same run under other terms, has another key.

    Args:
        second: the owner's half.
        run_id, key_context: of the run, as of :func:`combine_halves`.
    """
    return derive(second.stream, Purpose.SENT_EXAMPLES, run_id, key_context, v, epoch)


def check_contract(
    contract: ServiceContract,
    *,
    run_id: str,
    orchestrator_key: bytes,
    policy_digest: bytes,
    virtual_workers: int,
    epochs: int,
) -> None:
    """Require that ``contract`` is of a key service that can provide the second halves of this run.

    Raises:
        EvidenceError: ``key_service_mismatch`` if its policy or its virtual workers differ, or its epochs are too few.
            Also raised if it derives from the run's own secret, so that there is only one half.
    """
    remedy = "Let the owner of the data make a contract for this run, from a secret of the key service's own."
    differing = {
        "is under another policy than the run": contract.policy_digest != policy_digest,
        f"is for {contract.virtual_workers} virtual workers and the run has {virtual_workers}": (
            contract.virtual_workers != virtual_workers
        ),
        f"has {contract.epochs} of the {epochs} key epochs of the run": (len(contract.key_commitments) < epochs),
        # If both halves came from one secret, its holder would know both.
        "comes from the run secret itself": contract.run_id == run_id or contract.orchestrator_key == orchestrator_key,
    }
    for what, differs in differing.items():
        if differs:
            raise EvidenceError("key_service_mismatch", f"the contract of the key service {what}.", remedy)
