"""Calls both ways over one channel: either end asks, and answers while it waits for its own questions.

A call travels as a name and frames, as `raycloak.coordinator.vaults.calls` writes them: bytes, arrays, and tuples of
both. Only the two ends of a call know its method.

Guarantee: an end takes each call once, by its growing number, and at most `MOST_WAITING` at a time. Whatever else comes
is refused by name, and the next frame is read.
"""

import select
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar, Final

import numpy as np

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.channel import Channel, Frame
from raycloak.attestation.processes.deadline import Deadline, awaited
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.vaults.calls import ActorRefusal
from raycloak.metrics.errors import ProtocolError, RaycloakError, RunFailedError, is_out_of_memory

MOST_WAITING: Final = 64
"""Of calls that were not answered yet: a run asks one at a time, and a view beside it."""
SEND_S: Final = 60.0
"""For the other end to read: it reads whenever it waits, so only a machine without memory or a stopped process takes so
long."""


Written = tuple[bytes | tuple[bytes | None, ...] | None, ...]
"""Frames in a message: bytes, and None for the next of its arrays."""


class Called(Message):
    """A call.

    Attributes:
        call: grows from call to call of one end.
        returns: how many values the answer has.
        beside: whether it is answered while another one runs.
    """

    DOMAIN: ClassVar[str] = "raycloak/vault/called/v1"
    call: int
    name: str
    returns: int
    beside: bool
    frames: Written


class Answered(Message):
    """The answer to a call.

    Attributes:
        call: of `Called`; 0 for a frame that was no call.
        refusal: an encoded `Failed` in place of frames.
        out_of_memory: whether there was too little memory to answer.
    """

    DOMAIN: ClassVar[str] = "raycloak/vault/answered/v1"
    call: int
    frames: Written = ()
    refusal: bytes | None = None
    out_of_memory: bool = False


class CallCancelled(Message):
    """A word that nobody waits for the answer to a call any more."""

    DOMAIN: ClassVar[str] = "raycloak/vault/cancelled/v1"
    call: int


class LeaveWord(Message):
    """A word that the machine is about to end this process: it says so in its next answer."""

    DOMAIN: ClassVar[str] = "raycloak/vault/leave/v1"


class VaultEnded(Message):
    """The last word, of the machine's program that started a vault: why there is none, or none any more.

    Attributes:
        refusal: an encoded `Failed`: the connection was not taken.
        out_of_memory: whether the kernel killed the vault for want of memory.
    """

    DOMAIN: ClassVar[str] = "raycloak/vault/ended/v1"
    refusal: bytes | None = None
    out_of_memory: bool = False


Word = CallCancelled | LeaveWord | VaultEnded
_KINDS: Final = (Called, Answered, CallCancelled, LeaveWord, VaultEnded)


def pack(frames: Sequence[Any]) -> tuple[Written, list[np.ndarray]]:
    """Return frames as a message holds them, and their arrays."""
    arrays = list[np.ndarray]()

    def written(piece: Any) -> bytes | None:
        if isinstance(piece, np.ndarray):
            arrays.append(piece)
            return None
        return piece  # type: ignore[no-any-return]  # bytes, or its message is refused

    return tuple(tuple(map(written, each)) if isinstance(each, tuple) else written(each) for each in frames), arrays


def unpack(frames: Written, arrays: Sequence[np.ndarray]) -> list[Any]:
    """Return the frames of a message; ProtocolError ``malformed`` if its arrays are not as many as it names."""
    given = iter(arrays)

    def read(piece: bytes | None) -> Any:
        found = next(given, None) if piece is None else piece
        if found is None:
            raise ProtocolError("malformed", "a frame without its array")
        return found

    found = [tuple(map(read, each)) if isinstance(each, tuple) else read(each) for each in frames]
    if next(given, None) is not None:
        raise ProtocolError("malformed", "more arrays than frames have")
    return found


class Exchange:
    """One end of the calls over a channel. Any thread calls, answers and reads; those that wait read in turns.

    So who waits for an answer takes it itself: to hand it to another thread costs more than the message.

    Args:
        on_call: takes a call and its frames; it must not wait.
        on_word: takes every other message.
    """

    def __init__(
        self,
        channel: Channel,
        on_call: Callable[[Called, list[Any]], None],
        on_word: Callable[[Word], None],
    ) -> None:
        self._channel = channel
        self._on_call, self._on_word = on_call, on_word
        self._numbers = count(1)
        self._asked: dict[int, Future[list[Any]]] = {}
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._turn = threading.Condition()
        self._reading = self._ended = False
        self._lost: BaseException | None = None
        self._newest = 0
        self._waiting = 0

    def read_until(self, done: Callable[[], bool], by: Deadline | None = None) -> bool:
        """Take what comes, until ``done()``, a deadline, or the end of what the other end sends; return ``done()``."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: done() or not self._reading, None if by is None else by.left)
                if done() or self._reading or self._ended:
                    return done()
                self._reading = True
            try:
                self._read(by)
            finally:
                with self._turn:
                    self._reading = False
                    self._turn.notify_all()
            if by is not None and by.left == 0:
                return done()

    def _read(self, by: Deadline | None) -> None:
        """Take one frame, if one begins before the deadline."""
        if not awaited(self._channel.fileno(), select.POLLIN, by):
            return
        try:
            found: Frame[Any] | None = self._channel.receive_frame(*_KINDS)
            if found is None:
                self._ended = True
            else:
                self._take(found)
        except ProtocolError as error:
            self.tell(Answered(call=0, refusal=Failed.of(error).encode()))

    def _take(self, found: Frame[Any]) -> None:
        message = found.message
        if isinstance(message, Answered):
            with self._lock:
                future = self._asked.pop(message.call, None)
            # Nobody waits for it any more, or it answers no call.
            if future is None:
                return
            if message.out_of_memory:
                future.set_exception(MemoryError())
            elif message.refusal is not None:
                future.set_exception(ActorRefusal(message.refusal))
            else:
                try:
                    future.set_result(unpack(message.frames, found.arrays))
                except ProtocolError as error:
                    future.set_exception(ActorRefusal(Failed.of(error).encode()))
        elif isinstance(message, Called):
            try:
                frames = unpack(message.frames, found.arrays)
                with self._lock:
                    if message.call <= self._newest:
                        raise ProtocolError("replayed", "a call that was taken before")
                    self._newest = message.call
                    if self._waiting >= MOST_WAITING:
                        raise ProtocolError("busy", "more calls than are taken at once")
                    self._waiting += 1
            except ProtocolError as error:
                self.tell(Answered(call=message.call, refusal=Failed.of(error).encode()))
            else:
                self._on_call(message, frames)
        else:
            self._on_word(message)

    def ask(self, name: str, returns: int, frames: Sequence[Any], *, beside: bool = False) -> "Asked":
        """Send a call; raises what :meth:`lose` was told, if the other end is lost."""
        parts, arrays = pack(frames)
        # Calls arrive in the order of their numbers. Not under the other lock, which a reading thread needs.
        with self._asking:
            with self._lock:
                if self._lost is not None:
                    raise self._lost
                number, future = next(self._numbers), Future[list[Any]]()
                self._asked[number] = future
            self.tell(Called(call=number, name=name, returns=returns, beside=beside, frames=parts), arrays)
        return Asked(self, number, future)

    def answer(self, called: Called, work: Callable[[], Sequence[Any]]) -> None:
        """Do the work of a call and send what it returns, or why it failed."""
        arrays = list[np.ndarray]()
        try:
            parts, arrays = pack(work())
            answer = Answered(call=called.call, frames=parts)
        except ActorRefusal as error:
            answer = Answered(call=called.call, refusal=error.args[0])
        except Exception as error:  # noqa: BLE001 - a defect ends the call and not the process
            traceback.print_exc()
            refusal = Failed.of(as_told(error)).encode()
            answer = Answered(call=called.call, refusal=refusal, out_of_memory=is_out_of_memory(error))
        with self._lock:
            self._waiting -= 1
        self.tell(answer, arrays)

    def lose(self, cause: BaseException) -> None:
        """Fail every call that waits, and all that come, with ``cause``: the other end is gone."""
        with self._lock:
            self._lost = cause
            asked, self._asked = self._asked, {}
        for each in asked.values():
            each.set_exception(cause)
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def tell(self, message: Message, arrays: Sequence[np.ndarray] = ()) -> None:
        """Send a message; do nothing if the other end is gone, of which the end of what is read tells."""
        with suppress(ConnectionError):
            self._channel.send(message, arrays, Deadline(SEND_S))


class Asked:
    """A call that was sent."""

    def __init__(self, exchange: Exchange, number: int, future: "Future[list[Any]]") -> None:
        self._exchange, self._number, self._future = exchange, number, future

    def result(self, timeout_s: float) -> list[Any]:
        """Return the frames of the answer.

        Raises:
            TimeoutError: there is none yet.
            ActorRefusal: the other end refuses.
            MemoryError: it had too little memory.
        """
        by = Deadline(timeout_s)
        self._exchange.read_until(self._future.done, by)
        return self._future.result(by.left)

    def cancel(self) -> None:
        """Say that nobody waits for it any more."""
        self._exchange.tell(CallCancelled(call=self._number))


def as_told(error: Exception) -> RaycloakError:
    """Return an error as it leaves a process: a defect by its type alone, since its text may be data."""
    if isinstance(error, RaycloakError):
        return error
    return RunFailedError(
        "actor_error", f"an actor failed with {type(error).__name__}", "See the log of the run for its trace."
    )
