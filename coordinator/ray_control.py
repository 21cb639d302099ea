"""Ledger and orchestrator of one run on Ray: two actors on the driver's node, which are replaced when they are lost.

They run on the driver's node because their state is there. So the driver can end one by a signal to its process, which
also ends a stopped one at once; Ray alone takes seconds for that, while its files stay locked.
"""

import time
from collections.abc import Mapping
from typing import Any

import ray

from attestation.hybrid_signature import SignerPublic
from attestation.serving_orchestrator import EvidenceOrchestrator
from coordinator.actors import START_DEADLINE_S, actor, fetch, on_this_node
from coordinator.backend import Actor, ActorLost
from coordinator.control import Control, ControlRole
from coordinator.departures import START_AGAIN
from coordinator.ledger import PrivacyLedger
from coordinator.own_process import ActorProcess, own_process
from metrics.errors import RunFailedError
from workers.mechanism import AccountantName


class RayControl:
    """Starts, asks and replaces the two actors; `coordinator.control.Control` decides when.

    Args:
        ledger_url: absolute, as `coordinator.ledger.PrivacyLedger` takes it.
        orchestrator_folder: absolute folder of the orchestrator's state.
        witness: of the ledger, as `coordinator.ledger.PrivacyLedger` takes it.
        bind: where the orchestrator serves, as `EvidenceOrchestrator` takes it.
        accountant: that the run will most likely ask for; the ledger imports it ahead.
    """

    def __init__(
        self,
        ledger_url: str,
        orchestrator_folder: str,
        witness: str | None = None,
        bind: str | None = None,
        accountant: AccountantName = "pld",
    ) -> None:
        self._accountant = accountant
        self._arguments: Mapping[ControlRole, tuple[Any, ...]] = {
            "ledger": (ledger_url, True, witness),
            "orchestrator": (orchestrator_folder, time.time, bind),
        }
        self._processes: dict[str, ActorProcess | None] = {}
        self._serial = 0
        self.actors: dict[ControlRole, Actor] = {role: self._launch(role) for role in self._arguments}

    def open_run(self, secret_file: str | None, run_id: str | None = None) -> tuple[str, SignerPublic]:
        """Open the run, once; returns what `EvidenceOrchestrator.open_run` returns.

        Raises:
            RaycloakError: what keeps one of the two from opening its files.
        """
        for role, each in self.actors.items():
            try:
                self._identify(each)
            except ActorLost as lost:
                self._explain(role)
                raise RunFailedError(
                    "unreachable", f"the {role} could not be started ({lost.cause}).", START_AGAIN
                ) from None
        self._secret_file = secret_file
        self.run_id, key = self._open(self.actors["orchestrator"], run_id)
        # Not waited for: it overlaps with the workers' start.
        self.actors["ledger"].handle.load_accountant.remote(self._accountant)
        return self.run_id, key

    def control(self, deadline_s: float, max_restarts: int) -> Control:
        """The control of the run."""
        return Control(self, self.actors, self._restart, deadline_s, max_restarts)

    def close(self) -> None:
        """End both actors."""
        for each in self.actors.values():
            self.stop(each)

    # --- what `Control` needs of a backend

    def call(self, actor: Actor, method: str, *args: Any) -> tuple[Any, ...]:
        """See `coordinator.backend.Backend`."""
        return (getattr(actor.handle, method).remote(*args),)

    def fetch(self, reference: Any, deadline_s: float) -> Any:
        """See `coordinator.backend.Backend`."""
        return fetch(reference, deadline_s)

    def node(self, actor: Actor) -> str:
        """See `coordinator.backend.Backend`: both run on the driver's."""
        return str(ray.get_runtime_context().get_node_id())

    def stop(self, actor: Actor) -> None:
        """End the actor and its process at once."""
        process = self._processes.pop(actor.member_id, None)
        if process is not None:
            process.kill()
        ray.kill(actor.handle)

    def _launch(self, role: ControlRole) -> Actor:
        cls: type = PrivacyLedger if role == "ledger" else EvidenceOrchestrator
        handle = actor(cls, scheduling_strategy=on_this_node()).remote(*self._arguments[role])
        self._serial += 1
        return Actor(f"{role}-{self._serial}", handle)

    def _restart(self, role: ControlRole) -> Actor:
        """Another incarnation on the same files; raises ActorLost if it dies at once."""
        each = self._launch(role)
        try:
            self._identify(each)
            if role == "orchestrator":
                self._open(each, self.run_id)
        except ActorLost:
            self.stop(each)
            self._explain(role)
            raise
        return each

    def _identify(self, each: Actor) -> None:
        """Wait until the actor is there, and note its process."""
        process = fetch(each.handle.__ray_call__.remote(own_process), START_DEADLINE_S)
        # None if this process cannot see it, as in another container of the node: then Ray alone ends it.
        self._processes[each.member_id] = process if process and ActorProcess.find(process.pid) == process else None

    def _open(self, orchestrator: Actor, run_id: str | None) -> tuple[str, SignerPublic]:
        opened: tuple[str, SignerPublic] = fetch(
            orchestrator.handle.open_run.remote(self._secret_file, run_id), START_DEADLINE_S
        )
        return opened

    def _explain(self, role: ControlRole) -> None:
        """Raise what keeps the ledger from opening: Ray tells a constructor's error as text only."""
        if role == "ledger":
            PrivacyLedger(*self._arguments[role]).close()
