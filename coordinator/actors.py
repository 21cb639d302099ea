"""The wiring on Ray: the one module that makes actors of the plain classes.

What an actor adds to its class is in a module of its own beside it (`coordinator/ledger_actor.py` and others), and what
is asked of any actor in `coordinator/own_process.py`. Those are what its process imports, and no more: a process starts
sooner without torch, SQLAlchemy or the verifiers it has no use for. The backend that starts workers and aggregators is
in `coordinator/ray_backend.py`.

Rules of every actor: ``max_restarts=0`` (a restarted actor would keep an identity without fresh evidence), no secret
in a constructor argument (those stay readable in Ray's control store), no GPU visible unless it was given one, and
no call without a deadline.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from attestation.serving_orchestrator import ServingOrchestrator
from attestation.simulator import SimulatedVendor
from coordinator.backend import ActorLost
from coordinator.ledger import PrivacyLedger
from coordinator.ledger_actor import LedgerActor
from coordinator.node_evidence import NodeEvidenceSource
from coordinator.orchestrator_actor import OrchestratorActor
from coordinator.output import divert_logger
from coordinator.own_process import nvml_missing, own_node
from coordinator.platform_actor import NodePlatform
from metrics.errors import RaycloakError, RunFailedError
from metrics.gpu_readings import GpuReading, GpuSampler

START_DEADLINE_S = 120.0
_WIRED = {ServingOrchestrator: OrchestratorActor, PrivacyLedger: LedgerActor}


def actor(cls: type, **options: Any) -> Any:
    """``ray.remote(cls)`` under the rules above. ``view`` of orchestrator and ledger runs beside other methods.

    Args:
        options: Ray's, such as ``num_cpus``; ``environment`` (variables set before the actor's process imports
            anything); ``sees_gpus`` leaves the node's GPUs visible without reserving one.
    """
    environment = options.pop("environment", {})
    if not options.get("num_gpus") and not options.pop("sees_gpus", False):
        environment = {"CUDA_VISIBLE_DEVICES": "", **environment}
    settings = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": 0, **options}
    if cls in _WIRED:
        settings["concurrency_groups"] = {"control": 1}
    return ray.remote(**settings, runtime_env={"env_vars": environment})(_WIRED.get(cls, cls))


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Placement on the driver's node, where RAYCLOAK_HOME is."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def ask_node(handle: Any) -> Any:
    """Reference to the id of the node an actor runs on."""
    return handle.__ray_call__.remote(own_node)


def alive_nodes() -> list[str]:
    """Ids of the nodes that can run actors."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["NodeID"] for node in nodes if node["Alive"]]


class Platforms:
    """One simulated platform per node, also on nodes that join later."""

    def __init__(self, vendor: SimulatedVendor) -> None:
        self._vendor = vendor
        self._installing: list[Any] = []
        self.handles: dict[str, Any] = {}
        self.extend()

    def extend(self) -> None:
        """Start the platforms that are missing."""
        for node in alive_nodes():
            if node not in self.handles:
                self.handles[node] = _on_node(node, NodePlatform).remote()
                self._installing.append(self.handles[node].install.remote(self._vendor.platform().to_bytes()))

    def wait(self) -> None:
        """Return when those that were started have their keys; errors as :func:`fetch`."""
        installing, self._installing = self._installing, []
        fetch_all(installing, START_DEADLINE_S)

    def source(self) -> NodeEvidenceSource:
        """The evidence source of an actor that is started now, on any node that is there."""
        self.extend()
        return NodeEvidenceSource(dict(self.handles))

    def gpus(self) -> None:
        """A simulated node has no confidential GPU."""

    def close(self) -> None:
        """Kill them all."""
        kill_all(self.handles.values())


def start_platforms(vendor: SimulatedVendor) -> dict[str, Any]:
    """One simulated platform per node, by node id; they have their keys."""
    platforms = Platforms(vendor)
    platforms.wait()
    return platforms.handles


class GpuSamplers:
    """One GpuSampler per node with NVML, also on nodes that join later; each sees all GPUs of its node and uses none.

    Args:
        present: by node id, actors that are there anyway. They are asked whether their node has NVML, so that no
            process starts, for a second of CPU, only to find none.
    """

    def __init__(self, present: Mapping[str, Any] | None = None) -> None:
        self._handles: dict[str, Any] = {}
        self._asked = {
            node: actor.__ray_call__.remote(nvml_missing, node[:12]) for node, actor in (present or {}).items()
        }
        self._seen = set(self._asked)
        self._extend()

    def _extend(self) -> None:
        for node in alive_nodes():
            if node not in self._seen:
                self._seen.add(node)
                self._start(node)

    def _start(self, node: str) -> None:
        self._handles[node] = _on_node(node, GpuSampler, sees_gpus=True).remote(node[:12])

    def unavailable_reasons(self) -> list[str]:
        """Why nodes that are there at the start have no readings; their samplers end, as they would never have any."""
        asked, self._asked = self._asked, {}
        asked |= {node: handle.unavailable_reason.remote() for node, handle in self._handles.items()}
        answers = {node: fetch(reference, START_DEADLINE_S) for node, reference in asked.items()}
        reasons = {node: reason for node, reason in answers.items() if reason}
        kill_all(self._handles.pop(node) for node in reasons if node in self._handles)
        for node in answers.keys() - reasons.keys() - self._handles.keys():
            self._start(node)
        return list(reasons.values())

    def sample(self, deadline_s: float = 2.0) -> tuple[GpuReading, ...]:
        """The readings of all nodes that answer in time."""
        self._extend()
        references = [handle.sample.remote() for handle in self._handles.values()]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=deadline_s)
        readings: list[GpuReading] = []
        for reference in ready:
            # A sampler goes with its node, and that is no reason for a page without the other nodes.
            with suppress(ActorLost):
                readings.extend(fetch(reference, deadline_s))
        return tuple(readings)

    def close(self) -> None:
        """Kill them all."""
        kill_all(self._handles.values())


def _on_node(node: str, cls: type, **options: Any) -> Any:
    return actor(cls, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options)


def kill_all(handles: Iterable[Any]) -> None:
    """End actors at once."""
    for handle in handles:
        ray.kill(handle)


def fetch(reference: Any, deadline_s: float) -> Any:
    """``ray.get`` with a deadline and our errors.

    Raises:
        ActorLost: the actor died, cannot be reached, did not answer in time, or lacks an object that went with its
            node.
        RaycloakError: what the actor raised; RunFailedError ``worker_error`` for anything else.
    """
    try:
        return ray.get(reference, timeout=deadline_s)
    except GetTimeoutError:
        raise ActorLost("deadline") from None
    except (OutOfMemoryError, MemoryError):
        raise ActorLost("out_of_memory") from None
    except ObjectLostError:
        raise ActorLost("object_lost") from None
    except ActorUnavailableError:
        raise ActorLost("unreachable") from None
    except RayActorError:
        raise ActorLost("died") from None
    except RayTaskError as error:
        if isinstance(error.cause, RaycloakError):
            raise error.cause from None
        raise RunFailedError(
            "actor_error", f"an actor failed with {type(error.cause).__name__}", "See the log of the run for its trace."
        ) from error
    except ActorPlacementGroupRemoved:
        raise ActorLost("unplaceable") from None
    except RayError:
        raise ActorLost("unreachable") from None


def fetch_all(references: Sequence[Any], deadline_s: float) -> list[Any]:
    """Every value, in order; errors as :func:`fetch`."""
    return [fetch(reference, deadline_s) for reference in references]


def cluster_gpus() -> float:
    """GPUs of the cluster as Ray counts them."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return float(resources.get("GPU", 0.0))


def connect(num_cpus: int) -> bool:
    """Join the cluster of RAY_ADDRESS, or start a local one; True if this call started it.

    A local cluster gets a token of its own in the environment, so nothing is written to the user's home.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    divert_logger("ray")
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        return True
    # Ray authenticates a new local cluster by token unless RAY_AUTH_MODE says otherwise.
    if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        os.environ["RAY_AUTH_TOKEN"] = os.urandom(32).hex()
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        # Ray would start processes for tasks ahead, and every actor here has one of its own.
        _system_config={"prestart_worker_first_driver": False},
    )
    return True
