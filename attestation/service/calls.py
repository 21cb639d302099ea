"""The calls of a gRPC server: nothing of a request is read before it is known who asks and that there is room for it.

gRPC reads the one request of an ordinary call before it tells anybody. So a stranger could fill a message of every call
and never end it. A call whose requests are a stream is the same on the wire, and is told of at once. Here all are such.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from raycloak.metrics.errors import ConfigError, ProtocolError

R = TypeVar("R")
Context: TypeAlias = Any
"""A `grpc.aio.ServicerContext`; gRPC ships no types."""

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION: Final = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_ROOMS: Final = 64
"""Rooms that may stand empty before they are cleared."""


def handlers(service: ServiceDescriptor, servicer: Any) -> grpc.GenericRpcHandler:
    """Return the handlers of a service, all of whose methods take their requests as a stream."""
    made = {}
    for method in service.methods:
        streams = method.server_streaming
        kind = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        made[method.name] = kind(getattr(servicer, method.name), request.FromString, answer.SerializeToString)
    return grpc.method_handlers_generic_handler(service.full_name, made)


def listen(server: Any, bind: str, credentials: Any | None) -> int:
    """Have a server listen at ``bind``, and return the port.

    Args:
        server: of `grpc` or `grpc.aio`.
        bind: ``host:port``; port 0 takes a free one.
        credentials: of TLS; None for a server without.

    Raises:
        ConfigError: ``bind`` if it cannot listen there.
    """
    try:
        port: int = server.add_insecure_port(bind) if credentials is None else server.add_secure_port(bind, credentials)
    # gRPC's only sign that it could not listen there.
    except RuntimeError:
        raise ConfigError("bind", f"cannot listen on '{bind}'.", "Give host:port of this machine.") from None
    return port


async def next_request(requests: AsyncIterator[R], deadline_s: float) -> R | None:
    """Return the next request of a call; None if there is none.

    Raises:
        ProtocolError: ``malformed`` if it is no message, or does not become whole within ``deadline_s`` seconds.
    """
    try:
        # Not `asyncio.wait_for`, which may swallow a cancellation before Python 3.12.
        async with asyncio.timeout(deadline_s):
            return await anext(requests)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        raise ProtocolError("malformed", f"the request stalled: it was not whole after {deadline_s:g} s") from None
    except DecodeError:
        raise ProtocolError("malformed", "the request is no message of this method") from None


class Health:
    """The service ``grpc.health.v1``: one answer, whatever service is asked for, so that nobody's request is read.

    Attributes:
        is_serving: what it answers.
    """

    def __init__(self) -> None:
        self.is_serving = False

    async def Check(self, requests: AsyncIterator[Any], context: Context) -> Any:  # noqa: N802
        """Answer."""
        return self._answer()

    async def List(self, requests: AsyncIterator[Any], context: Context) -> Any:  # noqa: N802
        """Answer, under the name that stands for the whole server."""
        return health_pb2.HealthListResponse(statuses={"": self._answer()})

    async def Watch(self, requests: AsyncIterator[Any], context: Context) -> None:  # noqa: N802
        """Refuse, as the protocol allows: a stranger would hold it open for nothing."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask Check")

    def _answer(self) -> Any:
        response = health_pb2.HealthCheckResponse
        return response(status=response.SERVING if self.is_serving else response.NOT_SERVING)


def reflection_of(*services: ServiceDescriptor) -> Any:
    """Return a servicer of reflection for ``services``, health and itself."""
    return reflection.aio.ReflectionServicer([each.full_name for each in (*services, HEALTH, REFLECTION)])


class HeldRoom:
    """Room that a call has, until `leave`."""

    def __init__(self, room: "Room", size: int) -> None:
        self._room = room
        self._size = size

    def shrink(self, size: int) -> None:
        """Give back all but ``size`` bytes; nothing if it has no more."""
        if size < self._size:
            self._size, freed = size, self._size - size
            self._room.give(freed)

    def leave(self) -> None:
        """Give all of it back."""
        self.shrink(0)


class Room:
    """Bytes that calls may hold together. Who finds too few waits, first come, first served. For one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_empty(self) -> bool:
        """Return whether nobody holds anything here, or waits."""
        return not (self._held or self._waiting)

    async def take(self, size: int) -> HeldRoom:
        """Wait for ``size`` bytes, or for all that there are if ``size`` is more, and take them."""
        size = min(size, self._most)
        if not self._waiting and self._held + size <= self._most:
            self._held += size
            return HeldRoom(self, size)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (size, turn)
        self._waiting.append(place)
        try:
            await turn
        except BaseException:
            if place in self._waiting:
                self._waiting.remove(place)
            # It may have been given its room in the moment it left. Or others waited behind it alone.
            self.give(size if turn.done() and not turn.cancelled() else 0)
            raise
        return HeldRoom(self, size)

    def give(self, size: int) -> None:
        """Take ``size`` bytes back, and let those in who wait for them."""
        self._held -= size
        while self._waiting and self._held + self._waiting[0][0] <= self._most:
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._held += wanted
                turn.set_result(None)


class Rooms:
    """A `Room` for each of many, which are told apart by name. Of names that hold nothing only a few are kept."""

    def __init__(self, most_of_each: int) -> None:
        self._most = most_of_each
        self._of: dict[str, Room] = {}

    async def take(self, name: str, size: int) -> HeldRoom:
        """Take ``size`` bytes of the room of ``name``; see `Room.take`."""
        if len(self._of) > _ROOMS:
            self._of = {each: room for each, room in self._of.items() if not room.is_empty}
        room = self._of.setdefault(name, Room(self._most))
        return await room.take(size)
