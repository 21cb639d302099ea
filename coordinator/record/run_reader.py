"""The record of a run as data, read from its directory.

Hides which file holds what, and what a run that is under way or was killed has not written yet. Reports, comparisons
and live views read a run through it; none of them opens the directory's files.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from raycloak.attestation.log.evidence_log import ExportedLog, read_exported_log
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.record.folder import RunFolder, RunRecord, Status, is_executing
from raycloak.coordinator.record.verdict import Verdict
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Released

Event = Mapping[str, Any]

State = Status | Literal["killed", "unknown"]
"""The status of a run, but for one that its record calls ``running``: ``killed`` if no process executes it, ``unknown``
if that cannot be told here."""


@dataclass(frozen=True, slots=True)
class RunData:
    """The content of a run directory at one moment.

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
        """Return the events of one kind, such as ``admitted``, ``step``, ``load``, ``metric`` or ``departure``."""
        return tuple(event for event in self.events if event["event"] == kind)

    @property
    def steps(self) -> tuple[Event, ...]:
        """The committed steps in order; one that an execution repeated after a resume counts once, as it was last."""
        return tuple(dict(sorted({event["step"]: event for event in self.of("step")}.items())).values())

    def opened_verdict(self) -> Verdict | None:
        """Return the verdict with its types; None if no execution has ended.

        Raises:
            ConfigError: ``run_file`` if it is not one that this version writes.
        """
        if self.verdict is None:
            return None
        stated = {**self.verdict}
        try:
            return Verdict.of({"run_dir": stated.pop("run_dir"), "metrics": stated})
        except (KeyError, TypeError, ValidationError):
            raise ConfigError(
                "run_file",
                f"{self.path / 'verdict.json'} is no verdict of this version.",
                "Restore it as the run wrote it, or use the version of raycloak that did.",
            ) from None

    def log(self) -> ExportedLog | None:
        """Return the evidence log, which is exported when an execution ends; None if there is none.

        Raises:
            EvidenceError: ``log_broken`` unless the orchestrator that the manifest names signed it as a whole.
        """
        path = self.path / "evidence.jsonl"
        if self.manifest is None or not path.exists():
            return None
        return read_exported_log(path, self.manifest.log_owner)


class EventTail:
    """A reader of the events that were appended to a run's log since the last look, from its first one on.

    A last line without its end is read again later: it is still being written, or a resume cuts it off.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._offset = 0
        self._lines = 0

    def read(self) -> Iterator[Event]:
        """Yield the new events in order; none where there is no log yet.

        Raises:
            ConfigError: ``run_file`` if the log cannot be read, has a line that is no event, or became shorter.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise file_error("run_file", "read", self._path, error) from None
        with file:
            if file.seek(0, 2) < self._offset:
                raise ConfigError("run_file", f"{self._path} became shorter.", "Restore it as the run wrote it.")
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._lines += 1
                yield self._event(line)

    def _event(self, line: bytes) -> Event:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            where = f"{self._path}, line {self._lines}"
            raise ConfigError("run_file", f"{where} is no event.", "Restore it as the run wrote it.")
        return event


def read_run(path: Path) -> RunData:
    """Read a run directory.

    Raises:
        ConfigError: ``not_a_run`` if it is none; ``run_file`` if one of its files cannot be read.
    """
    folder = RunFolder.open(path)
    return RunData(
        path=folder.path,
        record=folder.record,
        config=folder.config(),
        manifest=folder.manifest(),
        verdict=read_verdict(path),
        events=tuple(EventTail(path).read()),
        released=folder.released(),
    )


def state_of(path: Path) -> State:
    """Return what the run in a directory does now; asking keeps no run from starting.

    Raises:
        ConfigError: ``not_a_run``.
    """
    record = RunFolder.open(path).record
    if record.status != "running":
        return record.status
    executing = is_executing(path, record.run_id)
    if executing is None:
        return "unknown"
    # Read again if it is free: the run may have ended after the first look, and marked that before it let go.
    now = "running" if executing else RunFolder.open(path).record.status
    return "killed" if now == "running" and not executing else now


def read_verdict(path: Path) -> Mapping[str, Any] | None:
    """Return the verdict of the newest execution that ended; None if none has. ConfigError ``run_file``."""
    file = path / "verdict.json"
    return _mapping(file, json.loads) if file.exists() else None


def read_written_manifest(path: Path) -> Mapping[str, Any] | None:
    """Return the manifest as it is on disk, of any version; None if the run has none. ConfigError ``run_file``."""
    file = path / "manifest.json"
    return _mapping(file, json.loads) if file.exists() else None


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """The configuration of a run as it is on disk, of any version: ``values`` by name, and the file's SHA-256."""

    values: Mapping[str, Any]
    digest: str


def read_written_config(path: Path) -> WrittenConfig:
    """Read the configuration without checking it against this version; ConfigError ``run_file``."""
    file = path / "config.yaml"
    return WrittenConfig(_mapping(file, yaml.safe_load), hashlib.sha256(_content(file)).hexdigest())


def run_directories() -> list[Path]:
    """Return the run directories of this state folder, the oldest run first; nothing is created."""
    found = [path.parent for path in (home.home_path() / "runs").glob("*/run.json")]
    return sorted(found, key=_started)


def _started(path: Path) -> float:
    try:
        # By the record: a copied folder has new times on disk.
        return RunFolder.open(path).record.started_at
    except ConfigError:
        return 0.0


def _mapping(path: Path, parse: Callable[[bytes], object]) -> Mapping[str, Any]:
    try:
        value = parse(_content(path))
    except (ValueError, RecursionError, yaml.YAMLError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError("run_file", f"{path} is no object with names.", "Restore it as the run wrote it.")
    return value


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise file_error("run_file", "read", path, error) from None
