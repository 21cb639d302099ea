"""The runs of a state folder as tables for a person, which fit the width of the terminal."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from raycloak.coordinator.console.figures import epsilon_text, size_text, value_text
from raycloak.coordinator.console.tables import columns_table, fields_table
from raycloak.coordinator.record.run_course import RunCourse
from raycloak.coordinator.record.run_list import RunSummary, UnreadableRun

if TYPE_CHECKING:
    from raycloak.coordinator.record.run_comparison import Comparison

WIDE = 120
"""Columns from which the list has the account and the evidence of each run."""

NONE = "–"

STATE_STYLES = {"running": "cyan", "done": "green", "killed": "red", "failed": "red", "stopped": "magenta"}
"""Of the sixteen colours that a terminal's own theme keeps readable, on dark and on light."""

STATE_NOTES = {
    "running": "running",
    "killed": "killed: no process executes it; raycloak run CONFIG --resume finishes it",
    "unknown": "unknown: it is not in its state folder, so nobody can tell whether a process executes it",
    "stopped": "stopped: raycloak run CONFIG --resume finishes it",
    "failed": "failed: raycloak run CONFIG --resume tries again",
    "void": "void: it ended before anything was charged, or was discarded",
    "done": "done",
}


class RunsTable:
    """The list of runs; a narrow terminal gets the columns without which no run can be told from another."""

    def __init__(self, runs: Sequence[RunSummary | UnreadableRun], folder: Path, now: float) -> None:
        self._runs = [each for each in runs if isinstance(each, RunSummary)]
        self._unreadable = [each for each in runs if isinstance(each, UnreadableRun)]
        self._folder = folder
        self._now = now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, and below it what is the same for all runs."""
        if not self._runs and not self._unreadable:
            yield Text(f"No such run in {self._folder}.")
            return
        if self._runs:
            wide = options.max_width >= WIDE
            yield self._table(wide)
            yield Text(f"Directories: {self._folder}/NAME-ID", style="dim")
            if not wide:
                found = Counter(evidence_class_text(each.evidence_class) for each in self._runs)
                yield Text(f"Evidence: {', '.join(f'{times} {name}' for name, times in found.items())}", style="dim")
        for each in self._unreadable:
            yield Text(f"cannot be read: {each.run_dir}: {each.problem}", style="red")

    def _table(self, wide: bool) -> Table:
        table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), header_style="bold", pad_edge=False)
        # Rich folds the widest columns alike, and a name is read more often than an account.
        longest = max(len(run.name) for run in self._runs)
        table.add_column("name", overflow="fold", min_width=min(longest, 24 if wide else 12))
        for header in ("id", "started" if wide else "age", "status"):
            table.add_column(header, no_wrap=True)
        for header in ("steps", "ε charged\n/cap", "ε\nclaimed", "result"):
            table.add_column(header, justify="right", no_wrap=True)
        if wide:
            table.add_column("evidence", no_wrap=True)
            table.add_column("account", overflow="fold", min_width=8)
        for run in self._runs:
            cells: list[str | Text] = [
                run.name,
                run.run_id[:8],
                time_text(run.started_at) if wide else age_text(self._now - run.started_at),
                state_text(run.state),
                steps_text(run),
                budget_text(run),
                claim_text(run),
                result_text(run.accuracy, run.loss),
            ]
            if wide:
                own = run.account == f"run-{run.run_id}"
                cells += [evidence_class_text(run.evidence_class), "its own" if own else run.account or NONE]
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
        return table


def state_text(state: str) -> Text:
    """Return a state in its colour."""
    return Text(state, style=STATE_STYLES.get(state, ""))


def steps_text(run: RunSummary) -> str:
    """Return the steps done of those planned."""
    return f"{run.steps}/{run.planned_steps or '?'}"


def budget_text(run: RunSummary) -> str:
    """Return what the account was charged by all its runs, of its cap: the run's own claim may be less."""
    if run.private is False:
        return "NOT PRIVATE"
    charged = NONE if run.epsilon_charged is None else epsilon_text(run.epsilon_charged)
    return f"{charged}/{NONE if run.epsilon_cap is None else f'{run.epsilon_cap:g}'}"


def claim_text(run: RunSummary) -> str:
    """Return what the run claims."""
    return NONE if run.private is False or run.epsilon_claimed is None else epsilon_text(run.epsilon_claimed)


def result_text(accuracy: float | None, loss: float | None) -> str:
    """Return the accuracy, or the loss in its place."""
    if accuracy is not None:
        return f"{accuracy:.1%}"
    return NONE if loss is None else f"loss {loss:.4g}"


def evidence_class_text(evidence_class: str | None) -> str:
    """Return the class of evidence; the simulated one stands out."""
    if evidence_class is None:
        return NONE
    return evidence_class.replace("simulated", "SIMULATED")


def time_text(time: float) -> str:
    """Return a time of this machine's zone."""
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M")


def age_text(seconds: float) -> str:
    """Return how long ago something was, in one unit."""
    for unit, scale in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= scale:
            return f"{int(seconds // scale)} {unit}"
    return f"{max(0, int(seconds))} s"


def incident_lines(course: RunCourse) -> list[str]:
    """Return the newest incidents, each with its time."""
    return [f"{datetime.fromtimestamp(each.time).astimezone():%H:%M:%S} {each.says}" for each in course.incidents]


def run_view(facts: Mapping[str, Any], course: RunCourse) -> Group:
    """Return one run in full, from the facts that `raycloak runs show` prints as JSON."""
    tables = [fields_table("Run", _run_rows(facts, course))]
    if facts["manifest"]:
        tables.append(fields_table("Manifest", _manifest_rows(facts["manifest"])))
    if facts["verdict"]:
        tables.append(fields_table("Verdict of the newest execution that ended", _verdict_rows(facts["verdict"])))
    if facts["measurements"]:
        rows = []
        for each in facts["measurements"]:
            deviations, query = _part(each, "deviation"), str(each.get("query")).replace("_", " ")
            for name, value in _part(each, "values").items():
                what, noise = f"{query}: {name.replace('_', ' ')}", value_text(deviations.get(name))
                rows.append((what, str(each.get("after")), value_text(value), noise))
        headers = ("measurement", "after step", "value", "± noise (standard deviation)")
        tables.append(columns_table("Measurements", headers, rows))
    if course.incidents:
        tables.append(fields_table("Incidents", [(line[:8], line[9:]) for line in incident_lines(course)]))
    return Group(*tables)


def _run_rows(facts: Mapping[str, Any], course: RunCourse) -> list[tuple[str, str]]:
    steps = f"{facts['steps']} of {facts['planned_steps'] or '?'}"
    steps += f", {facts['repeated_steps']} computed again" if facts["repeated_steps"] else ""
    pace = facts["seconds_per_step"]
    counts = [
        *([f"{course.executions - 1} resumes"] if course.executions > 1 else []),
        *(f"{times} left ({code})" for code, times in course.departures.items()),
        *([f"{course.joins} joined"] if course.joins else []),
        *(f"{role} started again {times} times" for role, times in course.restarts.items()),
        *([f"{course.retried} attempts repeated"] if course.retried else []),
    ]
    rows = [
        ("name", facts["name"]),
        ("id", facts["run_id"]),
        ("status", STATE_NOTES[facts["state"]]),
        ("started", time_text(facts["started_at"])),
        ("executions", str(facts["executions"] or NONE)),
        ("steps", steps),
        ("pace", NONE if pace is None else f"{value_text(pace)} s per step, newest steps"),
        ("result", result_text(facts["accuracy"], facts["loss"])),
        ("evidence", evidence_class_text(facts["evidence_class"])),
        ("account", facts["account"] or NONE),
        ("disturbed by", ", ".join(counts) or "nothing"),
        ("directory", str(facts["run_dir"])),
        ("config.yaml", f"SHA-256 {facts['config_digest']}" if facts["config_digest"] else NONE),
        ("manifest", facts["manifest_digest"] or NONE),
        ("parameters", facts["model_digest"] or NONE),
    ]
    return [*rows, *(("cannot be read", problem) for problem in facts["problems"])]


_TERMS: Mapping[str, Sequence[str]] = {
    "": ("model", "loss", "dataset", "initial_parameters"),
    "mechanism": (
        "accountant",
        "noise_multiplier",
        "max_grad_norm",
        "sample_rate",
        "unit",
        "rows_per_unit",
        "copies",
        "num_examples",
        "max_participations",
        "steps",
        "virtual_workers",
        "dimension",
        "ring_bits",
    ),
    "optimizer": ("name", "learning_rate"),
    "numerics": ("device", "precision", "torch"),
}
"""The terms of a manifest that a reader looks for, by the part of its computation that states them."""


def _manifest_rows(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield `_TERMS`, as far as this version of a manifest has them."""
    computation = _part(manifest, "computation")
    for section, names in _TERMS.items():
        part = _part(computation, section) if section else computation
        for name in names:
            if name in part:
                yield "optimizer" if name == "name" else name.replace("_", " "), value_text(part[name])


def _part(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = tree.get(name)
    return part if isinstance(part, Mapping) else {}


_VERDICT_LABELS = {"privacy_epsilon_charged": "ε charged to the account", "epsilon_cap": "ε cap of the account"}
"""Beside the run's own ε, which may be less than what all runs of its account were charged."""


def _verdict_rows(verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return every field of a verdict, of whichever version, that says something."""
    rows: list[tuple[str, str]] = []
    for name, value in verdict.items():
        # An epsilon that a private run does not have is no guarantee, and says so.
        unbounded = value is None and name.startswith("privacy_epsilon") and verdict.get("private") is not False
        if name in ("measurements", "run_dir") or (value in (None, [], {}) and not unbounded):
            continue
        if name == "warnings" and isinstance(value, list):
            rows += [("warning", str(each)) for each in value]
        else:
            plain = name.removeprefix("privacy_").replace("epsilon", "ε").replace("_", " ")
            rows.append((_VERDICT_LABELS.get(name, plain), _shown(name, value)))
    return rows


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_shown(f'{name} {key}', each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(_shown(name, each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "epsilon" in name and (value is None or isinstance(value, float)):
        return epsilon_text(value)
    if name == "evidence_class":
        return evidence_class_text(value)
    return size_text(value) if name == "masked_bytes" and isinstance(value, int) else value_text(value)


def comparison_view(comparison: "Comparison") -> Group:
    """Return the fields that differ, the results, and what may not be compared."""
    heads = ("", *(f"{run.summary.name}\n{run.summary.run_id[:8]}" for run in comparison.runs))
    parts: list[Table | Text] = [Text("Configuration: no field differs.")]
    if comparison.differing:
        rows = (
            (name, *(NONE if value is None else str(value) for value in each))
            for name, each in comparison.differing.items()
        )
        parts = [columns_table("Configuration: the fields that differ", heads, rows)]
    parts += [columns_table("Results", heads, _result_rows(comparison)), Text(bytes_text(comparison), style="bold")]
    parts += [Text(f"- {caution}") for caution in comparison.cautions]
    return Group(*parts)


def bytes_text(comparison: "Comparison") -> str:
    """Return whether the runs are the same bytes, and up to which step."""
    steps = comparison.same_steps
    upto = "" if not steps else f" Their first {steps} steps gave the same bytes."
    match comparison.same_bytes:
        case True:
            return "The parameters are the same bytes."
        case False:
            return f"The parameters are not the same bytes.{upto}"
    return f"Not every run has parameters yet.{upto}"


def _result_rows(comparison: "Comparison") -> list[tuple[str, ...]]:
    runs, summaries = comparison.runs, [run.summary for run in comparison.runs]
    courses = [run.course for run in runs]
    incidents = (
        f"{sum(course.departures.values())} / {course.joins} / {sum(course.restarts.values())}" for course in courses
    )
    return [
        ("status", *(run.state for run in summaries)),
        ("started", *(time_text(run.started_at) for run in summaries)),
        ("steps", *map(steps_text, summaries)),
        ("result", *(result_text(run.accuracy, run.loss) for run in summaries)),
        ("ε charged/cap", *map(budget_text, summaries)),
        ("ε claimed", *map(claim_text, summaries)),
        ("δ", *(NONE if run.delta is None else f"{run.delta:g}" for run in runs)),
        ("account", *(run.account or NONE for run in summaries)),
        ("s per step", *(value_text(run.seconds_per_step) or NONE for run in runs)),
        ("evidence", *(evidence_class_text(run.evidence_class) for run in summaries)),
        ("left / joined / restarts", *incidents),
        ("parameters", *((run.model_digest or NONE)[:16] for run in summaries)),
    ]
