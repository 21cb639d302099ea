"""The backend on Ray: starts workers and aggregators, sends them calls and fetches their answers."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ray

from raycloak.attestation.attester.attester import EvidenceSource
from raycloak.coordinator.cluster.actors import actor, ask_node, kill_all, off_this_node
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.placement import Placement, cluster_nodes
from raycloak.coordinator.cluster.ray_calls import ask, cancel, fetch, put, send, wait
from raycloak.coordinator.cluster.relays import MaskedAggregatorActor, TrainWorkerActor
from raycloak.coordinator.cluster.remote import Actor, Aggregator, AggregatorActor, Spare, Worker, WorkerActor
from raycloak.coordinator.config.sections import BoundaryConfig
from raycloak.coordinator.vaults.calls import Reference
from raycloak.workers.gradients.environment import worker_environment

if TYPE_CHECKING:
    from raycloak.coordinator.vaults.aggregator_vault import AggregatorVault
    from raycloak.coordinator.vaults.worker_vault import WorkerVault

T = TypeVar("T")

if TYPE_CHECKING:
    # Annotated, so that mypy compares the real classes with the methods that callers see.
    _WORKER: type[Worker] = WorkerVault
    _AGGREGATOR: type[Aggregator] = AggregatorVault

NODE_DEADLINE_S = 30.0
"""Time to say on which node an actor runs. It is asked first of all, so only a start on a busy machine delays it."""
SPARE_DEADLINE_S = 1.0
"""Time for a spare process to answer. It has nothing else to do, and a dead one must not hold up a recovery."""
SPARE_AFTER_S = 15.0
"""Training time before a spare is kept. Starting a process takes seconds of CPU, too much for a short run."""


class EvidenceSources(Protocol):
    """The platforms that evidence comes from: `raycloak.coordinator.cluster.actors.Platforms` or
    `raycloak.coordinator.evidence.sources.Guests`.

    Attributes:
        gpus_per_worker: confidential GPUs of each worker.
    """

    @property
    def gpus_per_worker(self) -> int: ...

    def source(self) -> EvidenceSource | None:
        """Return the simulated platforms; None for machines whose guests give evidence themselves."""
        ...

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Started:
    """An actor and a reference to its node.

    An actor is asked for its node before anything else, so the answer does not wait for a busy actor later.
    """

    handle: Any
    node: Reference[str]

    @classmethod
    def of(cls, handle: Any) -> "_Started":
        return cls(handle, ask_node(handle))

    def is_up(self) -> bool:
        """Return whether the actor has started, or was lost."""
        return bool(wait([self.node], 0))

    def is_on(self, nodes: Collection[str]) -> bool:
        """Return whether the actor runs on one of ``nodes``. One that has not started, or was lost, runs on none."""
        try:
            return bool(nodes) and self.is_up() and fetch(self.node, NODE_DEADLINE_S) in nodes
        except ActorLost:
            return False


class RayBackend:
    """The workers and aggregators of one run on Ray.

    A spare aggregator process is kept while the run trains, because importing torch takes longer than the rest of a
    recovery. The spare is not a member and has no keys.

    Args:
        platforms: sources of evidence.
        placement: chooses the workers' nodes.
        cpu_capability: instruction set of workers and aggregators.
        threads: of one torch operation in a worker.
        aggregators: of the run.
        boundary: where the machines' vaults listen, if the run uses those.
    """

    def __init__(
        self,
        platforms: EvidenceSources,
        placement: Placement,
        *,
        cpu_capability: str,
        threads: int,
        aggregators: int,
        boundary: BoundaryConfig | None = None,
    ) -> None:
        self._platforms = platforms
        self._sockets = {role: boundary.of(role) if boundary else None for role in ("worker", "aggregator")}
        self._placement = placement
        self._environment = worker_environment(cpu_capability, threads)
        # An aggregator reserves no CPU. While it works, workers wait, so it may take what they have.
        self._aggregator_cpus = int(placement.cpus_together / aggregators)
        self._members: dict[str, _Started] = {}
        self._spare: _Started | None = None
        self._first_reduce: float | None = None
        self._aggregator = actor(MaskedAggregatorActor, **off_this_node(), environment=self._environment)

    def start_worker(self, member_id: str) -> WorkerActor:
        bundle = self._placement.bundle
        cpus = bundle.pop("CPU", 0.0)
        options = {"num_cpus": cpus, "num_gpus": bundle.pop("GPU", 0.0), "resources": bundle}
        worker = actor(
            TrainWorkerActor,
            **options,
            scheduling_strategy=self._placement.take(member_id),
            environment=self._environment,
        )
        evidence = self._platforms.source(), self._platforms.gpus_per_worker, self._sockets["worker"]
        started = self._members[member_id] = _Started.of(worker.remote(member_id, *evidence, int(cpus)))
        return WorkerActor(member_id, started.handle, self.call)

    def start_aggregator(self, member_id: str) -> AggregatorActor:
        spare, self._spare = self._spare or self._new_aggregator(), None
        if not self._answers(spare):
            ray.kill(spare.handle)
            spare = self._new_aggregator()
        ask(spare.handle, Spare.take_part, member_id)
        self._members[member_id] = spare
        return AggregatorActor(member_id, spare.handle, self.call)

    def _new_aggregator(self) -> _Started:
        of_run = self._platforms.source(), self._sockets["aggregator"], self._aggregator_cpus
        return _Started.of(self._aggregator.remote(*of_run))

    def _answers(self, started: _Started) -> bool:
        """Return whether a process answers, or is still starting."""
        if not started.is_up():
            return True
        try:
            fetch(ask_node(started.handle), SPARE_DEADLINE_S)
        except ActorLost:
            return False
        return True

    def _keep_spare(self) -> None:
        now = time.monotonic()
        self._first_reduce = self._first_reduce or now
        if self._spare is None and now - self._first_reduce >= SPARE_AFTER_S:
            self._spare = self._new_aggregator()

    def close(self) -> None:
        """Kill every actor, so that keys and clear updates are gone at once and no process lingers in its exit."""
        kill_all(started.handle for started in (*self._members.values(), self._spare) if started is not None)
        self._placement.close()

    def call(
        self,
        actor: Actor,
        method: Callable[..., Any],
        *args: Any,
        returns: int = 1,
    ) -> tuple[Reference[Any], ...]:
        """Send a call; see `raycloak.coordinator.cluster.remote.Caller`."""
        answers = send(actor.handle, method, args, returns)
        if method is Aggregator.reduce:
            self._keep_spare()
        return answers

    wait = staticmethod(wait)
    fetch = staticmethod(fetch)
    cancel = staticmethod(cancel)
    put = staticmethod(put)

    def stop(self, actor: Actor) -> None:
        ray.kill(actor.handle)
        self._members.pop(actor.member_id, None)
        self._placement.release(actor.member_id)

    def close_place(self, actor: WorkerActor) -> None:
        self._placement.close_place(actor.member_id)

    def node(self, actor: Actor) -> str:
        started = self._members.get(actor.member_id) or _Started.of(actor.handle)
        return str(fetch(started.node, NODE_DEADLINE_S))

    @staticmethod
    def aggregator_rooms() -> Sequence[int]:
        own = ray.get_runtime_context().get_node_id()
        nodes = cluster_nodes()
        # As `off_this_node` places them.
        apart = [each for each in nodes if each.node_id != own] or nodes
        return [int(each.total.get("memory", 0) + each.total.get("object_store_memory", 0)) for each in apart]

    def room(self) -> int:
        return self._placement.room()

    def departing(self) -> Collection[str]:
        self._placement.expire()
        draining = self._placement.draining()
        return [member_id for member_id, started in self._members.items() if started.is_on(draining)]
