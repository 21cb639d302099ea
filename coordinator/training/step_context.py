"""The collaborators of a session's steps, which every part of a step is given together."""

from collections.abc import Callable
from dataclasses import dataclass, field

from raycloak.coordinator.cluster.backend import Backend
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.membership.membership import Membership
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.traces import OFF, Traces
from raycloak.workers.terms.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StepContext:
    """The collaborators of one execution's steps, attempts and saved states.

    Attributes:
        deadline_s: seconds that an actor has for one answer.
        renew: gets fresh evidence of every member.
        manifest_digest: of ``manifest``, computed once.
    """

    backend: Backend
    control: Control
    membership: Membership
    manifest: Manifest
    metrics: RunMetrics
    deadline_s: float
    renew: Callable[[], None]
    traces: Traces = OFF
    manifest_digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "manifest_digest", self.manifest.digest())
