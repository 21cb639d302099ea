"""Drivers: the service's side of the processes that execute runs.

Hides processes, pipes and threads. The reports of a driver arrive in their order, in a thread of their own.
`Exited` comes last.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raycloak.coordinator.service.pipe import Begin, Command, Report, command_line, lines_of, parse_report

_LAST_BYTES: Final = 4096
"""Of a log, where its last line is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The end of a driver's process.

    Attributes:
        code: its exit code; negative for the number of the signal that ended it.
        last_words: the last line of its log, for the operator; empty if it said nothing.
    """

    code: int
    last_words: str


class Driver:
    """A driver process. Its methods are for any thread; none waits for the process, and after its end they do nothing.

    Args:
        log: file that its standard error is appended to.
        told: called with each report and at last with `Exited`, in a thread of this driver. If it raises, the process
            is killed, so that nothing goes on that nobody hears of.
    """

    def __init__(self, log: Path, told: Callable[[Report | Exited], None]) -> None:
        self._log = log
        self._told = told
        self._process: subprocess.Popen[bytes] | None = None
        # Written by a thread: a pipe that is full would hold the caller up. None closes the pipe.
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """Return whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, begin: Begin) -> None:
        """Start the process; OSError if none can be started."""
        assert self._process is None, "a driver is started once"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raycloak.coordinator.service.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # A signal from the service's terminal is for the service, which ends its drivers as it means to.
                start_new_session=True,
            )
        self.send(begin)
        name, process = f"driver {self._process.pid}", (self._process,)
        for work in (self._write, self._listen):
            threading.Thread(target=work, args=process, name=name, daemon=True).start()

    def send(self, command: Command) -> None:
        """Send a command; it arrives behind those that were sent before."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the execution after the step that computes; a step that waits for its release is left. Resumable."""
        self._commands.put(None)

    def kill(self) -> None:
        """End the process at once; a resume repeats what was not sealed."""
        if self._process is not None:
            self._process.kill()

    def _write(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None, "it is a pipe"
        # An end that comes first is told by `Exited`, and what could not be written is for nobody.
        with suppress(BrokenPipeError), process.stdin:
            while (command := self._commands.get()) is not None:
                process.stdin.write(command_line(command))
                process.stdin.flush()

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None, "it is a pipe"
        try:
            for line in lines_of(process.stdout.fileno()):
                self._told(parse_report(line))
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
            process.stdout.close()
            self.stop()
            self._told(Exited(code=code, last_words=self._last_words()))

    def _last_words(self) -> str:
        with suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""
