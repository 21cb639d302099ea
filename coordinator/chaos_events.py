"""Reads the steps of a run from ``metrics.jsonl`` for the chaos bench, while the run still writes it."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A finished step. ``time`` is the Unix time of its end in seconds; the rest is as in ``docs/metrics.md``."""

    time: float
    step: int
    parameter_digest: str
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
class EventTail:
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
