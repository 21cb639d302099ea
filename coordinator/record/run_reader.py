"""The record of a run as data, read from its directory.

Hides which file holds what, and what a run that is under way or was killed has not written yet. Reports, comparisons
and live views read a run through it; none of them opens the directory's files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.record.folder import RunFolder, RunRecord
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Released

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run directory says at one moment.

    Attributes:
        path: the directory.
        record: identity and status; ``running`` also after its process was killed.
        manifest: None if the run ended before one was made.
        verdict: of its newest execution; None if none has ended.
        events: the lines of ``metrics.jsonl``, in order, of all executions.
        released: what its measurements released.
    """

    path: Path
    record: RunRecord
    config: RunConfig
    manifest: Manifest | None
    verdict: Mapping[str, Any] | None
    events: tuple[Event, ...]
    released: tuple[Released, ...]

    def of(self, kind: str) -> tuple[Event, ...]:
        """Return the events of one kind: ``admitted``, ``step``, ``metric``, ``departure``, ``join``, ``restart``."""
        return tuple(event for event in self.events if event["event"] == kind)

    @property
    def steps(self) -> tuple[Event, ...]:
        """The committed steps in order; one that an execution repeated after a resume counts once, as it was last."""
        return tuple(dict(sorted({event["step"]: event for event in self.of("step")}.items())).values())


def read_run(path: Path) -> RunData:
    """Read a run directory.

    Raises:
        ConfigError: ``not_a_run`` if it is none; ``run_file`` if one of its files cannot be read.
    """
    folder = RunFolder.open(path)
    try:
        verdict = _parsed(folder.path / "verdict.json")
        events = tuple(_lines(folder.path / "metrics.jsonl"))
    except OSError as error:
        raise file_error("run_file", "read", path, error) from None
    return RunData(
        path=folder.path,
        record=folder.record,
        config=folder.config(),
        manifest=folder.manifest(),
        verdict=verdict,
        events=events,
        released=folder.released(),
    )


def run_directories() -> list[Path]:
    """Return the run directories of this state folder, the oldest run first."""
    found = [RunFolder.open(path.parent) for path in home.runs_folder().glob("*/run.json")]
    # By the record: a copied folder has new times on disk.
    return [each.path for each in sorted(found, key=lambda each: each.record.started_at)]


def _parsed(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError("run_file", f"{path} is no JSON object.", "Restore it as the run wrote it.")
    return value


def _lines(path: Path) -> Iterator[Event]:
    """Yield the lines of a log; a last one without its end is still being written."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ConfigError("run_file", f"{path}, line {number} is no event.", "Restore it as the run wrote it.")
        yield event
