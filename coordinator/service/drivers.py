"""Drivers: the service's side of the processes that execute runs.

Hides processes, pipes and threads. The reports of a driver arrive in their order, in a thread of their own.
`Exited` comes last.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raycloak.coordinator.service.pipe import (
    Allow,
    Batches,
    Begin,
    Close,
    Command,
    Copy,
    Load,
    Report,
    Save,
    command_line,
    lines_of,
    parse_report,
)

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
        # A command is one line, and lines of two threads must not mix.
        self._lock = threading.Lock()

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
        self._send(begin)
        threading.Thread(target=self._listen, name=f"driver {self._process.pid}", daemon=True).start()

    def allow(self, computed: int, released: int, held: bool = False) -> None:
        """Let steps be charged and reduced, or held; see `Allow`."""
        self._send(Allow(computed=computed, released=released, held=held))

    def batches(self, step: int, files: Sequence[Path]) -> None:
        """Name the files of a step's sent examples, before the step is allowed."""
        self._send(Batches(step=step, files=tuple(files)))

    def save(self, request: str, after: int) -> None:
        """Have the state saved after so many finished steps, before the next step is allowed."""
        self._send(Save(id=request, after=after))

    def copy(self, request: str, after: int, path: Path) -> None:
        """Have the weights written to a file after so many finished steps, before the next step is allowed."""
        self._send(Copy(id=request, after=after, path=path))

    def load(self, request: str, after: int, package: str) -> None:
        """Have the run go on from a package after so many finished steps, before the next step is allowed."""
        self._send(Load(id=request, after=after, package=package))

    def close(self) -> None:
        """End the run: complete if all steps are finished, else stopped and resumable."""
        self._send(Close())

    def stop(self) -> None:
        """End the execution after the step that computes; a step that waits for its release is left. Resumable."""
        with self._lock:
            self._hang_up()

    def kill(self) -> None:
        """End the process at once; a resume repeats what was not sealed."""
        if self._process is not None:
            self._process.kill()

    def _send(self, command: Command) -> None:
        with self._lock:
            if self._process is None or self._process.stdin is None or self._process.stdin.closed:
                return
            try:
                self._process.stdin.write(command_line(command))
                self._process.stdin.flush()
            # It has ended, and `Exited` says so.
            except BrokenPipeError:
                self._hang_up()

    def _hang_up(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            # What could not be written is for nobody.
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _listen(self) -> None:
        process = self._process
        assert process is not None, "it was started"
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
