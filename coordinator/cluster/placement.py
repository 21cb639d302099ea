"""Placement reserves the nodes on which workers run, by Ray's placement groups.

The initial workers share one group, one bundle each. A worker that joins later takes the bundle of one that left, if
its node still exists. Otherwise it gets a group of its own with one bundle, because groups cannot grow. This module
hides groups, bundles and Ray's tables of nodes.

Guarantee: anything that cannot be placed is named within ``placement.deadline_s``, and leaves nothing reserved. The
initial workers are refused. A joiner is named in the log and counts as lost.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycloak.coordinator.config.sections import PlacementConfig, UseGpu
from raycloak.metrics.errors import ConfigError

LOGGER = logging.getLogger("raycloak.placement")
# Ray's table of draining nodes is asked for at most this often.
POLL_S = 1.0
SETTLE_S = 1.0
"""The seconds after which Ray's table of free resources shows a new reservation."""
GRAIN = 10_000
"""Ray counts resources in units of 1/10,000."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: its resources, the free ones among them, and its labels."""

    node_id: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """A wish for ``bundles`` equal bundles, on nodes that carry ``labels``, by one of Ray's four strategies."""

    bundle: Mapping[str, float]
    labels: Mapping[str, str]
    bundles: int
    strategy: str

    def alone(self) -> "BundleRequest":
        """Return the same bundle without neighbours."""
        return replace(self, bundles=1, strategy="PACK")

    def fitting(self, nodes: Sequence[NodeView]) -> int:
        """Return how many such bundles fit on the free resources."""
        fits = [self._on(node) for node in nodes]
        match self.strategy:
            case "STRICT_PACK":
                return max(fits, default=0)
            case "STRICT_SPREAD":
                return sum(min(fit, 1) for fit in fits)
        return sum(fits)

    def shortfall(self, nodes: Sequence[NodeView]) -> str:
        """Return two sentences: the request with the bundle that does not fit, and what each node has."""
        labels = f" on nodes with {_named(self.labels)}" if self.labels else ""
        fits = min(self.fitting(nodes), self.bundles - 1)
        asked = f"{self.bundles} bundles of {_named(self.bundle)}{labels} were asked for with strategy {self.strategy}"
        each = "; ".join(self._say(node) for node in nodes)
        return f"{asked}: bundle {fits + 1} of {self.bundles} does not fit. The cluster has {each or 'no usable node'}."

    def _on(self, node: NodeView) -> int:
        if not all(carries(node.labels, key, selector) for key, selector in self.labels.items()):
            return 0
        return min(_grains(node.free.get(name, 0.0)) // _grains(amount) for name, amount in self.bundle.items())

    def _say(self, node: NodeView) -> str:
        amounts = ", ".join(
            f"{name} {node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} free" for name in self.bundle
        )
        shown = {
            key: value for key, value in node.labels.items() if not key.startswith("ray.io/") or key in self.labels
        }
        labels = f", labels {_named(shown)}" if shown else ""
        return f"node {node.node_id[:12]} ({amounts}{labels})"


def even_share(nodes: Sequence[NodeView], resource: str, request: BundleRequest) -> float:
    """Return the largest share of ``resource``, at most 1, at which all bundles of ``request`` fit; 0 if none."""
    capacities = {node.total.get(resource, 0.0) for node in nodes}
    # Rounded down, so that k shares never exceed a node's capacity.
    shares = {1.0} | {int(1000 * c / k) / 1000 for c in capacities for k in range(1, request.bundles + 1)}
    empty = [replace(node, free=node.total) for node in nodes]
    fitting = (
        share
        for share in shares
        if 0 < share <= 1 and replace(request, bundle={resource: share}).fitting(empty) >= request.bundles
    )
    return max(fitting, default=0.0)


def carries(labels: Mapping[str, str], key: str, selector: str) -> bool:
    """Return whether ``labels`` match Ray's selector of one key: ``a``, ``!a``, ``in(a, b)`` or ``!in(a, b)``."""
    wanted = selector.removeprefix("!")
    values = [value.strip() for value in wanted[3:-1].split(",")] if wanted.startswith("in(") else [wanted]
    return (labels.get(key) in values) != selector.startswith("!")


def _grains(amount: float) -> int:
    return round(amount * GRAIN)


def _named(amounts: Mapping[str, float] | Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{k}: {v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in amounts.items()) + "}"


class Draining:
    """The ids of draining nodes, asked for at most once per second.

    Ray keeps that table for its own trainer and promises nothing about it. If it is missing, that is logged once and no
    node counts as draining. The workers of a drained node then leave when it dies.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_at: float | None = None
        self._nodes: frozenset[str] = frozenset()

    def nodes(self) -> frozenset[str]:
        """Return the ids as of at most a second ago."""
        if self._asked_at is None or self._clock() - self._asked_at >= POLL_S:
            self._asked_at = self._clock()
            self._nodes = self._read()
        return self._nodes

    def _read(self) -> frozenset[str]:
        try:
            return frozenset(ray._private.state.state.get_draining_nodes())
        except AttributeError as error:
            # Never ask again: this version of Ray has no such table.
            self._asked_at = float("inf")
            LOGGER.warning("Ray %s has no table of draining nodes, drains are not seen: %s", ray.__version__, error)
            return frozenset()


class Placement:
    """The placement groups of one run.

    Args:
        config: strategy, resources, labels and deadline.
        num_workers: number of bundles of the shared group.
        use_gpu: whether each worker reserves a share of the cluster's GPUs; ``if_there`` takes a CPU without any.
        reserved: a group of the caller's, whose first bundle is the caller's own and whose others are for the initial
            workers; None to reserve one. It stays when the run ends.

    Raises:
        ConfigError: ``config``, ``unplaceable``, or ``no_gpu`` where each worker is to have a GPU and none can.
    """

    def __init__(
        self, config: PlacementConfig, num_workers: int, use_gpu: UseGpu, reserved: PlacementGroup | None = None
    ) -> None:
        self._config = config
        self._num_workers = num_workers
        self._draining = Draining()
        self._reserved = reserved
        self._first_bundle = 0 if reserved is None else 1
        self._request = self._make_request(use_gpu)
        if use_gpu is True and not self.num_gpus:
            raise ConfigError(
                "no_gpu",
                f"use_gpu is set, and no GPU can be given to each of {num_workers} workers: {self._gpus_found()}.",
                "Change placement or the cluster, or set use_gpu: if_there: all then compute on the CPU.",
            )
        self._shared: PlacementGroup | None = None
        self._seats: dict[str, int] = {}
        self._seated = 0
        self._own: dict[str, PlacementGroup] = {}
        self._closed_seats: set[int] = set()
        self._closed_groups: list[PlacementGroup] = []
        self._pending: dict[str, float] = {}
        self._reserved_at = 0.0

    @property
    def num_gpus(self) -> float:
        """The GPUs that each worker reserves."""
        return self._request.bundle.get("GPU", 0.0)

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that each worker reserves."""
        return dict(self._request.bundle)

    @property
    def cpus_together(self) -> float:
        """The CPUs that the initial workers reserve together."""
        return self._num_workers * self._request.bundle.get("CPU", 0.0)

    def draining(self) -> frozenset[str]:
        """Return the ids of draining nodes."""
        return self._draining.nodes()

    def reserve(self) -> PlacementGroup:
        """Wait until the initial workers have their places, on nodes that a cluster may have to start for them.

        Raises:
            ConfigError: ``unplaceable``, with the request, the cluster's resources and the bundle that does not fit.
        """
        if self._shared is None:
            self._shared = self._reserve_shared()
        return self._shared

    def take(self, member_id: str) -> PlacementGroupSchedulingStrategy:
        """Take a place for a new worker: a bundle of the shared group, or a group of its own.

        Only the first call may wait; errors as :meth:`reserve`.
        """
        shared = self.reserve()
        seat = self._free_seat(shared)
        if seat is None:
            own = self._own[member_id] = self._group(1, "PACK")
            self._pending[member_id] = self._reserved_at + self._config.deadline_s
            return PlacementGroupSchedulingStrategy(own, placement_group_bundle_index=0)
        self._seats[member_id] = seat
        return PlacementGroupSchedulingStrategy(shared, placement_group_bundle_index=self._first_bundle + seat)

    def release(self, member_id: str) -> None:
        """Give back the place of a stopped worker. Another worker may take its bundle."""
        self._seats.pop(member_id, None)
        self._pending.pop(member_id, None)
        group = self._own.pop(member_id, None)
        if group is not None:
            remove_placement_group(group)

    def close_place(self, member_id: str) -> None:
        """Let nobody else have the place of a worker. It stays reserved, so that Ray places the next one elsewhere."""
        seat = self._seats.pop(member_id, None)
        if seat is not None:
            self._closed_seats.add(seat)
        elif (group := self._own.pop(member_id, None)) is not None:
            self._closed_groups.append(group)

    def room(self) -> int:
        """Return how many more workers fit now: in vacated bundles, and in new ones on the nodes' free resources.

        Draining nodes do not count. The result is 0 while a new reservation may not be visible yet.
        """
        if time.monotonic() - self._reserved_at < SETTLE_S:
            return 0
        nodes = self._usable_nodes()
        return sum(self._is_free(seat, nodes) for seat in self._vacated()) + self._request.alone().fitting(nodes)

    def expire(self) -> None:
        """Give up on groups of joiners that were not placed in time. The workers for them are lost."""
        # A copy, because `release` removes entries.
        for member_id, deadline in list(self._pending.items()):
            if placement_group_table(self._own[member_id])["state"] != "PENDING":
                self._pending.pop(member_id)
            elif time.monotonic() >= deadline:
                LOGGER.warning(
                    "%s was not placed. %s", member_id, self._request.alone().shortfall(self._usable_nodes())
                )
                self.release(member_id)

    def close(self) -> None:
        """Remove every group. Processes that still run in one end."""
        shared = [self._shared] if self._shared and self._reserved is None else []
        groups = [*self._own.values(), *self._closed_groups, *shared]
        self._own, self._pending, self._seats, self._shared = {}, {}, {}, None
        self._closed_seats, self._closed_groups = set(), []
        for group in groups:
            remove_placement_group(group)

    def _make_request(self, use_gpu: UseGpu) -> BundleRequest:
        config = self._config
        given = config.resources_per_worker
        if given.get("GPU") and not use_gpu:
            raise ConfigError(
                "config",
                "placement.resources_per_worker reserves GPUs, but use_gpu is false.",
                "Set use_gpu: true, or leave GPU out.",
            )
        request = BundleRequest({}, dict(config.labels), self._num_workers, config.strategy)
        if self._reserved is not None:
            bundles = self._reserved.bundle_specs[1:]
            if len(bundles) != self._num_workers:
                raise ConfigError(
                    "unplaceable",
                    f"{len(bundles)} bundles are reserved for {self._num_workers} workers.",
                    "Reserve one bundle for the trial itself and one for each worker.",
                )
            return replace(request, bundle=dict(bundles[0]))
        bundle = dict(given)
        if config.accelerator_type is not None:
            # The amount that Ray itself takes for a type of accelerator.
            bundle[f"accelerator_type:{config.accelerator_type}"] = 0.001
        nodes = cluster_nodes()
        if "CPU" not in given:
            bundle["CPU"] = even_share(nodes, "CPU", request) or 1.0
        if use_gpu and "GPU" not in given:
            bundle["GPU"] = even_share(nodes, "GPU", request)
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if not bundle or min(bundle.values()) < 0:
            raise ConfigError(
                "config",
                f"placement.resources_per_worker reserves nothing that Ray can place: {given}.",
                "Give each resource a number above 0.",
            )
        return replace(request, bundle=bundle)

    def _gpus_found(self) -> str:
        if "GPU" in self._config.resources_per_worker:
            return "placement.resources_per_worker has GPU: 0"
        found = [f"node {node.node_id[:12]} has {node.total.get('GPU', 0.0):g}" for node in cluster_nodes()]
        return f"{'; '.join(found)}, and placement.labels and strategy choose among them"

    def _reserve_shared(self) -> PlacementGroup:
        group = self._reserved or self._group(self._num_workers, self._config.strategy)
        if group.wait(self._config.deadline_s):
            return group
        if self._reserved is None:
            remove_placement_group(group)
        raise ConfigError(
            "unplaceable",
            f"{self._request.shortfall(self._usable_nodes())} Waited {self._config.deadline_s:g} s.",
            "Change placement, num_workers or the cluster.",
        )

    def _group(self, bundles: int, strategy: str) -> PlacementGroup:
        self._reserved_at = time.monotonic()
        selector = [dict(self._request.labels)] * bundles if self._request.labels else None
        try:
            group: PlacementGroup = placement_group([self.bundle] * bundles, strategy, bundle_label_selector=selector)
        except ValueError as error:
            raise ConfigError(
                "config", f"placement: {' '.join(str(error).split())}", "See docs/operations.md, Where workers run."
            ) from None
        return group

    def _free_seat(self, shared: PlacementGroup) -> int | None:
        """Find a bundle of the shared group: in turn for the initial workers, later one whose worker has left.

        A bundle on a draining node is not taken. A bundle that lost its node waits for Ray to place it again, which the
        strict strategies may never allow.
        """
        if self._seated < self._num_workers:
            self._seated += 1
            return self._seated - 1
        nodes = placement_group_table(shared)["bundles_to_node_id"]
        usable = {node.node_id for node in self._usable_nodes()}
        if "STRICT" not in self._request.strategy:
            usable.add("")
        return next((seat for seat in self._vacated() if nodes[self._first_bundle + seat] in usable), None)

    def _vacated(self) -> list[int]:
        taken = self._closed_seats.union(self._seats.values())
        return [seat for seat in range(self._seated) if seat not in taken]

    def _is_free(self, seat: int, nodes: list[NodeView]) -> bool:
        """Return whether Ray shows the resources of a bundle of the shared group as free."""
        assert self._shared is not None, "seats belong to the shared group"
        place = f"group_{self._first_bundle + seat}_{self._shared.id.hex()}"
        bundle = {f"{name}_{place}": amount for name, amount in self.bundle.items()}
        return any(all(node.free.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in nodes)

    def _usable_nodes(self) -> list[NodeView]:
        return [node for node in cluster_nodes() if node.node_id not in self.draining()]


def cluster_nodes() -> list[NodeView]:
    """Return every live node: its resources, the free ones as of about a second ago, and its labels."""
    free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        NodeView(node["NodeID"], node["Resources"], free.get(node["NodeID"], {}), node["Labels"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
