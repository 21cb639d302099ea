"""The model that a run trains, the collaborators of a session's steps, and what becomes of members that fail at one.

The model's values stay with the backend. The coordinator passes references on, and fetches values only to evaluate, to
seal and to write the final model.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np

from raycloak.attestation.core.lineage import INITIAL, ModelOrigin, TensorDigests
from raycloak.coordinator.aggregation.aggregator import State
from raycloak.coordinator.cluster.backend import ActorLost, Backend
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.cluster.remote import Parameters
from raycloak.coordinator.membership.membership import Membership
from raycloak.coordinator.vaults.calls import Reference
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import MORE_MEMORY, RunFailedError
from raycloak.metrics.traces import OFF, Traces
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import AVERAGED

T = TypeVar("T")

EARLIER: Final = "earlier steps"
"""The first part of the names of what a package holds of steps whose sums the next one mixes."""
_RESTORE = "Resume from the newest sealed package: raycloak run CONFIG --resume"
_REMEDIES = {
    "out_of_memory": MORE_MEMORY,
    "gpu_error": "See the kernel log of its machine for Xid errors; run the model on public data on such a GPU.",
    "nondeterministic_op": "Set allow_nondeterministic: true for a run that is NOT EXACT, or change the model.",
    "worker_error": "The text of the failure stays in the worker; run the model on public data to see it.",
}


@dataclass(frozen=True, slots=True)
class EarlierStep:
    """A finished step whose sum later ones mix, where noise is correlated.

    Attributes:
        parameters: that it started from, one reference per range.
        input_before: input digest of the step before it.
        solved: its released gradient, one reference per range.
    """

    parameters: tuple[Reference[Parameters], ...]
    input_before: bytes
    solved: tuple[Reference[Parameters], ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The released model between two steps.

    Attributes:
        parameters, states: one reference per range: float32 parameters, optimizer state.
        digest: model digest of all ranges together.
        averaged: that of the averaged weights in ``states``; empty where none are kept, or no step is done.
        tensors: digests of all tensors and of their state; empty in a loop by hand.
        origin: shows ledger and orchestrator where it comes from.
        input_before: input digest of the step that made it, where noise is correlated; else empty.
        earlier: the steps whose sums the next one mixes, the newest first.
    """

    parameters: tuple[Reference[Parameters], ...]
    states: tuple[Reference[State], ...]
    digest: bytes
    tensors: tuple[TensorDigests, ...] = ()
    origin: ModelOrigin = INITIAL
    averaged: bytes = b""
    input_before: bytes = b""
    earlier: tuple[EarlierStep, ...] = ()

    @property
    def exported(self) -> bytes:
        """The digest of the weights that are evaluated, measured and exported."""
        return self.averaged or self.digest


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

    def parameters(self, model: Model) -> Parameters:
        """Return the parameters, float32[d] in canonical order; RunFailedError as :meth:`state`."""
        return np.concatenate([self._fetch(part) for part in model.parameters])

    def exported(self, model: Model) -> Parameters:
        """Return the weights that are evaluated and exported, the average where one is kept; as :meth:`parameters`."""
        if not model.averaged:
            return self.parameters(model)
        parts, tensors = list[Parameters](), self.manifest.computation.tensors
        # One state after another: those of all ranges are several times as large as what is taken from them.
        for part in model.states:
            state = self._fetch(part)
            parts += [state[key].reshape(-1) for each in tensors if (key := f"{each.name}/{AVERAGED}") in state]
        return np.concatenate(parts)

    def as_exported(self, model: Model) -> Model:
        """Return the model as workers measure it, with the weights of :meth:`exported`."""
        if not model.averaged:
            return model
        return replace(model, parameters=(self.backend.put(self.exported(model)),), digest=model.averaged)

    def state(self, model: Model) -> State:
        """Return the optimizer state of all ranges; keys start with the tensor's name, so they fit into one.

        Raises:
            RunFailedError: ``state_lost`` if the node that had the values is gone.
        """
        return {key: value for part in model.states for key, value in self._fetch(part).items()}

    def earlier(self, model: Model) -> State:
        """Return what a package holds of the steps whose sums the next one mixes; see :func:`earlier_of`."""
        found: dict[str, np.ndarray] = {}
        for age, each in enumerate(model.earlier, 1):
            for name, parts in (("parameters", each.parameters), ("release", each.solved)):
                found[f"{EARLIER}/{name}/{age}"] = np.concatenate([self._fetch(part) for part in parts])
        return found

    def _fetch(self, reference: Reference[T]) -> T:
        try:
            return self.backend.fetch(reference, self.deadline_s)
        except ActorLost as lost:
            raise RunFailedError(
                "state_lost", f"the released model was lost with its node ({lost.cause})", _RESTORE
            ) from None


def earlier_of(state: State) -> tuple[list[tuple[np.ndarray, np.ndarray]], State]:
    """Return parameters and release of each earlier step in a package's state, the newest first; and the state itself.

    A tensor has a name without a space, so that none of its state can be taken for them.
    """
    own = {key: array for key, array in state.items() if not key.startswith(f"{EARLIER}/")}
    count = (len(state) - len(own)) // 2
    ages = range(1, count + 1)
    return [(state[f"{EARLIER}/parameters/{age}"], state[f"{EARLIER}/release/{age}"]) for age in ages], own


@dataclass(slots=True)
class MemberFailures:
    """The failures of members at one task: those members leave, and the run ends if all fail alike.

    Attributes:
        model: what they were given.
        task: how messages call it. step: the one that it belongs to.
    """

    context: StepContext
    model: Model
    task: str
    step: int
    _all_lost: bool = False

    def take(self, failures: Mapping[str, str], *, everybody: bool) -> None:
        """Take the workers that failed off the run; if all fail alike, others in their place would too, and it ends.

        All may die at once when a node does, so a first such loss counts as an accident.

        Args:
            failures: code by member id.

        Raises:
            RunFailedError: the code of all; or as :meth:`require_model`.
        """
        self.require_model(failures.values())
        code = next(iter(failures.values()), "")
        alike = everybody and len(set(failures.values())) == 1
        if alike and (self._all_lost or code not in ("died", "unreachable")):
            raise RunFailedError(
                code, f"every worker failed in {self.task}: {code}", _REMEDIES.get(code, ""), self.step
            )
        self._all_lost = alike
        for member_id, cause in failures.items():
            self.context.membership.members.lose(member_id, cause, f"{member_id} failed in {self.task}")

    def require_model(self, causes: Collection[str]) -> None:
        """Check, when an object that was passed is gone, that it was not the model itself.

        Raises:
            RunFailedError: ``state_lost``.
        """
        if "object_lost" not in causes:
            return
        try:
            earlier = (part for each in self.model.earlier for part in (*each.parameters, *each.solved))
            for reference in (*self.model.parameters, *self.model.states, *earlier):
                self.context.backend.fetch(reference, self.context.deadline_s)
        except ActorLost as lost:
            raise RunFailedError(
                "state_lost",
                f"the node that held the model went away in {self.task} ({lost.cause})",
                _RESTORE,
                self.step,
            ) from None
