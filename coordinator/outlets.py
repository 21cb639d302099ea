"""Standard streams as a command is given them: one may be closed from the start, or be lost while the command works."""

import io
import os
import sys
from typing import TextIO


class Outlet(io.TextIOBase):
    """A stream that may be lost: what cannot be written is dropped, so that nobody who stops reading ends a run.

    Attributes:
        failure: what the first write that failed was told; None while all is well.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def writable(self) -> bool:
        """Always true."""
        return True

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write ``text``, or drop it."""
        if self.failure is None:
            try:
                self._stream.write(text)
            except OSError as error:
                self.failure = error
        return len(text)

    def flush(self) -> None:
        """Hand on what was written, or drop it."""
        if self.failure is None:
            try:
                self._stream.flush()
            except OSError as error:
                self.failure = error


def open_missing_streams() -> None:
    """Let standard streams that the process was started without lead nowhere.

    Without it no file of the process is safe: the next one that it opens would take the number of a standard stream.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", closefd=False))  # noqa: SIM115
