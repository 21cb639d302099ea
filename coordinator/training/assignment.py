"""An assignment: the part of a run that one execution does, and the session of actors that it does it with.

There are three kinds. They differ in where the model comes from, where they end, and whether they may charge; each
kind fixes what its name implies, so that no execution can, for example, charge while it replays.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.policy.policy import Policy
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.cluster.backend import Backend
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.membership.crew import Crew
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.training.evaluation import PublicEvaluation
from raycloak.coordinator.training.pace import OPEN, Pace, StopRequest
from raycloak.coordinator.training.reporting import Reporting
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.terms.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Session:
    """The actors of one execution and the evidence they are judged by, started and owned by the caller.

    Attributes:
        revocations: counts them so far; see `raycloak.attestation.orchestrator.revocations.count_revocations`.
        collateral_now: gives newer collateral before evidence is renewed; None if there is none but the first.
        crew: the first members, if they were started already.
    """

    run_id: str
    orchestrator_key: SignerPublic
    backend: Backend
    control: Control
    policy: Policy
    collateral: CollateralBundle
    revocations: Callable[[], int]
    collateral_now: Callable[[], CollateralBundle] | None = None
    crew: Crew | None = None


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that begins: all planned steps, from the parameters of the manifest it makes.

    Attributes:
        archive: where its sealed packages go; None to seal none.
    """

    archive: Archive | None = None
    stop: StopRequest = field(default_factory=StopRequest)

    recorded: ClassVar[None] = None
    first_step: ClassVar[None] = None
    last_step: ClassVar[None] = None
    charges: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """An unfinished run: the planned steps that are left, from its newest package.

    Attributes:
        recorded: the run's manifest, which this execution must arrive at again.
        archive: where its sealed packages are, and new ones go.
    """

    recorded: Manifest
    archive: Archive
    stop: StopRequest = field(default_factory=StopRequest)

    first_step: ClassVar[None] = None
    last_step: ClassVar[None] = None
    charges: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """Finished steps of a run, computed again: nothing is charged, sealed or recorded.

    Attributes:
        recorded: the run's manifest, which this execution must arrive at again.
        archive: where its sealed packages are.
        first_step: the replay starts from the newest package of at most so many finished steps.
        last_step: finished steps to end at.
    """

    recorded: Manifest
    archive: Archive
    first_step: int
    last_step: int
    stop: StopRequest = field(default_factory=StopRequest)

    charges: ClassVar[bool] = False


Assignment = NewRun | ResumedRun | ReplayedRun


@dataclass(frozen=True, slots=True)
class Order:
    """The complete input of a coordinator; no stage changes it.

    Attributes:
        setup: what each worker opens.
        public: opens the public split, while workers open their data; gives None if nothing is measured, or only
            sealed data is.
        data: name of the account that it opens for data without a fingerprint, see
            `raycloak.coordinator.planning.payer.data_name`.
        code: digest of the bundle that the run's own code comes from; empty for none, or under a policy with no list.
        small_epsilon: whether a cap that is rarely meant is meant, where the run opens an account.
        pace: when steps may be charged and released.
    """

    config: RunConfig
    session: Session
    setup: WorkerSetup
    public: Callable[[], PublicEvaluation | None]
    reporting: Reporting
    folder: RunFolder
    assignment: Assignment
    data: str = ""
    pace: Pace = OPEN
    small_epsilon: bool = False
    code: bytes = b""
