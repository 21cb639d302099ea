"""The run directory, from which a later execution resumes or replays a run, and the lock that keeps two apart.

It holds ``run.json`` (identity and status), ``config.yaml``, ``manifest.json``, ``metrics.jsonl`` and logs. A run that
ended also leaves ``parameters.safetensors`` and ``verdict.json`` there.
A process that is killed leaves the status ``running`` behind; only the lock tells whether that is still true.
"""

import fcntl
import os
import secrets
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import numpy as np
import yaml
from pydantic import ValidationError
from safetensors.numpy import save_file

from raycloak.attestation.core.messages import Message, parse, parse_stored
from raycloak.attestation.files.whole import sync, write_whole
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Released, ReleasedValues
from raycloak.workers.terms.model_digest import split_flat

AUDIT = "audit.json"
"""The file of a run directory that an audit wrote: its model is that of the configuration with canaries."""

M = TypeVar("M", bound=Message)
Status = Literal["running", "stopped", "failed", "void", "done"]
"""A ``void`` run ended before anything was charged, or was discarded. Neither it nor a ``done`` one can be resumed."""


class RunRecord(Message):
    """The identity and status of a run directory.

    Attributes:
        base: folder that relative paths and ``module:function`` names of the configuration start from.
        driver_base: the same folder on the driver's machine, absolute.
        secret_file: the user's run-secret file; None if the orchestrator generated one.
        started_at: Unix time of the first execution, in seconds.
    """

    DOMAIN: ClassVar[str] = "raycloak/run-record/v1"

    run_id: str
    name: str
    base: str
    secret_file: str | None
    started_at: float
    status: Status
    driver_base: str


class WatchedResult(Message):
    """A result that a run's early stopping has seen after so many finished steps; None if it was no finite number."""

    DOMAIN: ClassVar[str] = "raycloak/watched-result/v1"

    steps: int
    value: float | None


class WatchedResults(Message):
    """All results that a run's early stopping has seen, in their order."""

    DOMAIN: ClassVar[str] = "raycloak/watched-results/v1"

    results: tuple[WatchedResult, ...] = ()


class SavedState(Message):
    """A state of the run that was asked for, and the package that holds it.

    Attributes:
        request: the caller's name of its request.
        step: number of finished steps behind the package.
        package: location of the package.
    """

    DOMAIN: ClassVar[str] = "raycloak/saved-state/v1"

    request: str
    step: int
    package: str
    package_digest: bytes
    model_digest: bytes


class SavedStates(Message):
    """All states of the run that were asked for, in their order."""

    DOMAIN: ClassVar[str] = "raycloak/saved-states/v1"

    states: tuple[SavedState, ...] = ()


class RunFolder:
    """One run directory."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def create(cls, config: RunConfig, run_id: str, base: str, secret_file: str | None) -> "RunFolder":
        """Make the directory of a run that begins now."""
        path = home.create_run_folder(config.name, run_id)
        (path / "config.yaml").write_text(
            yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
        )
        record = RunRecord(
            run_id=run_id,
            name=config.name,
            base=base,
            secret_file=secret_file,
            started_at=time.time(),
            status="running",
            driver_base=str(Path(base).resolve()),
        )
        folder = cls(path, record)
        # Last: a folder without its record is no run yet.
        folder.mark("running")
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open an existing directory; ConfigError ``not_a_run`` if it is none."""
        try:
            # Nobody signs it, so its bytes need not be the canonical ones.
            return cls(path, RunRecord.model_validate_json((path / "run.json").read_bytes()))
        except (OSError, ValidationError):
            raise ConfigError(
                "not_a_run",
                f"{path} is not a run directory with a readable run.json.",
                "Name one below runs/ in RAYCLOAK_HOME.",
            ) from None

    @property
    def base(self) -> Path:
        """The folder that the configuration's relative paths start from, wherever this process was started."""
        return Path(self.record.driver_base)

    def mark(self, status: Status) -> None:
        """Write the status; readers see the old record or the new one."""
        self.record = self.record.model_copy(update={"status": status})
        write_whole(self.path / "run.json", self.record.encode() + b"\n")

    def config(self) -> RunConfig:
        """Read the configuration that the run began with."""
        try:
            raw = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            raise ConfigError(
                "not_a_run", f"{self.path / 'config.yaml'} cannot be read.", "Restore it as the run wrote it."
            ) from None
        return parse_config(raw)

    def manifest(self) -> Manifest | None:
        """Read the run's manifest; None if it ended before one was made.

        Raises:
            ConfigError: ``former_format``; ``not_a_run`` if it cannot be read.
        """
        return self._kept(Manifest, "manifest.json")

    def write_manifest(self, manifest: Manifest) -> None:
        """Keep the manifest; it never changes afterwards."""
        write_whole(self.path / "manifest.json", manifest.encode() + b"\n")

    def released(self) -> tuple[Released, ...]:
        """Read what the run's measurements have released, in earlier executions too."""
        found = self._kept(ReleasedValues, "measurements.json")
        return found.releases if found else ()

    def keep_released(self, released: Released) -> None:
        """Add a release to ``measurements.json``; one that was made again takes its former place."""
        known = {(each.query, each.number): each for each in self.released()}
        known[released.query, released.number] = released
        values = ReleasedValues(releases=tuple(known.values()))
        write_whole(self.path / "measurements.json", values.encode() + b"\n")

    def watched(self) -> dict[int, float | None]:
        """Read the results that early stopping has seen, by finished steps, in earlier executions too."""
        found = self._kept(WatchedResults, "early_stopping.json")
        return {each.steps: each.value for each in found.results} if found else {}

    def keep_watched(self, results: Mapping[int, float | None]) -> None:
        """Keep the results that early stopping has seen; they are on disk when this returns."""
        values = WatchedResults(results=tuple(WatchedResult(steps=key, value=results[key]) for key in sorted(results)))
        write_whole(self.path / "early_stopping.json", values.encode() + b"\n")

    def saved(self) -> tuple[SavedState, ...]:
        """Read the states that were asked for, in earlier executions too."""
        found = self._kept(SavedStates, "saved_states.json")
        return found.states if found else ()

    def keep_saved(self, state: SavedState) -> None:
        """Add a state that was asked for; it is on disk when this returns."""
        states = SavedStates(states=(*self.saved(), state))
        write_whole(self.path / "saved_states.json", states.encode() + b"\n")

    def write_verdict(self, verdict: str) -> None:
        """Keep the verdict of the newest execution, one JSON object, as ``verdict.json``."""
        write_whole(self.path / "verdict.json", verdict.encode() + b"\n")

    def drop_verdict(self) -> None:
        """Remove the verdict of an execution before, which the newest one contradicts and could not replace."""
        (self.path / "verdict.json").unlink(missing_ok=True)

    def write_parameters(self, manifest: Manifest, parameters: np.ndarray, model_digest: bytes) -> None:
        """Keep the released parameters as ``parameters.safetensors``; they are on disk when this returns."""
        write_weights(self.path / "parameters.safetensors", manifest, parameters, model_digest)

    def _kept(self, cls: type[M], name: str) -> M | None:
        """Read a message that an execution wrote; None if none has."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            body = path.read_bytes().strip()
            return parse_stored(cls, body, str(path)) if "format" in cls.model_fields else parse(cls, body)
        except (OSError, ProtocolError):
            raise ConfigError("not_a_run", f"{path} cannot be read.", "Restore it as the run wrote it.") from None


def write_weights(path: Path, manifest: Manifest, parameters: np.ndarray, model_digest: bytes) -> None:
    """Write released parameters, float32[d], as the safetensors file ``path``; it is whole and on disk, or not there.

    Raises:
        OSError: it cannot be written.
    """
    tensors = manifest.computation.tensors
    parts = split_flat(parameters, tensors)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    save_file(
        {t.name: part.reshape(t.shape) for t, part in zip(tensors, parts, strict=True)},
        draft,
        metadata={"run_id": manifest.run_id, "model_digest": model_digest.hex()},
    )
    # Before the rename, so that the name never leads to content that is not on disk.
    sync(draft)
    draft.replace(path)


def unfinished_run(name: str) -> RunFolder:
    """Return the newest run of that name that can be resumed.

    Raises:
        ConfigError: ``nothing_to_resume``.
    """
    open_runs = [each for each in _folders(f"{name}-*") if each.record.name == name and each.record.status != "done"]
    if not open_runs:
        raise ConfigError(
            "nothing_to_resume",
            f"no run named '{name}' in {home.home_path() / 'runs'} was left unfinished.",
            "Start it without --resume.",
        )
    return open_runs[-1]


def newest_run(name: str) -> RunFolder | None:
    """Return the newest run of that name, done or not; None if there is none. Creates nothing."""
    return next((each for each in reversed(_folders(f"{name}-*")) if each.record.name == name), None)


def run_of(run_id: str) -> RunFolder | None:
    """Return the newest directory of a run that is not void; None if there is none. Creates nothing."""
    # Also another run's name may end so: the record decides.
    return next((each for each in reversed(_folders(f"*-{run_id}*")) if each.record.run_id == run_id), None)


def _folders(pattern: str) -> list[RunFolder]:
    """Return the runs that are not void, the oldest first."""
    paths = (home.home_path() / "runs").glob(pattern)
    folders = [RunFolder.open(path) for path in paths if (path / "run.json").exists()]
    # By its own record: a copied folder has new times on disk.
    return sorted((each for each in folders if each.record.status != "void"), key=lambda each: each.record.started_at)


@contextmanager
def run_lock(run_id: str) -> Iterator[None]:
    """Lock the run for this process; the operating system releases the lock however the process ends.

    Raises:
        RefusedError: ``run_in_progress`` if another process has it.
    """
    path = home.run_lock_file(run_id)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Not blocking: a second execution is refused at once instead of starting after the first one. A lock of the
        # open file, which `is_executing` can ask about without taking it, and which conflicts within a process too.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise _in_progress(run_id) from None
    try:
        yield
    finally:
        os.close(descriptor)


def is_executing(path: Path, run_id: str) -> bool | None:
    """Return whether a process of this machine executes the run in directory ``path``; None if that cannot be told.

    It cannot where the state folder's lock file is not beside the directory, as in a copy of it.

    Guarantee: asking takes no lock, so it keeps no execution from starting.
    """
    try:
        descriptor = os.open(home.lock_file_beside(path, run_id), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_RDLCK))
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def require_idle(folder: RunFolder) -> None:
    """Refuse a run that another process executes now, without its lock; RefusedError ``run_in_progress``."""
    if is_executing(folder.path, folder.record.run_id):
        raise _in_progress(folder.record.run_id)


def _in_progress(run_id: str) -> RefusedError:
    return RefusedError(
        "run_in_progress", f"another process is executing run {run_id}.", "Wait for it, or stop it first."
    )


_FLOCK = "hhqqi4x"
"""``struct flock`` of 64-bit Linux: type, whence, start, length, and a process id that is zero in these calls."""


def _lock(kind: int) -> bytes:
    """Return a lock of the whole file."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
