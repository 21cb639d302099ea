"""A training as a child process of the chaos bench: start, follow, ask to stop, kill, resume and verify it.

It hides that the driver is another process each time. The run directory is the only thing they share. Steps are read
from its ``metrics.jsonl`` while the run still writes it.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.program import Program, run
from raycloak.coordinator.config.home import HOME_VARIABLE
from raycloak.coordinator.record.folder import RunFolder
from raycloak.metrics.errors import RunFailedError


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A finished step. ``time`` is the Unix time of its end in seconds; the rest is as in ``docs/metrics.md``."""

    time: float
    step: int
    model_digest: str
    workers: int
    attempts: int
    seconds: float
    charge_seconds: float
    compute_seconds: float
    reduce_seconds: float

    @property
    def began(self) -> float:
        """The Unix time of its beginning, in seconds."""
        return self.time - self.seconds


@dataclass(frozen=True, slots=True)
class Left:
    """The departure of a member that was lost, was refused or left."""

    time: float
    code: str


@dataclass(slots=True)
class LineTail:
    """A reader of the lines that were appended to a file since the last look.

    An unfinished last line is read again later, because an execution that resumes the run may cut it off.
    """

    path: Path
    steps: list[StepSeen] = field(default_factory=list)
    departures: list[Left] = field(default_factory=list)
    _offset: int = 0

    def look(self) -> bool:
        """Read the finished lines; return whether there were any."""
        if not self.path.exists() or self.path.stat().st_size <= self._offset:
            return False
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(lines) + len(newline)
        for line in lines.splitlines():
            self._take(json.loads(line))
        return bool(newline)

    def _take(self, event: dict[str, object]) -> None:
        if event["event"] == "step":
            self.steps.append(StepSeen(**{name: event[name] for name in StepSeen.__slots__}))  # type: ignore[arg-type]
        elif event["event"] == "departure":
            self.departures.append(Left(float(str(event["time"])), str(event["code"])))


LOOK_EVERY_S = 0.01  # every 2 ms would take a tenth of a core from the run
STOP_S = 120.0
VERIFY_S = 600.0
"""For one command. 10,000 steps verify in seconds on an idle core."""


@dataclass(frozen=True, slots=True)
class ChildTask:
    """A training task: a configuration with overrides, and the file of the run secret."""

    config: Path
    overrides: tuple[str, ...]
    secret: Path


@dataclass(slots=True)
class ChildRun:
    """One run in a `RAYCLOAK_HOME` of its own.

    Attributes:
        home: its state folder.
        environment: variables that lead the driver to its cluster.
        patience_s: seconds to wait for an event of the run before it counts as stuck.
        ended: Unix times and reasons of the drivers that ended by themselves.
    """

    task: ChildTask
    home: Path
    environment: Mapping[str, str]
    patience_s: float
    ended: list[tuple[float, str]] = field(default_factory=list)
    tail: LineTail | None = None
    _driver: Program | None = None

    @property
    def pid(self) -> int:
        """The driver's process id."""
        assert self._driver is not None, "the run was started"
        return self._driver.pid

    @property
    def alive(self) -> bool:
        """Return whether the driver is running."""
        return self._driver is not None and self._driver.alive

    @property
    def steps(self) -> list[StepSeen]:
        """Every step that was seen, over all executions."""
        return self.tail.steps if self.tail else []

    @property
    def folder(self) -> RunFolder:
        """The run directory."""
        (path,) = (self.home / "runs").iterdir()
        return RunFolder.open(path)

    def start(self, *, resume: bool = False) -> None:
        """Start a driver, for a new run or for the existing one."""
        how = ["--resume"] if resume else ["--run-secret", str(self.task.secret)]
        settings = [word for override in self.task.overrides for word in ("--set", override)]
        self._driver = Program(
            _command("run", self.task.config, *settings, *how),
            log=self._log,
            environment=self._environment,
            folder=self.home,
        )

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Follow the run until ``condition`` holds. It is checked now, and whenever the run has written something.

        Raises:
            RunFailedError: ``chaos_ended`` if the driver ended first, ``chaos_stuck`` after `patience_s`.
        """
        deadline = time.monotonic() + self.patience_s
        news = True
        while True:
            alive = self.alive
            news |= self._look()
            if news and condition():
                return
            news = False
            if not alive:
                raise RunFailedError("chaos_ended", f"the run ended before {what}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise RunFailedError("chaos_stuck", f"{what} did not come within {self.patience_s:g} s")
            time.sleep(LOOK_EVERY_S)

    def signal(self, number: int) -> None:
        """Send a signal to the driver alone; do nothing if it has ended."""
        assert self._driver is not None, "the run was started"
        self._driver.signal(number)

    def kill(self) -> None:
        """End the driver at once, if there is one; return when it is gone."""
        if self._driver is not None:
            self._driver.destroy()

    def stop(self) -> None:
        """Ask the driver to end after its step, and wait for it.

        Raises:
            RunFailedError: as :meth:`finish`.
        """
        self.signal(signal.SIGTERM)
        self.finish(STOP_S)

    def finish(self, deadline_s: float) -> None:
        """Wait until the driver has ended.

        Raises:
            RunFailedError: ``chaos_stuck`` if it is still there after ``deadline_s``, ``chaos_ended`` if the run that
                it left is neither stopped nor done.
        """
        assert self._driver is not None, "the run was started"
        try:
            self._driver.wait(Deadline(deadline_s))
        except TimeoutError:
            raise RunFailedError("chaos_stuck", f"the run did not end within {deadline_s:g} s") from None
        self._look()
        status = self.folder.record.status
        if status not in ("stopped", "done"):
            raise RunFailedError("chaos_ended", f"the run ended and is {status}: {self.last_words()}")

    def failed_claims(self) -> tuple[str, ...]:
        """Verify the finished run as its auditor would; return each claim that failed, with the record that breaks it.

        If the site can make no trust file or the verification no table, the answer is the reason.
        """
        run, trust = self.folder.path, self.home / "trust.json"
        made = self._ask("trust", run, "--output", trust)
        found = made if "error" in made else self._ask("verify", run, "--trust", trust)
        if "error" in found:
            return (f"{found['error']['code']}: {found['error']['message']}",)
        failed = [each for each in found["claims"] if each["outcome"] == "FAILED"]
        return tuple(f"{each['claim']}: {each['record']}: {each['says']}" for each in failed)

    def _ask(self, *arguments: str | Path) -> dict[str, Any]:
        """Run a command in the state folder of this run; return the object that it prints."""
        exited, said = run(
            _command(*arguments, "--json"), Deadline(VERIFY_S), environment=self._environment, folder=self.home
        )
        try:
            answer: dict[str, Any] = json.loads(said)
        except ValueError:
            words = exited.last_words or "it said nothing"
            return {"error": {"code": "chaos_verify", "message": f"raycloak {arguments[0]}: {words}"}}
        return answer

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment, HOME_VARIABLE: str(self.home)}

    def last_words(self) -> str:
        """Return the last line that the drivers wrote."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    @property
    def _log(self) -> Path:
        return self.home / "driver.log"

    def _look(self) -> bool:
        if self.tail is None:
            found = list((self.home / "runs").glob("*/metrics.jsonl"))
            if not found:
                return False
            self.tail = LineTail(found[0])
        return self.tail.look()


def _command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "raycloak", *map(str, arguments)]
