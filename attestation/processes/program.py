"""A program in a process of its own: started, followed by its log, and ended with all that it started."""

import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from raycloak.attestation.processes.deadline import Deadline, awaited

_TAIL_BYTES: Final = 4096
"""Of a log, where its last line is looked for, however long it is."""
_LOOK_S: Final = 0.01
"""More often would take a tenth of a core from the program that is followed."""
_GONE_S: Final = 60.0
"""For the kernel to end a process that was killed: it may have much memory to give back."""
_VMSTAT: Final = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The end of a process.

    Attributes:
        code: its exit code; negative for the number of the signal that ended it.
        last_words: the last line of its log, for the operator; empty if it said nothing or has no log.
        out_of_memory: whether somebody else than its parent killed it, and the kernel killed processes for want of
            memory meanwhile.
    """

    code: int
    last_words: str
    out_of_memory: bool = False

    @property
    def how(self) -> str:
        """The end in a few words."""
        return f"signal {-self.code}" if self.code < 0 else f"exit status {self.code}"


class Program:
    """A running program. It is a session of its own: a signal of the parent's terminal is the parent's to handle.

    Its methods are for any thread. A context manager that kills it.

    Args:
        command: the program and its arguments.
        log: file that its output and errors are appended to; None leaves it those of this process.
        output: file that its standard output is appended to instead.
        environment: all variables of it; None has it inherit those of this process.
        folder: that it works in.
        stdin: descriptor that it reads; None gives it nothing.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path | None = None,
        output: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdin: int | None = None,
    ) -> None:
        self._log = log
        self._killed = False
        self._others_killed = _killed_for_memory()
        with ExitStack() as opened:
            errors = _appended(log, opened)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=_appended(output, opened) if output is not None else errors,
                stderr=errors,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        # It tells of the end without taking it: until it is taken, no other process gets the number of this one.
        try:
            self._end = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._taking = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that ``poll`` finds readable once it has ended; until its end is waited for."""
        return self._end

    @property
    def alive(self) -> bool:
        """Return whether it has not ended."""
        return not self._ended(Deadline(0.0))

    def signal(self, number: int) -> None:
        """Send a signal to it alone; do nothing if it has ended."""
        with self._taking:
            if self._process.returncode is None:
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once, and all that it started in its session, without a wait."""
        alive = self.alive
        with self._taking:
            if self._process.returncode is None:
                self._killed |= alive
                os.killpg(self._process.pid, signal.SIGKILL)

    def destroy(self) -> Exited:
        """End it at once, as :meth:`kill`, and wait until it is gone; return how it ended."""
        self.kill()
        return self.wait(Deadline(_GONE_S))

    def wait(self, by: Deadline | None = None) -> Exited:
        """Wait for its end.

        Raises:
            TimeoutError: the deadline has passed; it goes on.
        """
        if not self._ended(by):
            raise TimeoutError(f"process {self.pid} has not ended in time")
        with self._taking:
            if self._process.returncode is None:
                self._process.wait()
                os.close(self._end)
        code = self._process.returncode
        foreign = code == -signal.SIGKILL and not self._killed
        return Exited(
            code=code,
            last_words=self.last_words(),
            out_of_memory=foreign and _killed_for_memory() > self._others_killed,
        )

    def last_words(self) -> str:
        """Return the last line of the log that is not empty; empty without one."""
        if self._log is not None:
            with suppress(OSError), self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
                return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def lines(self, by: Deadline) -> Iterator[str]:
        """Yield each line of the log, from its beginning, soon after it is whole, until the program ends.

        Raises:
            TimeoutError: the deadline has passed.
        """
        assert self._log is not None, "it was asked for"
        kept = b""
        with self._log.open("rb") as log:
            while True:
                # Before the look: what it says last is read after it has ended.
                alive = self.alive
                *whole, kept = (kept + log.read()).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
                if not alive:
                    return
                if by.left == 0:
                    raise TimeoutError(f"process {self.pid} has not ended in time")
                time.sleep(_LOOK_S)

    def _ended(self, by: Deadline | None) -> bool:
        with self._taking:
            if self._process.returncode is not None:
                return True
            # A copy: another thread may take the end meanwhile.
            end = os.dup(self._end)
        try:
            return awaited(end, select.POLLIN, by)
        finally:
            os.close(end)


def run(
    command: Sequence[str | Path],
    by: Deadline,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[Exited, str]:
    """Run a program to its end; return that, and what it wrote to its standard output.

    Raises:
        TimeoutError: the deadline has passed; it was killed, with all that it started.
        OSError: it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="raycloak-run-") as kept:
        output, log = Path(kept) / "output", Path(kept) / "log"
        with Program(command, log=log, output=output, environment=environment, folder=folder) as program:
            exited = program.wait(by)
        return exited, output.read_text(encoding="utf-8", errors="replace")


def _appended(file: Path | None, opened: ExitStack) -> int | None:
    if file is None:
        return None
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    opened.callback(os.close, descriptor)
    return descriptor


def _killed_for_memory() -> int:
    """Return how many processes the kernel has killed since it started because memory ran out, in any group."""
    with suppress(OSError):
        for line in _VMSTAT.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
