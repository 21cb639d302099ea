"""The standard streams of a command: one may be closed from the start, or be lost while the command works."""

import io
import os
import sys
from typing import TextIO


class Outlet(io.TextIOBase):
    """A stream that drops what it cannot write, so that a reader who leaves does not end a run.

    Attributes:
        failure: error of the first write that failed; None while all is well.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def writable(self) -> bool:
        """Return true."""
        return True

    def isatty(self) -> bool:
        """Return whether a person reads it."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
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
        """Pass on what was written, or drop it."""
        if self.failure is None:
            try:
                self._stream.flush()
            except OSError as error:
                self.failure = error


def open_missing_streams() -> None:
    """Connect standard streams that are missing to the null device.

    Otherwise the next file that the process opens would take the number of a standard stream.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", closefd=False, encoding="utf-8"))  # noqa: SIM115
