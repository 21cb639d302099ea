"""The wiring on Ray: how actors are made, placed and ended, under the rules of all of them.

The actors of the four roles are relays (`coordinator/cluster/relays.py`), whose vaults hold what is secret.
`coordinator/cluster/processes.py` has the questions that any actor answers. `coordinator/cluster/ray_backend.py` starts
workers and aggregators.

Rules of every actor:

* ``max_restarts=0``, because a restarted actor would keep an identity without fresh evidence;
* no secret in an argument, a message or an environment: Ray's control store keeps constructors' arguments and jobs'
  variables;
* no GPU is visible unless the actor was given one;
* no call without a deadline.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloak.attestation.simulators.tdx_pki import read_public
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.gpu_actor import NodeGpus
from raycloak.coordinator.cluster.node_evidence import NodeEvidenceSource
from raycloak.coordinator.cluster.platform_actor import NodePlatform
from raycloak.coordinator.cluster.processes import MACHINE_LABEL, cpu_flags, nvml_missing, own_node
from raycloak.coordinator.cluster.ray_calls import ask, ask_process, fetch, wait
from raycloak.coordinator.cluster.ray_checks import check_ray, start_failed, unreachable, variables
from raycloak.coordinator.cluster.relays import (
    LedgerActor,
    MaskedAggregatorActor,
    OrchestratorActor,
    TrainWorkerActor,
)
from raycloak.coordinator.config.home import ray_token_file
from raycloak.coordinator.config.secret_variables import SECRET_VARIABLES, require_none_among
from raycloak.coordinator.console.output import divert_logger
from raycloak.coordinator.vaults.calls import Reference
from raycloak.coordinator.vaults.machine_name import machine_name
from raycloak.metrics.gpu_readings import GpuReading, GpuSampler
from raycloak.workers.gradients.environment import own_flags, widest_shared
from raycloak.workers.inputs.user_code import UNPACKED

P = ParamSpec("P")
T = TypeVar("T")

START_DEADLINE_S = 120.0
"""Time for a process to start and import. On a busy machine that takes tens of seconds."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Hides every GPU from a process. NVML sees them all the same."""
_RELAYED = {
    "raycloak.attestation.service.serving_orchestrator.EvidenceOrchestrator": OrchestratorActor,
    "raycloak.coordinator.ledger.ledger.PrivacyLedger": LedgerActor,
    "raycloak.coordinator.aggregation.aggregator.MaskedAggregator": MaskedAggregatorActor,
    "raycloak.workers.train_worker.TrainWorker": TrainWorkerActor,
}
"""By name, since these classes bring torch and more, which only their vaults need."""
_inherited: dict[str, str] = {}
"""Variables that every process of the present cluster has from its start; of a cluster of others, none is known."""


def actor(cls: type, **options: Any) -> Any:
    """Make an actor class of a plain class, under the rules above.

    Of TrainWorker, MaskedAggregator, PrivacyLedger and EvidenceOrchestrator it makes a relay, which hosts the class in
    a process that Ray does not run; see `raycloak.coordinator.cluster.relays` for the arguments.

    Args:
        options: options of Ray, such as ``num_cpus``. ``environment`` holds variables that are set before the actor's
            process imports anything. ``sees_gpus`` leaves the node's GPUs visible without reserving one.
    """
    environment = options.pop("environment", {})
    if not options.get("num_gpus") and not options.pop("sees_gpus", False):
        environment = {**NO_GPU, **environment}
    settings = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": 0, **options}
    # Ray starts a process with variables of its own twice, for a quarter of a second of CPU.
    if missing := {name: value for name, value in environment.items() if _inherited.get(name) != value}:
        settings["runtime_env"] = {"env_vars": missing}
    made = _RELAYED.get(f"{cls.__module__}.{cls.__qualname__}", cls)
    if hasattr(made, "receive_beside"):
        settings["concurrency_groups"] = {"control": 1}
    return ray.remote(**settings)(made)


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Return the placement on the driver's node, where RAYCLOAK_HOME is."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def off_this_node() -> dict[str, Any]:
    """Return the options that place an actor on any node but the driver's, or on that one if there is no other.

    Orchestrator and ledger are on the driver's node. If an aggregator were there too, a reader of that machine's memory
    would see through the noise.
    """
    own = ray.get_runtime_context().get_node_id()
    return {
        "scheduling_strategy": "SPREAD",
        "label_selector": {"ray.io/node-id": f"!{own}"},
        "fallback_strategy": [{"label_selector": {}}],
    }


def ask_node(handle: Any) -> Reference[str]:
    """Ask on which node an actor runs; returns a reference to the node's id."""
    return ask_process(handle, own_node)


def alive_nodes() -> dict[str, Mapping[str, str]]:
    """Return the labels of the nodes that can run actors, by node id."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["Labels"] for node in nodes if node["Alive"]}


class Platforms:
    """The simulated platforms, one per node, also on nodes that join later.

    A platform has the identity of the machine that its node is on, so that keys are counted by machine, in whatever
    execution and cluster; see `raycloak.coordinator.cluster.processes.machine_name`. A node's id would not do: it
    is new whenever Ray starts there.
    """

    def __init__(self, vendor: SimulatedVendor) -> None:
        self._vendor = vendor
        # A node that joins is asked for its machine while the run goes on.
        self._installer = ThreadPoolExecutor(thread_name_prefix="simulated platforms")
        self._installing: list[Future[None]] = []
        self.handles: dict[str, Any] = {}
        self.extend()

    def extend(self) -> None:
        """Start a platform on each node that has none yet."""
        for node, labels in alive_nodes().items():
            if node not in self.handles:
                handle = self.handles[node] = _on_node(node, NodePlatform).remote()
                self._installing.append(self._installer.submit(self._install, handle, labels.get(MACHINE_LABEL)))

    def _install(self, handle: Any, label: str | None) -> None:
        machine = fetch(ask_process(handle, machine_name, label), START_DEADLINE_S)
        own = read_public(fetch(ask(handle, NodePlatform.public_key), START_DEADLINE_S))
        fetch(ask(handle, NodePlatform.install, self._vendor.certify(own, machine)), START_DEADLINE_S)

    def wait(self) -> None:
        """Wait until every platform that was started has its certificate; raises as :func:`fetch`."""
        installing, self._installing = self._installing, []
        for each in installing:
            each.result()

    def source(self) -> NodeEvidenceSource:
        """Return an evidence source for an actor that is started now, on any present node."""
        self.extend()
        return NodeEvidenceSource(dict(self.handles))

    @property
    def gpus_per_worker(self) -> int:
        """The confidential GPUs of a worker: a simulated node has none."""
        return 0

    def close(self) -> None:
        """Kill every platform."""
        kill_all(self.handles.values())
        self._installer.shutdown(cancel_futures=True)


def start_platforms(vendor: SimulatedVendor) -> dict[str, Any]:
    """Start one simulated platform per node; returns them by node id, once they are certified."""
    platforms = Platforms(vendor)
    platforms.wait()
    return platforms.handles


def shared_capability(present: Mapping[str, Any]) -> str:
    """Return the widest instruction set that the CPUs of all present nodes have, this one's included.

    Any of them may get a worker or an aggregator, and all of a run compute alike.

    Args:
        present: actors that run anyway, by node id; a node without one gets a process for the question.
    """
    others = alive_nodes().keys() - {ray.get_runtime_context().get_node_id()}
    asked = {node: present.get(node) or _on_node(node, NodeGpus).remote(node[:12]) for node in others}
    flags = [own_flags()]
    try:
        answers = [ask_process(handle, cpu_flags) for handle in asked.values()]
        for answer in answers:
            # A node that is gone gets no worker.
            with suppress(ActorLost):
                flags.append(fetch(answer, START_DEADLINE_S))
    finally:
        kill_all(handle for node, handle in asked.items() if node not in present)
    return widest_shared(flags)


class GpuSamplers:
    """The GPU samplers, one per node with NVML, also on nodes that join later.

    Each sees all GPUs of its node and uses none.

    Args:
        present: actors that run anyway, by node id. They are asked whether their node has NVML: a process started only
            to find none would cost a second of CPU.
    """

    def __init__(self, present: Mapping[str, Any] | None = None) -> None:
        self._handles: dict[str, Any] = {}
        self._asked = {node: ask_process(actor, nvml_missing, node[:12]) for node, actor in (present or {}).items()}
        self._seen = set(self._asked)
        self._extend()

    def _extend(self) -> None:
        for node in alive_nodes().keys() - self._seen:
            self._seen.add(node)
            self._start(node)

    def _start(self, node: str) -> None:
        self._handles[node] = _on_node(node, NodeGpus, sees_gpus=True).remote(node[:12])

    def unavailable_reasons(self) -> list[str]:
        """Return why nodes have no readings, and end their samplers, which would never have any."""
        asked, self._asked = self._asked, {}
        asked |= {node: ask(handle, GpuSampler.unavailable_reason) for node, handle in self._handles.items()}
        answers = {node: fetch(reference, START_DEADLINE_S) for node, reference in asked.items()}
        reasons = {node: reason for node, reason in answers.items() if reason}
        kill_all(self._handles.pop(node) for node in reasons if node in self._handles)
        for node in answers.keys() - reasons.keys() - self._handles.keys():
            self._start(node)
        return list(reasons.values())

    def sample(self, deadline_s: float = 2.0) -> tuple[GpuReading, ...]:
        """Return the readings of all nodes that answer in time."""
        self._extend()
        references = [ask(handle, GpuSampler.sample) for handle in self._handles.values()]
        readings: list[GpuReading] = []
        for reference in wait(references, deadline_s, fetch_local=True):
            # A sampler is lost with its node; the page still has to show the other nodes.
            with suppress(ActorLost):
                readings.extend(fetch(reference, deadline_s))
        return tuple(readings)

    def close(self) -> None:
        """Kill every sampler."""
        kill_all(self._handles.values())


def _on_node(node: str, cls: type, **options: Any) -> Any:
    return actor(cls, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options)


def kill_all(handles: Iterable[Any]) -> None:
    """Kill actors at once, without letting their processes finish anything."""
    for handle in handles:
        ray.kill(handle)


def is_connected() -> bool:
    """Return whether this process is connected to a cluster."""
    return ray.is_initialized()


def connect(num_cpus: int, environment: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Join the cluster of RAY_ADDRESS, or start a local one; returns whether this call connected.

    A local cluster gets a token of its own, in a file of the state folder.

    Guarantee: no process of a local cluster is started with a variable of `SECRET_VARIABLES`, but for a RAY_AUTH_TOKEN
    of the user's own.

    Args:
        environment: variables that every process of a local cluster inherits. An actor that needs just these starts
            sooner; see :func:`actor`.

    Raises:
        ConfigError: ``ray_address``, ``ray_unreachable`` or ``ray_temp``, within seconds; ``ray_start``.
    """
    if is_connected():
        return False
    # Every failure that matters is fetched; Ray would print the others among the run's lines.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    divert_logger("ray")
    if address := check_ray():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise unreachable(address, str(error).splitlines()[0].removesuffix(".")) from None
        return True
    # Ray authenticates a new local cluster by token unless RAY_AUTH_MODE says otherwise.
    if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(ray_token_file())
    withheld = dict.fromkeys(SECRET_VARIABLES.keys() - {"RAY_AUTH_TOKEN"})
    with variables({**environment, **withheld}):
        # Ray starts processes ahead, one per CPU. Actors without variables of their own take them.
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        # Ray names no exceptions of its start, and nothing private has been read.
        except Exception as error:
            raise start_failed(error) from error
    _inherited.update(environment)
    return True


def job_folder() -> Path | None:
    """Return this process's copy of the working directory that was uploaded for its job; None if none was."""
    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        return None
    # An entry point may have changed into a folder of it.
    working = Path.cwd()
    return next((each for each in (working, *working.parents) if each.parent.name == UNPACKED), working)


def require_no_secret_in_job() -> None:
    """Refuse a job whose runtime_env has secrets, which Ray's control store keeps; ConfigError ``secret_variable``."""
    variables = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    require_none_among(variables, "the env_vars of this job's runtime_env, which Ray keeps and shows")


def disconnect() -> None:
    """Leave the cluster, which ends a local one; for the caller whose :func:`connect` returned True."""
    _inherited.clear()
    ray.shutdown()
