"""Actors as their callers see them: typed methods.

This module hides that a method travels by its name. A caller writes ``worker.accept_keys(release)``, and only the
backend turns that into a message, as `raycloak.coordinator.vaults.calls` says.

Guarantee: mypy refuses a call that the actor's class would not take. The protocols :class:`Worker` and
:class:`Aggregator` list the methods. `raycloak.coordinator.runs.local_session` and
`raycloak.coordinator.cluster.ray_backend` start the real classes as these types, so mypy compares them there.

The real classes are not imported here, because they bring torch, which a caller does not need.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from raycloak.coordinator.vaults.calls import Reference, Wire

if TYPE_CHECKING:
    from raycloak.attestation.core.evidence import Challenge
    from raycloak.attestation.core.messages import Envelope
    from raycloak.attestation.keys.release import KeyRelease
    from raycloak.coordinator.aggregation.aggregator import ReduceReport, ReduceRequest, State
    from raycloak.coordinator.aggregation.ranges import ParameterRange
    from raycloak.workers.evaluation import EvaluationReply
    from raycloak.workers.messages import Admission, StepReply, StepRequest, WorkerFacts, WorkerSetup
    from raycloak.workers.terms.manifest import Manifest
    from raycloak.workers.terms.measurement import Measurement
    from raycloak.workers.terms.mechanism import Mechanism
    from raycloak.workers.vectors.ring import RingVector

P = ParamSpec("P")
T = TypeVar("T")

Parameters = NDArray[np.float32]
Average = NDArray[np.float64]
Ciphertext = NDArray[np.uint8]
"""The bytes of a batch that a client sent; only workers can open it."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A started actor: its member id, and the object by which its backend reaches it."""

    member_id: str
    handle: Any


class Caller(Protocol):
    """The dispatch of a backend, the one place where a method becomes a name."""

    def __call__(
        self,
        actor: Actor,
        method: Callable[..., Any],
        *args: Any,
        returns: int = 1,
    ) -> tuple[Reference[Any], ...]:
        """Send a call to ``actor``, and return one reference per return value at once.

        The actor gets the call when every reference in ``args`` is ready. If one of these has failed, the call fails
        with the same error, and the method is not entered.

        Args:
            method: a function of the actor's class or protocol.
        """
        ...


class Worker(Protocol):
    """The methods of `raycloak.workers.train_worker.TrainWorker` that are called remotely."""

    def prepare(self, setup: "WorkerSetup") -> "WorkerFacts": ...

    def initial_parameters(self) -> Parameters: ...

    def compute_known_answer(self, mechanism: "Mechanism", *measurements: "Measurement") -> bytes: ...

    def present(self, challenge: "Challenge", admission: "Admission") -> "Envelope": ...

    def accept_keys(self, release: "KeyRelease") -> "Envelope": ...

    def step(
        self, receipt: "Envelope", request: "StepRequest", *given: NDArray[Any]
    ) -> "tuple[StepReply, *tuple[RingVector, ...]]": ...

    def evaluate(self, order: "Envelope", *parameters: Parameters) -> "EvaluationReply": ...


class Spare(Protocol):
    """The method of an aggregator's vault that is no member yet."""

    def take_part(self, member_id: str) -> None: ...


class Aggregator(Protocol):
    """The methods of `raycloak.coordinator.aggregation.aggregator.MaskedAggregator` that are called remotely."""

    def present(
        self, challenge: "Challenge", manifest: "Manifest", owned: "ParameterRange", base: str = "."
    ) -> "Envelope": ...

    def initial_state(self) -> "State": ...

    def reduce(
        self,
        request: "ReduceRequest",
        binding: "Envelope",
        parameters: Parameters,
        state: "State",
        *given: NDArray[Any],
    ) -> "tuple[ReduceReport, Parameters, State, *tuple[Parameters, ...]]": ...

    def measure(
        self, request: "ReduceRequest", binding: "Envelope", *vectors: "RingVector"
    ) -> "tuple[ReduceReport, Average]": ...

    def release(
        self, request: "ReduceRequest", binding: "Envelope", *vectors: "RingVector"
    ) -> "tuple[ReduceReport, Average]": ...


LATE: Mapping[str, str] = {
    "Admission": "raycloak.workers.messages",
    "Challenge": "raycloak.attestation.core.evidence",
    "Envelope": "raycloak.attestation.core.messages",
    "EvaluationReply": "raycloak.workers.evaluation",
    "KeyRelease": "raycloak.attestation.keys.release",
    "Manifest": "raycloak.workers.terms.manifest",
    "Measurement": "raycloak.workers.terms.measurement",
    "Mechanism": "raycloak.workers.terms.mechanism",
    "ParameterRange": "raycloak.coordinator.aggregation.ranges",
    "ReduceReport": "raycloak.coordinator.aggregation.aggregator",
    "ReduceRequest": "raycloak.coordinator.aggregation.aggregator",
    "RingVector": "raycloak.workers.vectors.ring",
    "State": "raycloak.coordinator.aggregation.aggregator",
    "StepReply": "raycloak.workers.messages",
    "StepRequest": "raycloak.workers.messages",
    "WorkerFacts": "raycloak.workers.messages",
    "WorkerSetup": "raycloak.workers.messages",
}
"""The modules of the names that the protocols above use, which are imported at the first call."""


class Remote(Generic[P, T]):
    """A method of an actor's class or protocol, which its callers have under the same name."""

    def __init__(self, method: Callable[Concatenate[Any, P], T]) -> None:
        self._method = method

    def __set_name__(self, _: type, name: str) -> None:
        method: Callable[..., Any] = self._method
        # mypy knows that the class has this method, but not that a backend finds it: it is sent by its function's name.
        assert method.__name__ == name, f"{name} would be sent as {method.__name__}"


@dataclass(frozen=True, slots=True)
class _MemberActor(Actor):
    call: Caller = field(repr=False, compare=False)

    def _ask(
        self,
        method: Callable[Concatenate[Any, P], object],
        returns: int,
        *args: P.args,
        **keywords: P.kwargs,
    ) -> tuple[Reference[Any], ...]:
        return self.call(self, method, *Wire.of(method).positional(args, keywords), returns=returns)

    def _ask_one(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> Reference[T]:
        return self._ask(method, 1, *args, **keywords)[0]


class _Asked(Remote[P, T]):
    """A method that takes plain values and returns a reference to one."""

    def __get__(self, actor: _MemberActor, _: type) -> Callable[P, Reference[T]]:
        return partial(actor._ask_one, self._method)


def _given(reference: Reference[T]) -> T:
    """Pass a reference where mypy expects the value, which is what the actor will get in its place."""
    return cast("T", reference)


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """A worker's answer to one attempt.

    Attributes:
        vectors: one reference per range.
    """

    reply: "Reference[StepReply]"
    vectors: "tuple[Reference[RingVector], ...]"

    @property
    def parts(self) -> tuple[Reference[object], ...]:
        """Every reference of the answer, to wait for."""
        return (self.reply, *self.vectors)


@dataclass(frozen=True, slots=True)
class Reduction:
    """An aggregator's answer to one attempt.

    Attributes:
        updated: new parameters and state of the aggregator's range; None where it released an average.
        solved: its part of the released gradient; None where noise is not correlated.
        average: what it released; None where it updated.
    """

    report: "Reference[ReduceReport]"
    updated: "tuple[Reference[Parameters], Reference[State]] | None" = None
    average: Reference[Average] | None = None
    solved: Reference[Parameters] | None = None

    @property
    def parts(self) -> tuple[Reference[object], ...]:
        """Every reference of the answer, to wait for."""
        parts = (*(self.updated or ()), self.average, self.solved)
        return (self.report, *(each for each in parts if each is not None))


class WorkerActor(_MemberActor):
    """A started worker."""

    __slots__ = ()

    prepare = _Asked(Worker.prepare)
    initial_parameters = _Asked(Worker.initial_parameters)
    compute_known_answer = _Asked(Worker.compute_known_answer)
    accept_keys = _Asked(Worker.accept_keys)

    def present(self, challenge: "Challenge", admission: "Reference[Admission]") -> "Reference[Envelope]":
        """Have the worker attest itself, by the terms of ``admission``."""
        return self._ask_one(Worker.present, challenge, _given(admission))

    def step(
        self,
        receipt: "Envelope | Reference[Envelope]",
        request: "StepRequest",
        parameters: Sequence[Reference[Parameters]],
        batches: Sequence[Reference[Ciphertext]] = (),
    ) -> StepAnswer:
        """Have one attempt of a step computed and masked.

        Args:
            batches: the batches that ``request`` names, encrypted.
        """
        returns, paid = 1 + len(request.ranges), cast("Envelope", receipt)
        given: list[NDArray[Any]] = [*map(_given, parameters), *map(_given, batches)]
        reply, *vectors = self._ask(Worker.step, returns, paid, request, *given)
        return StepAnswer(reply, tuple(vectors))

    def evaluate(self, order: "Envelope", *parameters: Reference[Parameters]) -> "Reference[EvaluationReply]":
        """Have a model measured on the hosted slices of a sealed split."""
        return self._ask_one(Worker.evaluate, order, *map(_given, parameters))


class _Averaged(Remote[P, "tuple[ReduceReport, Average]"]):
    """A method that releases an average, once the vectors are bound."""

    def __get__(
        self, actor: "AggregatorActor", _: type
    ) -> "Callable[[ReduceRequest, Reference[Envelope], Sequence[Reference[RingVector]]], Reduction]":
        return partial(actor._released, self._method)


class AggregatorActor(_MemberActor):
    """A started aggregator."""

    __slots__ = ()

    present = _Asked(Aggregator.present)
    initial_state = _Asked(Aggregator.initial_state)

    def reduce(
        self,
        request: "ReduceRequest",
        binding: "Reference[Envelope]",
        parameters: Reference[Parameters],
        state: "Reference[State]",
        vectors: "Sequence[Reference[RingVector]]",
        solved: Sequence[Reference[Parameters]] | None = None,
    ) -> Reduction:
        """Have the aggregator's range updated, once the vectors are bound.

        Args:
            solved: its part of the releases that this one is solved by, the newest first; None where noise is not
                correlated.
        """
        own: list[NDArray[Any]] = [*map(_given, solved or ()), *map(_given, vectors)]
        of_model, returns = (_given(binding), _given(parameters), _given(state)), 3 if solved is None else 4
        report, *updated = self._ask(Aggregator.reduce, returns, request, *of_model, *own)
        return Reduction(report, (updated[0], updated[1]), solved=updated[2] if solved is not None else None)

    measure = _Averaged(Aggregator.measure)
    release = _Averaged(Aggregator.release)

    def _released(
        self,
        method: "Callable[..., tuple[ReduceReport, Average]]",
        request: "ReduceRequest",
        binding: "Reference[Envelope]",
        vectors: "Sequence[Reference[RingVector]]",
    ) -> Reduction:
        report, average = self._ask(method, 2, request, _given(binding), *map(_given, vectors))
        return Reduction(report, average=average)
