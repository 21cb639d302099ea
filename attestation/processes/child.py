"""A child of this program: a function that runs in a process of its own and speaks with its parent over a channel.

    Child("package.module:function", "argument") ──► function(parent, "argument")

Guarantee: the child ends with its parent, however that ends: once the parent's end of the channel is closed it gets
SIGTERM, and is killed with all that it started if it is still there after its grace. Without any grace it is killed at
once, even if it is stopped. Its standard input is empty, and what it prints goes to its log, also from a library. A
child that holds a secret closes its memory to others itself.

A child that a call cannot rely on any more is killed: after a deadline, a message that cannot be read, or an end.
"""

import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.channel import Channel, Frame
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.failure import Failed, out_of_memory
from raycloak.attestation.processes.program import Exited, Program
from raycloak.metrics.errors import ProtocolError, RunFailedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

M = TypeVar("M", bound=Message)

GRACE_S: Final = 60.0
"""For a child that has to finish something after its parent is gone."""
_INSIDE: Final = "raycloak.attestation.processes.inside"
_SEE_LOG: Final = "Its log, or the output of this process, says why."
_ENDS_S: Final = 5.0
"""For a child that has closed its end: it is about to end, or of no use."""


class Child(Program):
    """The parent's side of a child. Its methods are for any thread; one at a time may receive.

    A context manager that ends it, and kills it if it does not.

    Args:
        target: ``module:function``. The function gets the channel to its parent and ``arguments``.
        grace_s: seconds that it may go on without its parent; None leaves its end to the child, which sees the end of
            what it receives. With 0 the thread that makes this object has to live as long as the child: the kernel
            takes the end of that thread for the parent's.
        log, environment, folder: as for a program.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        target: str,
        *arguments: str,
        grace_s: float | None = GRACE_S,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        own, its = socket.socketpair()
        self.channel = Channel(own)
        try:
            with its:
                command = [sys.executable, "-m", _INSIDE, "-" if grace_s is None else str(grace_s), target, *arguments]
                super().__init__(command, log=log, environment=environment, folder=folder, stdin=its.fileno())
        except BaseException:
            self.channel.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(Deadline(GRACE_S))

    def send(self, message: Message, arrays: "Sequence[NDArray[Any]]" = (), *, by: Deadline) -> None:
        """Send a message, as `Channel.send`. If the child has ended, whoever receives is told.

        Raises:
            RunFailedError: ``child_overdue`` if it did not read in time; it is killed.
        """
        try:
            self.channel.send(message, arrays, by)
        except TimeoutError:
            raise self._overdue() from None
        except ConnectionError:
            pass  # it may have said why

    def receive(self, *kinds: type[M], by: Deadline) -> M:
        """Receive a message without arrays; see :meth:`receive_frame`."""
        frame = self.receive_frame(*kinds, by=by)
        if frame.arrays:
            self.destroy()
            raise ProtocolError("malformed", f"a {type(frame.message).__name__} with arrays")
        return frame.message

    def receive_frame(self, *kinds: type[M], by: Deadline) -> Frame[M]:
        """Receive a message of one of ``kinds``, and its arrays.

        Raises:
            RaycloakError: the child says that it failed.
            ProtocolError: as `Channel.receive_frame`; the child is killed.
            RunFailedError: ``child_overdue`` if nothing came in time; the child is killed. ``child_ended`` if it ended
                before, ``out_of_memory`` if the kernel killed it for its memory.
        """
        try:
            found: Frame[M | Failed] | None = self.channel.receive_frame(*kinds, Failed, by=by)
        except TimeoutError:
            raise self._overdue() from None
        except ProtocolError:
            self.destroy()
            raise
        if found is None:
            raise self._gone()
        if isinstance(found.message, Failed) and Failed not in kinds:
            raise found.message.raised()
        return found  # type: ignore[return-value]  # of a kind that was asked for

    def call(self, message: Message, kind: type[M], *, by: Deadline) -> M:
        """Send a message and receive the answer; errors of both."""
        self.send(message, by=by)
        return self.receive(kind, by=by)

    def finish(self) -> None:
        """Tell it that nothing more is sent; it may answer what it has."""
        self.channel.finish()

    def end(self, by: Deadline) -> Exited:
        """Tell it that nothing more is sent, wait for its end, and kill it if the deadline passes."""
        self.finish()
        with suppress(TimeoutError):
            self.wait(by)
        exited = self.destroy()
        self.channel.close()
        return exited

    def _overdue(self) -> RunFailedError:
        self.destroy()
        return RunFailedError("child_overdue", "a child process did not answer in time, and was ended.", _SEE_LOG)

    def _gone(self) -> RunFailedError:
        with suppress(TimeoutError):
            self.wait(Deadline(_ENDS_S))
        exited = self.destroy()
        if exited.out_of_memory:
            return out_of_memory()
        return RunFailedError("child_ended", f"a child process ended with {exited.how}.", _SEE_LOG)
