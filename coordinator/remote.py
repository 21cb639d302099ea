"""Actors as their callers see them: typed methods that answer at once with a reference.

It hides that a method travels by its name. A caller writes ``worker.accept_keys(release)``; only the backend turns that
into a message.

Guarantee: mypy refuses a call that the actor's class would not take. :class:`Worker` and :class:`Aggregator` say which
methods there are, and the modules that start actors assign the real classes to them.

The real classes are not imported here: they bring torch, and whoever only asks needs none of it.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from attestation.evidence import Challenge
    from attestation.key_release import KeyRelease
    from attestation.messages import Envelope
    from coordinator.aggregator import MeasureReport, ReduceReport, ReduceRequest, State
    from coordinator.ranges import ParameterRange
    from workers.evaluating import EvaluationReply
    from workers.manifest import Manifest
    from workers.measurement import Measurement
    from workers.mechanism import Mechanism
    from workers.ring import RingVector
    from workers.worker_messages import Admission, StepReply, StepRequest, WorkerFacts, WorkerSetup

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Parameters = NDArray[np.float32]


class Reference(Generic[T_co]):
    """An answer that may still be on its way, or a value that was put into the backend.

    A type alone: each backend hands out objects of its own, which only its ``fetch`` looks into.
    """

    __slots__ = ()


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
        after: Reference[object] | None = None,
    ) -> tuple[Reference[Any], ...]:
        """Ask ``actor``; returns one reference per return value at once.

        The actor gets the call once every reference in ``args`` and ``after`` is ready. If one of them failed, the
        call fails as it did, and the method is not entered.

        Args:
            method: function of the actor's class, or of a protocol that it has.
            after: of another call that must have succeeded first; only aggregators are called so.
        """
        ...


class Worker(Protocol):
    """The methods of `workers.train_worker.TrainWorker` that are asked remotely."""

    def prepare(self, setup: "WorkerSetup") -> "WorkerFacts": ...

    def compute_known_answer(self, mechanism: "Mechanism", *measurements: "Measurement") -> bytes: ...

    def present(self, challenge: "Challenge", admission: "Admission") -> "Envelope": ...

    def accept_keys(self, release: "KeyRelease") -> "Envelope": ...

    def step(
        self, receipt: "Envelope", request: "StepRequest", *parameters: Parameters
    ) -> "tuple[StepReply, *tuple[RingVector, ...]]": ...

    def evaluate(self, order: "Envelope", *parameters: Parameters) -> "EvaluationReply": ...


class Aggregator(Protocol):
    """The methods of `coordinator.aggregator.MaskedAggregator` that are asked remotely."""

    def present(self, challenge: "Challenge", manifest: "Manifest", owned: "ParameterRange") -> "Envelope": ...

    def initial_state(self) -> "State": ...

    def expect(self, request: "ReduceRequest", *replies: "StepReply") -> None: ...

    def reduce(
        self, request: "ReduceRequest", parameters: Parameters, state: "State", *vectors: "RingVector"
    ) -> "tuple[ReduceReport, Parameters, State]": ...

    def measure(self, request: "ReduceRequest", *vectors: "RingVector") -> "MeasureReport": ...


def positional(method: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call in the order of the method's parameters, defaults included: backends take no keywords."""
    bound = inspect.signature(method).bind(None, *args, **keywords)
    bound.apply_defaults()
    return bound.args[1:]


@dataclass(frozen=True, slots=True)
class _MemberActor(Actor):
    call: Caller = field(repr=False, compare=False)

    def _ask(
        self,
        method: Callable[Concatenate[Any, P], object],
        returns: int,
        after: Reference[object] | None,
        *args: P.args,
        **keywords: P.kwargs,
    ) -> tuple[Reference[Any], ...]:
        return self.call(self, method, *positional(method, args, keywords), returns=returns, after=after)

    def _ask_one(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> Reference[T]:
        return self._ask(method, 1, None, *args, **keywords)[0]


class _Asked(Generic[P, T]):
    """A method of an actor whose arguments are plain values."""

    def __init__(self, method: Callable[Concatenate[Any, P], T]) -> None:
        self._method = method

    def __get__(self, actor: _MemberActor, _: type) -> Callable[P, Reference[T]]:
        return partial(actor._ask_one, self._method)


def _given(reference: Reference[T]) -> T:
    """A reference in the place of the value that the actor will get for it, so that mypy checks the call."""
    return cast("T", reference)


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """A worker's answer to one attempt.

    Attributes:
        vectors: one per range.
    """

    reply: "Reference[StepReply]"
    vectors: "tuple[Reference[RingVector], ...]"

    @property
    def parts(self) -> tuple[Reference[object], ...]:
        """All references, to wait for."""
        return (self.reply, *self.vectors)


@dataclass(frozen=True, slots=True)
class Reduction:
    """An aggregator's answer to one attempt.

    Attributes:
        updated: parameters and state of its range; None for a measurement.
    """

    report: "Reference[ReduceReport | MeasureReport]"
    updated: "tuple[Reference[Parameters], Reference[State]] | None" = None

    @property
    def parts(self) -> tuple[Reference[object], ...]:
        """All references, to wait for."""
        return (self.report, *(self.updated or ()))


class WorkerActor(_MemberActor):
    """A started worker."""

    __slots__ = ()

    prepare = _Asked(Worker.prepare)
    compute_known_answer = _Asked(Worker.compute_known_answer)
    present = _Asked(Worker.present)
    accept_keys = _Asked(Worker.accept_keys)

    def step(
        self, receipt: "Envelope | Reference[Envelope]", request: "StepRequest", *parameters: Reference[Parameters]
    ) -> StepAnswer:
        """Ask for one attempt; see `workers.train_worker.TrainWorker.step`."""
        returns, paid = 1 + len(request.ranges), cast("Envelope", receipt)
        reply, *vectors = self._ask(Worker.step, returns, None, paid, request, *map(_given, parameters))
        return StepAnswer(reply, tuple(vectors))

    def evaluate(self, order: "Envelope", *parameters: Reference[Parameters]) -> "Reference[EvaluationReply]":
        """Ask for the scores of a model; see `workers.train_worker.TrainWorker.evaluate`."""
        return self._ask_one(Worker.evaluate, order, *map(_given, parameters))


class AggregatorActor(_MemberActor):
    """A started aggregator."""

    __slots__ = ()

    present = _Asked(Aggregator.present)
    initial_state = _Asked(Aggregator.initial_state)

    def expect(self, request: "ReduceRequest", *replies: "Reference[StepReply]") -> Reference[None]:
        """Have headers verified ahead; see `coordinator.aggregator.MaskedAggregator.expect`."""
        return self._ask_one(Aggregator.expect, request, *map(_given, replies))

    def reduce(
        self,
        request: "ReduceRequest",
        parameters: Reference[Parameters],
        state: "Reference[State]",
        vectors: "Sequence[Reference[RingVector]]",
        after: Reference[object] | None = None,
    ) -> Reduction:
        """Ask for an update of its range, once ``after`` is there; see `MaskedAggregator.reduce`."""
        own = _given(parameters), _given(state)
        report, *updated = self._ask(Aggregator.reduce, 3, after, request, *own, *map(_given, vectors))
        return Reduction(report, (updated[0], updated[1]))

    def measure(
        self,
        request: "ReduceRequest",
        vectors: "Sequence[Reference[RingVector]]",
        after: Reference[object] | None = None,
    ) -> Reduction:
        """Ask for a released average, once ``after`` is there; see `MaskedAggregator.measure`."""
        return Reduction(self._ask(Aggregator.measure, 1, after, request, *map(_given, vectors))[0])
