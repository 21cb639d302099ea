"""The model that a run trains, as references.

Its values stay with the backend. The coordinator passes references on, and fetches values only to evaluate, to seal and
to write the final model.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from raycloak.coordinator.aggregation.aggregator import State
from raycloak.coordinator.cluster.backend import ActorLost, Backend
from raycloak.coordinator.cluster.calls import Reference
from raycloak.coordinator.cluster.remote import Parameters
from raycloak.metrics.errors import RunFailedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Model:
    """The released model between two steps.

    Attributes:
        parameters, states: one reference per range: float32 parameters, optimizer state.
        digest: model digest of all ranges together.
    """

    parameters: tuple[Reference[Parameters], ...]
    states: tuple[Reference[State], ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class ModelReader:
    """Fetches the values of models from the backend.

    Raises:
        RunFailedError: every method raises ``state_lost`` if the node that had the values is gone.
    """

    backend: Backend
    deadline_s: float

    def parameters(self, model: Model) -> Parameters:
        """Return the parameters, float32[d] in canonical order."""
        return np.concatenate([self._fetch(part) for part in model.parameters])

    def state(self, model: Model) -> State:
        """Return the optimizer state of all ranges; keys start with the tensor's name, so they fit into one."""
        return {key: value for part in model.states for key, value in self._fetch(part).items()}

    def _fetch(self, reference: Reference[T]) -> T:
        try:
            return self.backend.fetch(reference, self.deadline_s)
        except ActorLost as lost:
            raise RunFailedError(
                "state_lost",
                f"the released model was lost with its node ({lost.cause})",
                "Resume from the newest sealed package: raycloak run CONFIG --resume",
            ) from None
