"""The model that a run trains, as references.

Its values stay with the backend. The coordinator passes references on, and fetches values only to evaluate, to seal and
to write the final model.
"""

from dataclasses import dataclass

from coordinator.aggregator import State
from coordinator.remote import Parameters, Reference


@dataclass(frozen=True, slots=True)
class Model:
    """The released model between two steps.

    Attributes:
        parameters, states: one reference per range: float32 parameters, optimizer state.
        digest: parameter digest of all ranges together.
    """

    parameters: tuple[Reference[Parameters], ...]
    states: tuple[Reference[State], ...]
    digest: bytes
