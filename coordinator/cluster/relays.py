"""The four actors of a run: relays, each of which has a vault of its role and passes calls on to it.

Ray places and ends them, moves what they are given and return, and tells of their death. They hold no key, no example
and no clear vector: whoever runs code in their processes finds none; see `raycloak.coordinator.vaults`.

A relay's process imports none of what its vault does.
"""

import os
import signal
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from raycloak.attestation.core.messages import Message
from raycloak.coordinator.vaults.machine_socket import Seat
from raycloak.coordinator.vaults.openings import (
    AggregatorOpening,
    LedgerOpening,
    OrchestratorOpening,
    WorkerOpening,
)
from raycloak.coordinator.vaults.vault import Vault, VaultLost, child

if TYPE_CHECKING:
    from raycloak.attestation.attester.attester import EvidenceSource

_VAULTS = "raycloak.coordinator.vaults"


class Relay:
    """An actor that passes calls on to a vault, and ends when that does.

    Attributes:
        TARGET: class that the vault hosts.

    Args:
        socket: where the machine's vaults of this role listen; None starts a child.
    """

    TARGET: ClassVar[str]

    def __init__(self, opening: Message, source: "EvidenceSource | None" = None, socket: str | None = None) -> None:
        start = partial(child, self.TARGET) if socket is None else partial(Seat, socket)
        self.vault = Vault(start, opening, source, self._lost)

    def receive(self, name: str, returns: int, *frames: Any) -> Any:
        """Pass a call on; see `raycloak.coordinator.vaults.calls.Receiver.receive`."""
        return self._passed_on(name, returns, frames)

    def _passed_on(self, name: str, returns: int, frames: tuple[Any, ...], **options: Any) -> Any:
        answer = self.vault.call(name, returns, frames, **options)
        return answer[0] if returns == 1 else tuple(answer)

    def _lost(self, cause: Exception) -> None:
        if isinstance(cause, VaultLost):
            os._exit(1)  # Ray tells of the death. A call has to tell of all else, which Ray does not see.


class _RelayBeside(Relay):
    @ray.method(concurrency_group="control")
    def receive_beside(self, name: str, returns: int, *frames: Any) -> Any:
        """Pass a call on while another one runs, in a thread of Ray's group ``control``."""
        return self._passed_on(name, returns, frames, beside=True)


class LedgerActor(_RelayBeside):
    """PrivacyLedger as an actor; arguments as there."""

    TARGET = f"{_VAULTS}.ledger_vault:LedgerVault"

    def __init__(self, url: str, create: bool = True, witness: str | None = None, socket: str | None = None) -> None:
        super().__init__(LedgerOpening(url=url, create=create, witness=witness), socket=socket)


class OrchestratorActor(_RelayBeside):
    """EvidenceOrchestrator as an actor; arguments as there, but for ``source``.

    Args:
        source: the simulated platform of its node; None for its guest's.
    """

    TARGET = f"{_VAULTS}.orchestrator_vault:OrchestratorVault"

    def __init__(
        self,
        state_directory: str,
        bind: str | None = None,
        source: "EvidenceSource | None" = None,
        socket: str | None = None,
    ) -> None:
        simulated = source is not None
        opening = OrchestratorOpening(state_directory=state_directory, bind=bind, simulated=simulated)
        super().__init__(opening, source, socket)


class MaskedAggregatorActor(Relay):
    """MaskedAggregator as an actor, whose processes can be started before they are needed.

    Args:
        source: as for :class:`OrchestratorActor`.
        cpus: its share of its node.
    """

    TARGET = f"{_VAULTS}.aggregator_vault:AggregatorVault"

    def __init__(self, source: "EvidenceSource | None", socket: str | None = None, cpus: int = 1) -> None:
        super().__init__(AggregatorOpening(simulated=source is not None, cpus=cpus), source, socket)


class TrainWorkerActor(Relay):
    """TrainWorker as an actor.

    Guarantee: after SIGTERM the task under way finishes, and the next `StepReply` says ``leaving``. A second SIGTERM
    ends the process at once.

    Args:
        member_id: as for `TrainWorker`.
        source: as for :class:`OrchestratorActor`.
        gpus: how many confidential GPUs the policy asks for.
        cpus: its share of its node.
    """

    TARGET = f"{_VAULTS}.worker_vault:WorkerVault"

    def __init__(
        self,
        member_id: str,
        source: "EvidenceSource | None",
        gpus: int = 0,
        socket: str | None = None,
        cpus: int = 1,
    ) -> None:
        opening = WorkerOpening(member_id=member_id, simulated=source is not None, gpus=gpus, cpus=cpus)
        super().__init__(opening, source, socket)
        # The former handler, which ends the process, is put back at the first signal.
        self._before = signal.signal(signal.SIGTERM, self._asked_to_end)

    def _asked_to_end(self, _: int, __: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, self._before)
        self.vault.leave()

    def receive(self, name: str, returns: int, *frames: Any) -> Any:
        context = ray.get_runtime_context()
        return self._passed_on(name, returns, frames, is_cancelled=lambda: bool(context.is_canceled()))
