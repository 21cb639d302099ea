"""The interface to actors: start, call, wait, fetch.

:class:`LocalBackend` runs the plain classes in this process, for tests and for breakpoints in a debugger;
`raycloak.coordinator.cluster.ray_backend` has the one on Ray. The coordinator knows neither.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from raycloak.coordinator.cluster.remote import Actor, Aggregator, AggregatorActor, Worker, WorkerActor
from raycloak.coordinator.vaults.calls import Reference, Wire, form_of_value

T = TypeVar("T")


class ActorLost(Exception):
    """An actor cannot answer any more.

    Args:
        cause: ``died``, ``unreachable``, ``deadline``, ``out_of_memory``, ``unplaceable``, ``object_lost`` or
            ``cancelled``. With the last two, the actor may be well: an object that it was to be given is gone, or
            the call was cancelled.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Backend(Protocol):
    """The part of an actor system that the coordinator needs. No call blocks without a deadline."""

    def start_worker(self, member_id: str) -> WorkerActor:
        """Start a worker; the backend chooses its node."""
        ...

    def start_aggregator(self, member_id: str) -> AggregatorActor:
        """Start an aggregator."""
        ...

    def wait(self, references: Sequence[Reference[object]], deadline_s: float) -> Collection[Reference[object]]:
        """Return the references that are ready, successfully or not, when all are or the deadline has passed."""
        ...

    def fetch(self, reference: Reference[T], deadline_s: float) -> T:
        """Return the value.

        Raises:
            ActorLost: the actor cannot answer, or not within the deadline.
            RaycloakError: what the actor raised.
        """
        ...

    def cancel(self, references: Sequence[Reference[object]]) -> None:
        """Ask actors to end the calls that are to give ``references``; one that has ended keeps its answer.

        All that a call was given must be ready. For any thread.
        """
        ...

    def put(self, value: T) -> Reference[T]:
        """Return a reference to a public value."""
        ...

    def stop(self, actor: Actor) -> None:
        """End the actor at once."""
        ...

    def close_place(self, actor: WorkerActor) -> None:
        """Start no other worker in the place of this one, which is about to be stopped."""
        ...

    def node(self, actor: Actor) -> str:
        """Return the id of the node that the actor runs on."""
        ...

    def aggregator_rooms(self) -> Sequence[int]:
        """Return the memory of each node that aggregators are spread over, in bytes; nothing where they share one."""
        ...

    def room(self) -> int:
        """Return how many more workers could be started now without waiting for resources."""
        ...

    def departing(self) -> Collection[str]:
        """Return the member ids of workers on a draining node; they should leave at the next step boundary."""
        ...


@dataclass(eq=False, slots=True)
class Settled(Reference[Any]):
    """The outcome of a local call."""

    value: Any = None
    error: Exception | None = None


class LocalBackend:
    """A backend that runs every call at once in this process.

    Calls and answers travel as `raycloak.coordinator.vaults.calls` says, as on Ray. So what Ray could not carry fails
    here too, and code that writes into an array that it was given.
    """

    def __init__(self, make_worker: Callable[[str], Worker], make_aggregator: Callable[[str], Aggregator]) -> None:
        self._make_worker = make_worker
        self._make_aggregator = make_aggregator
        self._stopped: set[str] = set()

    def start_worker(self, member_id: str) -> WorkerActor:
        return WorkerActor(member_id, self._make_worker(member_id), self.call)

    def start_aggregator(self, member_id: str) -> AggregatorActor:
        return AggregatorActor(member_id, self._make_aggregator(member_id), self.call)

    def call(
        self,
        actor: Actor,
        method: Callable[..., Any],
        *args: Any,
        returns: int = 1,
    ) -> tuple[Reference[Any], ...]:
        """Run a method; its outcome is kept for :meth:`fetch`. See `raycloak.coordinator.cluster.remote.Caller`."""
        values = [arg.value if isinstance(arg, Settled) else arg for arg in args]
        failed = (each.error for each in args if isinstance(each, Settled) and each.error)
        refusal = ActorLost("died") if actor.member_id in self._stopped else next(failed, None)
        if refusal is not None:
            return tuple(Settled(error=refusal) for _ in range(returns))
        wire = Wire.of(method)
        try:
            result = getattr(actor.handle, method.__name__)(*wire.read_call(wire.write_call(values)))
            frames = wire.write_answer(result, returns)
            return tuple(Settled(value=wire.read_answer(index, frame)) for index, frame in enumerate(frames))
        except Exception as error:  # noqa: BLE001 - raised again where the reference is fetched
            return tuple(Settled(error=error) for _ in range(returns))

    def wait(self, references: Sequence[Reference[object]], deadline_s: float) -> Collection[Reference[object]]:
        return list(references)

    def fetch(self, reference: Reference[T], deadline_s: float) -> T:
        settled = cast("Settled", reference)
        if settled.error is not None:
            raise settled.error
        value: T = settled.value
        return value

    def cancel(self, references: Sequence[Reference[object]]) -> None:
        """Do nothing: every call has ended when its reference is there."""

    def put(self, value: T) -> Reference[T]:
        form = form_of_value(value)
        return Settled(value=form.read(form.write(value)))

    def stop(self, actor: Actor) -> None:
        self._stopped.add(actor.member_id)

    def close_place(self, actor: WorkerActor) -> None:
        """Do nothing: all workers are in one place, this process."""

    def node(self, actor: Actor) -> str:
        return "local"

    def aggregator_rooms(self) -> Sequence[int]:
        return ()

    def room(self) -> int:
        return sys.maxsize

    def departing(self) -> Collection[str]:
        return ()
