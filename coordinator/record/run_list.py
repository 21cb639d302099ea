"""The runs of a state folder in short, and the one that a user names.

Hides from which files the figures of a run come: its verdict once an execution has ended, its log before that. Neither
configuration nor manifest is needed, so runs of former formats are listed too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycloak.coordinator.config import home
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.record.run_course import RunCourse, count, number, text
from raycloak.coordinator.record.run_reader import EventTail, State, read_verdict, run_directories, state_of
from raycloak.metrics.errors import ConfigError

LAST = "last"
"""The name of the newest run, whatever it is called."""

_SHOWN = 8
"""Most candidates that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in short; None where a figure is not known, as before the members are admitted.

    Attributes:
        started_at: Unix time of its first execution.
        steps, planned_steps: committed steps, earlier executions included, of those that were planned.
        private: whether an epsilon is claimed at all.
        epsilon_charged: what its account had been charged, by all its runs, after the newest step or at its end.
        epsilon_cap: what its account may spend.
        epsilon_claimed: what the run claims however it ends.
        accuracy, loss: the newest on the public split.
        model_digest: of the newest parameters.
    """

    run_dir: Path
    run_id: str
    name: str
    started_at: float
    state: State
    steps: int
    planned_steps: int | None
    private: bool | None
    epsilon_charged: float | None
    epsilon_cap: float | None
    epsilon_claimed: float | None
    accuracy: float | None
    loss: float | None
    evidence_class: str | None
    account: str | None
    model_digest: str | None


@dataclass(frozen=True, slots=True)
class UnreadableRun:
    """A run directory that cannot be read, and why."""

    run_dir: Path
    problem: str


def list_runs() -> list[RunSummary | UnreadableRun]:
    """Return every run of this state folder, the newest last."""
    listed: list[RunSummary | UnreadableRun] = []
    for path in run_directories():
        try:
            listed.append(read_summary(path))
        except ConfigError as error:
            listed.append(UnreadableRun(path, f"{error.code}: {error.message}"))
    return listed


def read_summary(path: Path) -> RunSummary:
    """Read a run in short.

    Raises:
        ConfigError: ``not_a_run``; ``run_file`` if its verdict or its log cannot be read.
    """
    verdict = read_verdict(path)
    # A verdict spares the log, which has a line for each step.
    is_over = verdict is not None and not _goes_on(state_of(path))
    return summary_of(path, RunCourse() if is_over else RunCourse.of(EventTail(path).read()), verdict)


def summary_of(path: Path, course: RunCourse, verdict: Mapping[str, Any] | None) -> RunSummary:
    """Return a run in short, from the course that its log tells of or its verdict; ConfigError ``not_a_run``."""
    record, state = RunFolder.open(path).record, state_of(path)
    # The verdict of a run that goes on is of an execution before.
    figures = _of_log(course) if verdict is None or (_goes_on(state) and course.executions) else _of_verdict(verdict)
    return RunSummary(
        run_dir=path, run_id=record.run_id, name=record.name, started_at=record.started_at, state=state, **figures
    )


def _goes_on(state: State) -> bool:
    return state in ("running", "killed", "unknown")


def _of_verdict(verdict: Mapping[str, Any]) -> dict[str, Any]:
    private = verdict.get("private")
    return {
        "steps": count(verdict, "steps") or 0,
        "planned_steps": count(verdict, "planned_steps"),
        "private": private if isinstance(private, bool) else None,
        "epsilon_charged": number(verdict, "privacy_epsilon_charged"),
        "epsilon_cap": number(verdict, "epsilon_cap"),
        "epsilon_claimed": number(verdict, "privacy_epsilon"),
        "accuracy": number(verdict, "evaluation_accuracy"),
        "loss": number(verdict, "evaluation_loss"),
        "evidence_class": text(verdict, "evidence_class"),
        "account": text(verdict, "account"),
        "model_digest": text(verdict, "model_digest"),
    }


def _of_log(course: RunCourse) -> dict[str, Any]:
    quality = course.quality.last[1] if course.quality.last else None
    return {
        "steps": course.steps,
        "planned_steps": course.planned_steps,
        "private": course.private,
        "epsilon_charged": course.epsilon.last[1] if course.epsilon.last else None,
        "epsilon_cap": course.epsilon_cap,
        "epsilon_claimed": course.epsilon_planned,
        "accuracy": quality if course.metric == "accuracy" else None,
        "loss": quality if course.metric == "loss" else None,
        "evidence_class": course.evidence_class,
        "account": course.account,
        "model_digest": course.model_digest,
    }


def find_run(named: str) -> Path:
    """Return the run directory that a user names.

    Args:
        named: a run directory; ``last``, the newest run; the name of a run; or the beginning of a run id or of the
            directory's name. A name goes before a beginning.

    Raises:
        ConfigError: ``run_unknown``, ``not_a_run`` for a folder that is none, or ``run_ambiguous`` with the candidates.
    """
    if "/" in named or (Path(named) / "run.json").exists():
        return RunFolder.open(Path(named)).path.absolute()
    paths = run_directories()
    if named == LAST and paths:
        return paths[-1]
    found = [path for path in paths if path.name == named]
    if named and not found:
        known = [(path, *_names(path)) for path in paths]
        found = [path for path, name, _ in known if name == named] or [
            path for path, _, run_id in known if path.name.startswith(named) or run_id.startswith(named)
        ]
    if named and not found and Path(named).is_dir():
        # It is no run's, and the error says so of the folder: that is what was meant.
        return RunFolder.open(Path(named)).path.absolute()
    if not found:
        raise ConfigError(
            "run_unknown",
            f"no run in {home.home_path() / 'runs'} is called '{named}'.",
            "Name one of: raycloak runs list",
        )
    if len(found) > 1:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        candidates = ", ".join(path.name for path in found[-_SHOWN:])
        raise ConfigError(
            "run_ambiguous",
            f"'{named}' is {len(found)} runs: {candidates}{more}.",
            "Give more of the id, or 'last' for the newest run of all.",
        )
    return found[0]


def _names(path: Path) -> tuple[str, str]:
    """Return name and id of a run; empty if its record cannot be read."""
    try:
        record = RunFolder.open(path).record
    except ConfigError:
        return "", ""
    return record.name, record.run_id
