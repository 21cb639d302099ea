"""Ledger and orchestrator of one run on Ray: two actors on the driver's node, which are replaced when they are lost.

They run on the driver's node because their state is on its disk. The driver can therefore end an actor by a signal to
its process, and its vault with it. The signal also ends a suspended process at once; Ray alone takes seconds, and its
files stay locked for so long.
"""

import time
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

import ray

from raycloak.attestation.attester.attester import EvidenceSource
from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.coordinator.cluster.actors import START_DEADLINE_S, actor, on_this_node
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.control import START_AGAIN, Control, ControlRole
from raycloak.coordinator.cluster.processes import Process, own_processes
from raycloak.coordinator.cluster.ray_calls import ask, ask_process, fetch, send
from raycloak.coordinator.cluster.relays import LedgerActor, OrchestratorActor
from raycloak.coordinator.cluster.remote import Actor
from raycloak.coordinator.config.sections import BoundaryConfig
from raycloak.coordinator.vaults.calls import Reference
from raycloak.coordinator.vaults.hosted import Hosted
from raycloak.coordinator.vaults.run_orchestrator import RunOrchestrator
from raycloak.metrics.errors import RaycloakError, RunFailedError

T = TypeVar("T")

END_S = 5.0
"""By then Ray has ended an actor that is well, on a busy machine too."""


class RayControl:
    """The backend of ledger and orchestrator. It starts and ends them when
    `raycloak.coordinator.cluster.control.Control` says so.

    Args:
        ledger_url: absolute URL, as `raycloak.coordinator.ledger.ledger.PrivacyLedger` takes it.
        orchestrator_folder: absolute folder of the orchestrator's state.
        witness: witness of the ledger, as `raycloak.coordinator.ledger.ledger.PrivacyLedger` takes it.
        bind: address that the orchestrator serves at, as `EvidenceOrchestrator` takes it.
        source: the simulated platforms; None for machines whose guests give evidence themselves.
        boundary: where the machine's vaults listen, if the run uses those.
    """

    def __init__(
        self,
        ledger_url: str,
        orchestrator_folder: str,
        witness: str | None = None,
        bind: str | None = None,
        source: EvidenceSource | None = None,
        boundary: BoundaryConfig | None = None,
    ) -> None:
        self._is_apart = boundary is not None
        self._arguments: Mapping[ControlRole, tuple[Any, ...]] = {
            "ledger": (ledger_url, True, witness, boundary and boundary.of("ledger")),
            "orchestrator": (orchestrator_folder, bind, source, boundary and boundary.of("orchestrator")),
        }
        self._processes: dict[str, list[Process]] = {}
        self._serial = 0
        # Secret file and id of the run. None until `open_run`: the processes start while other actors are started too.
        self._run: tuple[str | None, str] | None = None
        self.actors: dict[ControlRole, Actor] = {role: self._launch(role) for role in self._arguments}

    def open_run(self, secret_file: str | None, run_id: str | None = None) -> tuple[str, SignerPublic]:
        """Open the run; returns what `EvidenceOrchestrator.open_run` returns. To be called once.

        Raises:
            RaycloakError: what keeps either actor from opening its files.
        """
        for role, each in self.actors.items():
            try:
                self._identify(each)
            except ActorLost as lost:
                raise RunFailedError(
                    "unreachable", f"the {role} could not be started ({lost.cause}).", START_AGAIN
                ) from None
        found, key = self._open(self.actors["orchestrator"], secret_file, run_id)
        self._run = secret_file, found
        return found, key

    def control(self, deadline_s: float, max_restarts: int) -> Control:
        """Return the control of the run."""
        return Control(self, self.actors, self._restart, deadline_s, max_restarts, is_apart=self._is_apart)

    def close(self) -> None:
        """End both actors, by Ray where it can within `END_S`.

        Ray takes a process that was ended by a signal for one that the kernel ended for want of memory, and tells the
        user of a finished run so.
        """
        for each in self.actors.values():
            ray.kill(each.handle)
        end = time.monotonic() + END_S
        while any(each.is_alive() for each in chain(*self._processes.values())) and time.monotonic() < end:
            time.sleep(0.01)
        for each in self.actors.values():
            self.stop(each)

    # --- `raycloak.coordinator.cluster.control.ControlBackend`

    def call(self, actor: Actor, method: Callable[..., Any], *args: Any) -> tuple[Reference[Any], ...]:
        """Send a call; see `raycloak.coordinator.cluster.remote.Caller`."""
        return send(actor.handle, method, args)

    def fetch(self, reference: Reference[T], deadline_s: float) -> T:
        """Wait for an answer; see `raycloak.coordinator.cluster.actors.fetch`."""
        return fetch(reference, deadline_s)

    def node(self, actor: Actor) -> str:
        """Return the id of the driver's node, where both run."""
        return str(ray.get_runtime_context().get_node_id())

    def stop(self, actor: Actor) -> None:
        """End an actor and its process at once."""
        for process in self._processes.pop(actor.member_id, ()):
            process.kill()
        ray.kill(actor.handle)

    def _launch(self, role: ControlRole) -> Actor:
        cls = LedgerActor if role == "ledger" else OrchestratorActor
        handle = actor(cls, scheduling_strategy=on_this_node()).remote(*self._arguments[role])
        self._serial += 1
        return Actor(f"{role}-{self._serial}", handle)

    def _restart(self, role: ControlRole) -> Actor:
        """Start another incarnation on the same files; raises ActorLost if it dies at once, or why it cannot open."""
        each = self._launch(role)
        try:
            self._identify(each)
            if role == "orchestrator" and self._run is not None:
                self._open(each, *self._run)
        except (ActorLost, RaycloakError):
            self.stop(each)
            raise
        return each

    def _identify(self, each: Actor) -> None:
        """Wait until an actor is up and its vault is open, and note their processes."""
        found = fetch(ask_process(each.handle, own_processes), START_DEADLINE_S)
        # Where this process cannot see the others, as in another container of the node, only Ray can end the actor.
        self._processes[each.member_id] = [process for process in found if process.is_alive()]
        fetch(ask(each.handle, Hosted.opened), START_DEADLINE_S)

    def _open(self, orchestrator: Actor, secret_file: str | None, run_id: str | None) -> tuple[str, SignerPublic]:
        opening = ask(orchestrator.handle, RunOrchestrator.open_run, secret_file, run_id)
        return fetch(opening, START_DEADLINE_S)
