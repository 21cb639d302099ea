"""Drivers: the service's side of the processes that execute runs.

Hides processes and threads. The reports of a driver arrive in their order, in a thread of their own. `Exited` comes
last.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.service.pipe import REPORTS, Begin, Command, Report


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
        self._child: Child | None = None
        # Sent by a thread: a channel that is full would hold the caller up. None ends it.
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._child.pid if self._child is not None else None

    @property
    def alive(self) -> bool:
        """Return whether the process was started and has not ended."""
        return self._child is not None and self._child.alive

    def start(self, begin: Begin) -> None:
        """Start the process; OSError if none can be started."""
        assert self._child is None, "a driver is started once"
        # Without a grace: it ends after a step that may be long, and by itself.
        self._child = Child("raycloak.coordinator.service.driver:main", grace_s=None, log=self._log)
        self.send(begin)
        threading.Thread(target=self._listen, args=(self._child,), name=f"driver {self.pid}", daemon=True).start()

    def send(self, command: Command) -> None:
        """Send a command; it arrives behind those that were sent before."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the execution after the step that computes; a step that waits for its release is left. Resumable."""
        self._commands.put(None)

    def kill(self) -> None:
        """End the process at once; a resume repeats what was not sealed."""
        if self._child is not None:
            self._child.kill()

    def _write(self, child: Child) -> None:
        # An end that comes first is told by `Exited`, and what could not be written is for nobody.
        with suppress(ConnectionError):
            while (command := self._commands.get()) is not None:
                child.channel.send(command)
        child.finish()

    def _listen(self, child: Child) -> None:
        threading.Thread(target=self._write, args=(child,), name=f"to driver {child.pid}", daemon=True).start()
        try:
            while (report := child.channel.receive(*REPORTS)) is not None:
                self._told(report)
        except BaseException:
            child.kill()
            raise
        finally:
            exited = child.wait()
            self.stop()
            child.channel.close()
            self._told(exited)
