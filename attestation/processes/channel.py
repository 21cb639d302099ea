"""A channel between two processes: typed messages over a stream socket, and arrays in sealed memory beside them.

A frame is a big-endian u32 and that many bytes, ``LP(domain, body, array types and shapes)``. The descriptor of the
memory of its arrays comes with its first byte. Nothing in it is pickled.

Guarantee: whatever the other side sends, a receiver holds at most ``most_bytes`` of a frame, and maps at most
``most_array_bytes``; a sparse file counts as if it were full.
"""

import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.processes.arrays import mapped, places_of, shared
from raycloak.attestation.processes.deadline import Deadline, awaited
from raycloak.metrics.errors import ProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

M = TypeVar("M", bound=Message)

MOST_BYTES: Final = 2**26
"""Of a frame: far more than a run's contract or the text of a sample."""
MOST_ARRAY_BYTES: Final = 2**42
"""Of a frame's arrays together: words of 64 bits of the largest model, as 32 workers send them to one aggregator."""
_PIECE: Final = 2**20


class PeerProcess(NamedTuple):
    """The process at the other end of a socket, as it was when it connected, or when it listened.

    Attributes:
        pid: of the process. uid: of its user.
    """

    pid: int
    uid: int

    @classmethod
    def of(cls, end: socket.socket) -> Self:
        """Return who the kernel says is at the other end of a connected socket of this machine."""
        pid, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return cls(pid, uid)


@dataclass(frozen=True, slots=True)
class Frame(Generic[M]):
    """A message and the arrays that came with it."""

    message: M
    arrays: "tuple[NDArray[Any], ...]"


class Channel:
    """One end of a channel. One thread may receive while any others send.

    Args:
        end: a connected stream socket of this machine; the channel closes it.
        most_bytes: of a frame that is received. most_array_bytes: of its arrays.
    """

    def __init__(
        self, end: socket.socket, most_bytes: int = MOST_BYTES, most_array_bytes: int = MOST_ARRAY_BYTES
    ) -> None:
        self._end = end
        self._most_bytes = most_bytes
        self._most_array_bytes = most_array_bytes
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 once it is closed."""
        return self._end.fileno()

    @property
    def peer(self) -> PeerProcess:
        """The process at the other end."""
        return PeerProcess.of(self._end)

    def send(self, message: Message, arrays: "Sequence[NDArray[Any]]" = (), by: Deadline | None = None) -> None:
        """Send a message, and copy ``arrays`` into memory that the other side maps.

        Args:
            by: until when the other side must have made room for it; None waits as long as it lives.

        Raises:
            ConnectionError: the other side is gone, or this one is closed.
            TimeoutError: the deadline has passed. A part may be sent, so the channel is of no more use.
        """
        specs, descriptors = list[str](), list[int]()
        if arrays:
            specs, descriptor = shared(arrays)
            descriptors = [descriptor]
        try:
            content = length_prefixed(message.DOMAIN, message.encode(), *specs)
            frame = memoryview(len(content).to_bytes(4, "big") + content)
            with self._sending:
                if self._end.fileno() < 0:
                    raise BrokenPipeError("the channel is closed")
                # With the first byte, so that who reads the length has it.
                frame = frame[self._send(frame[:_PIECE], descriptors, by) :]
                while frame:
                    frame = frame[self._send(frame[:_PIECE], [], by) :]
        finally:
            for each in descriptors:
                os.close(each)

    def receive(self, *kinds: type[M], by: Deadline | None = None) -> M | None:
        """Receive a message as :meth:`receive_frame`; with arrays it is ``malformed``."""
        frame = self.receive_frame(*kinds, by=by)
        if frame is not None and frame.arrays:
            raise ProtocolError("malformed", f"a {type(frame.message).__name__} with arrays")
        return frame.message if frame is not None else None

    def receive_frame(self, *kinds: type[M], by: Deadline | None = None) -> Frame[M] | None:
        """Receive a message of one of ``kinds`` and its arrays; None once the other side sends nothing more.

        An end in the middle of a frame is an end: the part counts for nothing.

        Args:
            by: until when the whole frame must be there; None waits as long as the other side lives.

        Raises:
            ProtocolError: ``frame_too_large`` or ``arrays_too_large``; ``malformed`` if it is of no such kind, not
                canonical, or lacks the memory of its arrays; as `raycloak.attestation.processes.arrays.mapped`.
                Further frames can be received.
            TimeoutError: the deadline has passed. A part may be read, so the channel is of no more use.
        """
        descriptors: list[int] = []
        try:
            length = self._receive(4, by, descriptors)
            if length is None:
                return None
            size = int.from_bytes(length, "big")
            if size > self._most_bytes:
                # Read and forgotten, so that the next frame begins where this one ends.
                for left in range(size, 0, -_PIECE):
                    if self._receive(min(_PIECE, left), by, None) is None:
                        return None
                raise ProtocolError("frame_too_large", f"a frame of {size} bytes, and {self._most_bytes} are allowed")
            content = self._receive(size, by, None)
            return None if content is None else self._parsed(content, descriptors, kinds)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def finish(self) -> None:
        """Send nothing more; the other side reads what was sent and then the end. Receiving goes on."""
        with suppress(OSError):  # it has gone
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End both directions, after a send that is under way. Nobody may receive meanwhile."""
        with self._sending:
            self._end.close()

    def _send(self, piece: memoryview, descriptors: Sequence[int], by: Deadline | None) -> int:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
        while True:
            try:
                return self._end.sendmsg([piece], passed if descriptors else [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._await(select.POLLOUT, by)

    def _receive(self, size: int, by: Deadline | None, descriptors: list[int] | None) -> bytearray | None:
        """Return that many bytes; None if they end before. Descriptors that nobody expects are not taken."""
        content = bytearray()
        while len(content) < size:
            wanted = min(_PIECE, size - len(content))
            try:
                if descriptors is None:
                    piece = self._end.recv(wanted, socket.MSG_DONTWAIT)
                else:
                    piece = self._receive_with(wanted, descriptors)
            except BlockingIOError:
                self._await(select.POLLIN, by)
                continue
            except ConnectionError:
                return None
            if not piece:
                return None
            content += piece
        return content

    def _receive_with(self, size: int, descriptors: list[int]) -> bytes:
        # The kernel closes all for which there is no room.
        room = socket.CMSG_SPACE(4)
        piece, passed, _, _ = self._end.recvmsg(size, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                count = len(data) // 4
                descriptors += struct.unpack(f"{count}i", data[: 4 * count])
        return piece

    def _await(self, event: int, by: Deadline | None) -> None:
        if not awaited(self._end.fileno(), event, by):
            raise TimeoutError("the other process did not read or answer in time")

    def _parsed(self, content: bytearray, descriptors: Sequence[int], kinds: Sequence[type[M]]) -> Frame[M]:
        fields = _fields(content)
        if len(fields) < 2:
            raise ProtocolError("malformed", "a frame without a message")
        domain, body, *specs = fields
        kind = next((each for each in kinds if each.DOMAIN.encode() == domain), None)
        if kind is None:
            raise ProtocolError("malformed", f"none of {', '.join(each.__name__ for each in kinds)}")
        if len(descriptors) != bool(specs):
            raise ProtocolError("malformed", f"a {kind.__name__} of {len(specs)} arrays without their memory")
        message = parse(kind, body)
        # Not UTF-8 is no type either.
        places = places_of([spec.decode(errors="replace") for spec in specs])
        if not places:
            return Frame(message, ())
        if (size := places[-1].end) > self._most_array_bytes:
            raise ProtocolError("arrays_too_large", f"arrays of {size} bytes, and {self._most_array_bytes} are allowed")
        return Frame(message, mapped(places, descriptors[0]))


def _fields(content: bytearray) -> list[bytes]:
    """Return the fields of a length-prefixed encoding."""
    fields, position = [], 0
    while position < len(content):
        end = position + 4 + int.from_bytes(content[position : position + 4], "big")
        if position + 4 > len(content) or end > len(content):
            raise ProtocolError("malformed", "a frame whose fields do not fit it")
        fields.append(bytes(content[position + 4 : end]))
        position = end
    return fields
