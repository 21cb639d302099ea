"""Drivers: the service's side of the processes that execute runs.

Hides processes and threads. The reports of a driver arrive in their order, in a thread of their own. `Exited` comes
last.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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
        self.child: Child
        # Sent by a thread: a channel that is full would hold the caller up. None ends it.
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def start(self, begin: Begin) -> None:
        """Start the process; OSError if none can be started."""
        # Without a grace: it ends after a step that may be long, and by itself.
        self.child = Child("raycloak.coordinator.service.driver:main", grace_s=None, log=self._log)
        self.send(begin)
        threading.Thread(target=self._listen, args=(self.child,), name="driver", daemon=True).start()

    def send(self, command: Command) -> None:
        """Send a command; it arrives behind those that were sent before."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the execution after the step that computes; a step that waits for its release is left. Resumable."""
        self._commands.put(None)

    def _write(self, child: Child) -> None:
        # An end that comes first is told by `Exited`, and what could not be written is for nobody.
        with suppress(ConnectionError):
            while (command := self._commands.get()) is not None:
                child.channel.send(command)
        child.finish()

    def _listen(self, child: Child) -> None:
        threading.Thread(target=self._write, args=(child,), name="to driver", daemon=True).start()
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


class DriverProcesses:
    """The driver processes by client; see `raycloak.coordinator.service.ports.DriverPort`. For the desk's thread.

    Args:
        logs: folder, made here, with a log for each client.
    """

    def __init__(self, logs: Path) -> None:
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._logs = logs
        self._drivers: dict[str, Driver] = {}
        self.tell: Callable[[str, Report | Exited], None] = lambda client_id, said: None

    def start(self, client_id: str, begin: Begin) -> None:
        """See `DriverPort`."""
        driver = Driver(self._logs / f"{client_id}.log", partial(self._told, client_id))
        self._drivers[client_id] = driver
        try:
            driver.start(begin)
        except OSError as error:
            self._told(client_id, Exited(code=-1, last_words=f"no process can be started: {error.strerror}"))

    def send(self, client_id: str, command: Command) -> None:
        """See `DriverPort`."""
        if driver := self._drivers.get(client_id):
            driver.send(command)

    def stop(self, client_id: str) -> None:
        """See `DriverPort`."""
        if driver := self._drivers.get(client_id):
            driver.stop()

    def kill(self, client_id: str) -> None:
        """See `DriverPort`."""
        if driver := self._drivers.get(client_id):
            driver.child.kill()

    def _told(self, client_id: str, said: Report | Exited) -> None:
        if isinstance(said, Exited):
            # Before it is told: the client's next driver is started after that.
            del self._drivers[client_id]
        self.tell(client_id, said)
