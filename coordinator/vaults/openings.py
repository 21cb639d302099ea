"""The first words to a vault: what its process and its role need to begin.

A module of its own, because an actor's process and the driver import no more of a role than this.
"""

from typing import ClassVar

from raycloak.attestation.core.messages import Message


class VaultStart(Message):
    """The first word to every vault, before it imports what its role needs.

    Attributes:
        variables: of `raycloak.workers.gradients.environment.CHOSEN`, and no others.
    """

    DOMAIN: ClassVar[str] = "raycloak/vault/start/v1"
    variables: dict[str, str]


class LedgerOpening(Message):
    """The opening of a ledger's vault; see `raycloak.coordinator.ledger.ledger.PrivacyLedger`."""

    DOMAIN: ClassVar[str] = "raycloak/vault/ledger/v1"
    url: str
    create: bool
    witness: str | None


class OrchestratorOpening(Message):
    """The opening of an orchestrator's vault; see
    `raycloak.attestation.service.serving_orchestrator.EvidenceOrchestrator`.

    Attributes:
        simulated: whether its evidence is SIMULATED, by the platform of its node.
    """

    DOMAIN: ClassVar[str] = "raycloak/vault/orchestrator/v1"
    state_directory: str
    bind: str | None
    simulated: bool


class AggregatorOpening(Message):
    """The opening of an aggregator's vault, before it is known which member it becomes.

    Attributes:
        cpus: its share of its node, for threads that work on words.
    """

    DOMAIN: ClassVar[str] = "raycloak/vault/aggregator/v2"
    simulated: bool
    cpus: int


class WorkerOpening(Message):
    """The opening of a worker's vault.

    Attributes:
        member_id: of this incarnation.
        gpus: how many confidential GPUs it gives evidence of.
        cpus: its share of its node, for threads that work on words.
    """

    DOMAIN: ClassVar[str] = "raycloak/vault/worker/v2"
    member_id: str
    simulated: bool
    gpus: int
    cpus: int


class PlatformOpening(Message):
    """The opening of a platform's vault."""

    DOMAIN: ClassVar[str] = "raycloak/vault/platform/v1"
