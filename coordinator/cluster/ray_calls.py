"""Calls on Ray: what `raycloak.coordinator.vaults.calls` writes, sent to an actor and read from its answer.

No call without a deadline. Errors are raycloak's own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

from raycloak.attestation.core.messages import parse
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.vaults.calls import ActorRefusal, Reference, Wire, form_of_value
from raycloak.metrics.errors import RunFailedError

P = ParamSpec("P")
T = TypeVar("T")

_BESIDE = {"view", "service_figures"}
"""Methods of ledger and orchestrator that are answered while another one runs."""


@dataclass(eq=False, slots=True)
class RayReference(Reference[T]):
    """An object of Ray's store, and the way to read it."""

    held: Any
    read: Callable[[Any], T]


def send(handle: Any, method: Callable[..., Any], args: Sequence[Any], returns: int = 1) -> tuple[Reference[Any], ...]:
    """Send a call to the actor behind ``handle``; see `raycloak.coordinator.cluster.remote.Caller`."""
    wire = Wire.of(method)
    frames = [each.held if isinstance(each, RayReference) else each for each in wire.write_call(args)]
    receive = handle.receive_beside if method.__name__ in _BESIDE else handle.receive
    found: Any = receive.options(num_returns=returns).remote(method.__name__, returns, *frames)
    objects = [found] if returns == 1 else found
    return tuple(RayReference(each, partial(wire.read_answer, index)) for index, each in enumerate(objects))


def put(value: T) -> Reference[T]:
    """Put a message, an array or an optimizer state into Ray's store."""
    form = form_of_value(value)
    return RayReference(ray.put(form.write(value)), form.read)


def ask(handle: Any, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> Reference[T]:
    """Call a method of the actor behind ``handle``, given as a function of its class so that mypy checks the call."""
    return send(handle, method, Wire.of(method).positional(args, keywords))[0]


def ask_process(
    handle: Any, question: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs
) -> Reference[T]:
    """Call a function in an actor's process, such as one of `raycloak.coordinator.cluster.processes`; it gets the
    actor first."""
    return RayReference(handle.__ray_call__.remote(question, *args, **keywords), lambda answer: answer)


def wait(references: Sequence[Reference[T]], deadline_s: float, *, fetch_local: bool = False) -> list[Reference[T]]:
    """Return the references that are ready, successfully or not, when all are or the deadline has passed.

    Args:
        fetch_local: also wait until their values have arrived on this node.
    """
    asked = {_object(each): each for each in references}
    ready = ray.wait(list(asked), num_returns=len(asked), timeout=deadline_s, fetch_local=fetch_local)[0]
    return [asked[each] for each in ready]


def _object(reference: Reference[Any]) -> Any:
    return cast("RayReference[Any]", reference).held


def cancel(references: Iterable[Reference[object]]) -> None:
    """Have actors see that the calls behind ``references`` are cancelled; a call that waits is not begun.

    Assumes: all that a call was given is ready. Ray numbers the calls of an actor when they are made. One that is
    cancelled while it waits for an argument is never sent, and the actor waits half a minute for its number.
    """
    for reference in references:
        ray.cancel(_object(reference), recursive=False)


def fetch(reference: Reference[T], deadline_s: float) -> T:
    """Return an answer, as ``ray.get`` with a deadline and raycloak's errors.

    Raises:
        ActorLost: the actor died, cannot be reached, did not answer in time, or lacks an object that was lost with its
            node; or the call was cancelled.
        RaycloakError: what the actor raised.
        RunFailedError: ``actor_error`` if the actor raised anything else.
        ProtocolError: ``malformed`` if the answer is none of its method.
    """
    asked = cast("RayReference[T]", reference)
    try:
        return asked.read(ray.get(asked.held, timeout=deadline_s))
    except GetTimeoutError:
        raise ActorLost("deadline") from None
    except (OutOfMemoryError, MemoryError):
        raise ActorLost("out_of_memory") from None
    except ObjectLostError:
        raise ActorLost("object_lost") from None
    except TaskCancelledError:
        raise ActorLost("cancelled") from None
    # A subclass of RayActorError, so it has to be caught first.
    except ActorUnavailableError:
        raise ActorLost("unreachable") from None
    except RayActorError:
        raise ActorLost("died") from None
    except RayTaskError as error:
        if isinstance(error.cause, ActorRefusal):
            raise parse(Failed, error.cause.args[0]).raised() from None
        raise RunFailedError(
            "actor_error", f"an actor failed with {type(error.cause).__name__}", "See the log of the run for its trace."
        ) from error
    except ActorPlacementGroupRemoved:
        raise ActorLost("unplaceable") from None
    except RayError:
        raise ActorLost("unreachable") from None
