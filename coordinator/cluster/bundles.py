"""Fitting: computes how many bundles of one kind fit on which nodes, and words a refusal. Pure functions.

Ray decides. This module tells how large an even share may be, how much room is left, and why something was not placed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        return self._together([self._on(node, node.free) for node in nodes])

    def shortfall(self, nodes: Sequence[NodeView]) -> str:
        """Return two sentences: the request with the bundle that does not fit, and what each node has."""
        labels = f" on nodes with {_named(self.labels)}" if self.labels else ""
        fits = min(self.fitting(nodes), self.bundles - 1)
        asked = f"{self.bundles} bundles of {_named(self.bundle)}{labels} were asked for with strategy {self.strategy}"
        each = "; ".join(self._say(node) for node in nodes)
        return f"{asked}: bundle {fits + 1} of {self.bundles} does not fit. The cluster has {each or 'no usable node'}."

    def _on(self, node: NodeView, resources: Mapping[str, float]) -> int:
        if not all(carries(node.labels, key, selector) for key, selector in self.labels.items()):
            return 0
        return min(_grains(resources.get(name, 0.0)) // _grains(amount) for name, amount in self.bundle.items())

    def _together(self, fits: Sequence[int]) -> int:
        match self.strategy:
            case "STRICT_PACK":
                return max(fits, default=0)
            case "STRICT_SPREAD":
                return sum(min(fit, 1) for fit in fits)
        return sum(fits)

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
    for share in sorted((share for share in shares if 0 < share <= 1), reverse=True):
        asked = replace(request, bundle={resource: share})
        if asked._together([asked._on(node, node.total) for node in nodes]) >= request.bundles:
            return share
    return 0.0


def carries(labels: Mapping[str, str], key: str, selector: str) -> bool:
    """Return whether ``labels`` match Ray's selector of one key: ``a``, ``!a``, ``in(a, b)`` or ``!in(a, b)``."""
    wanted = selector.removeprefix("!")
    values = [value.strip() for value in wanted[3:-1].split(",")] if wanted.startswith("in(") else [wanted]
    return (labels.get(key) in values) != selector.startswith("!")


def _grains(amount: float) -> int:
    return round(amount * GRAIN)


def _named(amounts: Mapping[str, float] | Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{k}: {v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in amounts.items()) + "}"
