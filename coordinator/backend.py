"""How the coordinator reaches actors: start, call, wait, fetch. Two implementations of one small interface.

:class:`LocalBackend` runs the plain classes in this process, for tests and for breakpoints in a debugger;
`coordinator/actors.py` has the one on Ray. The coordinator knows neither.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class ActorLost(Exception):
    """An actor cannot answer any more.

    Args:
        cause: ``died``, ``unreachable``, ``deadline`` or ``object_lost`` (it may be well, but what it needs is gone).
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Actor:
    """A started actor: its member id and whatever the backend reaches it by."""

    member_id: str
    handle: Any


class Backend(Protocol):
    """What the coordinator needs of an actor system. No call blocks without a deadline."""

    def start_worker(self, member_id: str) -> Actor:
        """Start a TrainWorker on a node of its own choice."""
        ...

    def start_aggregator(self, member_id: str) -> Actor:
        """Start a MaskedAggregator."""
        ...

    def call(
        self, actor: Actor, method: str, *args: Any, returns: int = 1, after: Any | None = None
    ) -> tuple[Any, ...]:
        """Call ``method``; returns one reference per return value at once.

        The actor gets the call once every reference in ``args`` and ``after`` is ready. If one of them failed the
        call fails as it did, and the method is not entered.

        Args:
            after: of another call that must have succeeded first; only aggregators are called so.
        """
        ...

    def wait(self, references: Sequence[Any], deadline_s: float) -> Collection[Any]:
        """The references that are ready, successfully or not, when all are or the deadline has passed."""
        ...

    def fetch(self, reference: Any, deadline_s: float) -> Any:
        """The value; raises :class:`ActorLost`, or the RaycloakError that the actor raised."""
        ...

    def put(self, value: Any) -> Any:
        """A reference to a public value."""
        ...

    def stop(self, actor: Actor) -> None:
        """End the actor at once."""
        ...

    def node(self, actor: Actor) -> str:
        """Id of the node the actor runs on."""
        ...

    def room(self) -> int:
        """How many more workers could be started now without waiting for resources."""
        ...

    def departing(self) -> Collection[str]:
        """Member ids of those whose node is being drained; they should leave at the next step boundary."""
        ...


@dataclass(eq=False, slots=True)
class _Settled:
    """The outcome of a local call."""

    value: Any = None
    error: Exception | None = None


class LocalBackend:
    """Runs everything in this process, synchronously; arrays are passed read-only, as Ray passes them."""

    def __init__(self, make_worker: Callable[[str], Any], make_aggregator: Callable[[str], Any]) -> None:
        self._make_worker = make_worker
        self._make_aggregator = make_aggregator
        self._stopped: set[str] = set()

    def start_worker(self, member_id: str) -> Actor:
        return Actor(member_id, self._make_worker(member_id))

    def start_aggregator(self, member_id: str) -> Actor:
        return Actor(member_id, self._make_aggregator(member_id))

    def call(
        self, actor: Actor, method: str, *args: Any, returns: int = 1, after: Any | None = None
    ) -> tuple[Any, ...]:
        values = [arg.value if isinstance(arg, _Settled) else arg for arg in args]
        failed = (each.error for each in (*args, after) if isinstance(each, _Settled) and each.error)
        refusal = ActorLost("died") if actor.member_id in self._stopped else next(failed, None)
        if refusal is not None:
            return tuple(_Settled(error=refusal) for _ in range(returns))
        try:
            result = getattr(actor.handle, method)(*values)
        except Exception as error:  # noqa: BLE001 - it is raised again where the reference is fetched
            return tuple(_Settled(error=error) for _ in range(returns))
        results = (result,) if returns == 1 else result
        return tuple(_Settled(value=_read_only(value)) for value in results)

    def wait(self, references: Sequence[Any], deadline_s: float) -> Collection[Any]:
        return list(references)

    def fetch(self, reference: Any, deadline_s: float) -> Any:
        if reference.error is not None:
            raise reference.error
        return reference.value

    def put(self, value: Any) -> Any:
        return _Settled(value=_read_only(value))

    def stop(self, actor: Actor) -> None:
        self._stopped.add(actor.member_id)

    def node(self, actor: Actor) -> str:
        return "local"

    def room(self) -> int:
        return sys.maxsize

    def departing(self) -> Collection[str]:
        return ()


def _read_only(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value
