"""The live picture of a run: its curves over the planned steps, where a step's time goes, members and incidents.

It fits a terminal of 80 columns and 24 rows, and grows with it. Each colour stands beside a word or a shape of its own.
"""

import math
import os
import select
import sys
import termios
import time
import tty
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from raycloak.coordinator.cli.views.runs import NONE, STATE_NOTES, evidence_class_text, incident_lines, state_text
from raycloak.coordinator.console.figures import epsilon_text, size_text
from raycloak.coordinator.record.folder import RunFolder, RunRecord
from raycloak.coordinator.record.run_course import Curve, RunCourse, StepTimes
from raycloak.coordinator.record.run_reader import EventTail, State, read_written_config, state_of
from raycloak.coordinator.runs.progress import duration_text, pace_text
from raycloak.metrics.errors import ConfigError

TEXT_COLUMNS = 34
"""Columns of the text beside a curve."""

TALL = 30
"""Rows of a terminal from which curves are three rows high."""

MOST_COLUMNS = 120
"""Columns beyond which the picture does not grow: an eye follows no longer line."""

LEGEND_COLUMNS = 64
"""Columns of a curve from which the names of all phases fit below it."""

EVERY_S = 0.5
"""Seconds between two looks: an eye reads no faster, and a look costs a millisecond."""

BLOCKS = " ▁▂▃▄▅▆▇█"

SILENT_S = 15.0
"""Seconds without a step that are worth a word, or ten steps if these are longer."""

PHASES = (("charge", "▓", "magenta"), ("compute", "█", "cyan"), ("reduce", "▒", "green"), ("other", "░", "dim"))
"""Parts of a step, each with its shape and its colour."""


@dataclass(frozen=True, slots=True)
class TopSnapshot:
    """A run at one moment.

    Attributes:
        config: its configuration as written; empty if it cannot be read.
        now: Unix time.
    """

    record: RunRecord
    state: State
    course: RunCourse
    config: Mapping[str, Any]
    now: float

    @property
    def planned_steps(self) -> int | None:
        """The steps of the run, by its configuration before its members are admitted."""
        configured = self.config.get("steps")
        return self.course.planned_steps or (configured if isinstance(configured, int) else None)

    @property
    def is_live(self) -> bool:
        """True if more may come: the picture of a run that is over does not change."""
        return self.state == "running"


class TopView:
    """The picture of a snapshot."""

    def __init__(self, snapshot: TopSnapshot, hint: str = "") -> None:
        self._it = snapshot
        self._course = snapshot.course
        self._hint = hint

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one panel."""
        width = min(options.max_width, MOST_COLUMNS)
        rows = 3 if options.size.height >= TALL else 1
        inner = width - 4
        parts: list[Table | Text] = [self._status(), self._figures(inner, rows)]
        if incidents := incident_lines(self._course)[-4 if rows == 1 else -8 :]:
            parts += [Text(""), Text("\n".join(incidents), no_wrap=True, overflow="ellipsis")]
        record = self._it.record
        title = Text.assemble((record.name, "bold"), f" · {record.run_id} · ", state_text(self._it.state))
        yield Panel(
            Group(*parts),
            box=ROUNDED,
            width=width,
            title=title,
            title_align="left",
            subtitle=self._hint or None,
            subtitle_align="right",
            padding=(0, 1),
        )

    def _status(self) -> Text:
        """Return one line on what the run does now, and the limits of what it claims."""
        course, it = self._course, self._it
        marks = [] if course.private is not False else ["NOT PRIVATE"]
        marks += [] if course.exact is not False else ["NOT EXACT"]
        marks += [] if course.evidence_class is None else [f"{evidence_class_text(course.evidence_class)} evidence"]
        text = Text(" · ".join([self._doing(), *marks]))
        silent, times = course.seconds_silent(it.now), course.times()
        patience = max(SILENT_S, 10 * times.whole) if times else SILENT_S
        if it.is_live and course.executions and silent is not None and silent > patience:
            text.append(f" · no step for {duration_text(round(silent))}", style="bold red")
        return text

    def _doing(self) -> str:
        course, it = self._course, self._it
        if not it.is_live:
            return STATE_NOTES[it.state]
        age = duration_text(max(0, round(it.now - it.record.started_at)))
        if not course.executions:
            return f"starting for {age}: no member is admitted yet"
        if course.executions == 1:
            return f"training, begun {age} ago"
        again = f", {course.repeated} steps computed again" if course.repeated else ""
        where = "" if course.resumed_at is None else f" from step {course.resumed_at}"
        return f"resumed{where}{again}, begun {age} ago"

    def _figures(self, width: int, rows: int) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, style="bold", width=8)
        graphic = max(10, width - 8 - TEXT_COLUMNS - 2)
        table.add_column(no_wrap=True, width=graphic)
        table.add_column(no_wrap=True, overflow="ellipsis", width=TEXT_COLUMNS)
        course, planned = self._course, self._it.planned_steps
        share = f" · {course.steps / planned:.0%}" if planned else ""
        steps = _lines([f"{course.steps} of {planned or '?'}{share}", self._left()], 2)
        shown = [
            ("steps", progress_bar(course.steps, planned, graphic), steps),
            *self._budget_row(planned, graphic, rows),
            *self._quality_row(planned, graphic, rows),
            *self._times_rows(graphic),
            ("members", *self._members(graphic)),
        ]
        for number, row in enumerate(shown):
            if rows > 1 and number:
                table.add_row()
            table.add_row(*row)
        return table

    def _left(self) -> str:
        if not self._it.is_live:
            return ""
        left = self._course.seconds_left(self._it.now)
        if self._course.steps and self._course.steps == self._it.planned_steps:
            return "writing the result"
        if left is None:
            return "time left: not known yet"
        end = datetime.fromtimestamp(self._it.now + left).astimezone()
        # Beyond a day the hour alone would mislead.
        until = f"{end:%H:%M:%S}" if left < 86_400 else f"{end:%Y-%m-%d %H:%M}"
        return f"{duration_text(round(left))} left, until {until}"

    def _budget_row(self, planned: int | None, width: int, rows: int) -> list[tuple[str, Text, Text]]:
        course = self._course
        if course.private is False or not course.epsilon.last:
            return []
        charged, plan, cap, rows_of_words = course.epsilon.last[1], course.epsilon_planned, course.epsilon_cap, rows
        # Beside the cap, and not the run's plan: other runs may have charged the account more than this one plans.
        lines = [f"{epsilon_text(charged)} charged" + ("" if cap is None else f" of the cap {cap:g}")]
        if course.account not in (None, f"run-{self._it.record.run_id}"):
            lines.append(f"to {course.account} by all its runs")
            rows_of_words = max(rows, 2)
        claim = None if plan is None else f"this run claims {epsilon_text(plan)}"
        delta = None if course.delta is None else f"δ {course.delta:g}"
        lines.append(", ".join(each for each in (claim, delta) if each))
        top = max(charged, (plan or 0.0) if cap is None else cap)
        picture = curve_text(course.epsilon, planned, course.steps, (width, rows), (0.0, top), "magenta")
        return [("ε", picture, _lines(lines, rows_of_words))]

    def _quality_row(self, planned: int | None, width: int, rows: int) -> list[tuple[str, Text, Text]]:
        course, curve = self._course, self._course.quality
        if not curve.last or not curve.least or not curve.most or course.metric is None:
            return []
        best = curve.most if course.metric == "accuracy" else curve.least
        is_share = course.metric == "accuracy"
        figures = (curve.last[1], best[1], curve.least[1])
        now, top, bottom = (f"{value:.1%}" if is_share else f"{value:.4g}" for value in figures)
        lines = [f"{now} at step {curve.last[0]}", f"best {top} at step {best[0]}", f"bottom is {bottom}, public split"]
        picture = curve_text(curve, planned, course.steps, (width, rows), (curve.least[1], curve.most[1]), "green")
        return [(course.metric, picture, _lines(lines, rows))]

    def _times_rows(self, width: int) -> list[tuple[str, Text, Text]]:
        times = self._course.times()
        if times is None:
            return []
        batch = _batch(self._it.config)
        rates = [pace_text(1 / times.whole)]
        rates += [f"{batch / times.whole:,.0f} examples/s"] if batch else []
        parts = [(name, getattr(times, name)) for name, _, _ in PHASES]
        legend = Text()
        for number, ((name, seconds), (_, shape, style)) in enumerate(zip(parts, PHASES, strict=True)):
            legend.append(shape, style=style)
            legend.append(f"{name} {seconds_text(seconds)}")
            # Four beside each other need some sixty columns.
            legend.append("\n" if number == 1 and width < LEGEND_COLUMNS else "  ")
        sent = [f"{size_text(round(times.masked_bytes / times.whole))}/s masked"] if times.masked_bytes else []
        # A step above a second is the rate already.
        sent += [f"{seconds_text(times.whole)} a step"] if times.whole < 1 else []
        words = Text("\n".join(" · ".join(each) for each in (rates, sent)))
        picture = phases_bar(times, width)
        return [("step", Text.assemble(picture, "\n", legend), words)]

    def _members(self, width: int) -> tuple[Text, Text]:
        course, configured = self._course, self._it.config.get("num_workers")
        workers = course.workers or 0
        wanted = max(workers, configured) if isinstance(configured, int) else workers
        # A square each, as far as they fit: above that the number says more.
        shown, missing = min(workers, width), max(0, min(wanted, width) - min(workers, width))
        picture = Text.assemble(("■" * shown, "cyan"), ("□" * missing, "red"))
        counts = [
            f"{sum(course.departures.values())} left" if course.departures else "",
            f"{course.joins} joined" if course.joins else "",
            f"{sum(course.restarts.values())} restarts" if course.restarts else "",
        ]
        virtual = "" if course.virtual_workers is None else f", {course.virtual_workers} virtual"
        words = [f"{workers or NONE} of {wanted or '?'} workers{virtual}", ", ".join(each for each in counts if each)]
        return picture, Text("\n".join(each for each in words if each))


def progress_bar(done: int, planned: int | None, width: int) -> Text:
    """Return a bar of ``width`` columns, filled as far as the steps are done."""
    filled = round(width * min(1.0, done / planned)) if planned else 0
    return Text.assemble(("━" * filled, "cyan"), ("─" * (width - filled), "dim"))


def phases_bar(times: StepTimes, width: int) -> Text:
    """Return a bar in which each phase has its share of a step."""
    seconds = [getattr(times, name) for name, _, _ in PHASES]
    total, bar, reached, drawn = sum(seconds) or 1.0, Text(), 0.0, 0
    for value, (_, shape, style) in zip(seconds, PHASES, strict=True):
        reached += value
        end = round(width * reached / total)
        bar.append(shape * (end - drawn), style=style)
        drawn = end
    return bar


def curve_text(
    curve: Curve, planned: int | None, done: int, size: tuple[int, int], span: tuple[float, float], style: str
) -> Text:
    """Return a curve over the planned steps, ``size`` columns and rows; the steps to come are dotted.

    Args:
        span: values at the bottom and at the top.
    """
    (width, rows), (low, high) = size, span
    steps = max(planned or 0, done, 1)
    reached = min(width, math.ceil(width * done / steps))
    points, levels = curve.points, []
    at = [step for step, _ in points]
    for column in range(reached):
        # The newest value that was known by then; none at first.
        known = bisect_right(at, (column + 1) * steps / width)
        share = (points[known - 1][1] - low) / (high - low) if known and high > low else 1.0
        levels.append(1 + round(min(1.0, max(0.0, share)) * (8 * rows - 1)) if known else 0)
    text = Text()
    for row in reversed(range(rows)):
        line = "".join(BLOCKS[min(8, max(0, level - 8 * row))] for level in levels)
        text.append(line, style=style)
        text.append(("·" if row == 0 else " ") * (width - reached), style="dim")
        text.append("\n" if row else "")
    return text


def _lines(lines: Sequence[str], rows: int) -> Text:
    return Text("\n".join([line for line in lines if line][:rows]))


def _batch(config: Mapping[str, Any]) -> float | None:
    """Return the expected examples of a step, as far as the configuration says it."""
    whole, share, workers = (
        config.get(name) for name in ("expected_batch_size", "batch_size_per_worker", "num_workers")
    )
    if isinstance(whole, int | float):
        return float(whole)
    return float(share * workers) if isinstance(share, int | float) and isinstance(workers, int) else None


def seconds_text(seconds: float) -> str:
    """Return a short time in its unit."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


class RunWatch:
    """A reader of one run, which reads only what was added since its last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = EventTail(path)
        self._course = RunCourse()
        self._config: Mapping[str, Any] | None = None

    def look(self) -> TopSnapshot:
        """Return the run as it is now.

        Raises:
            ConfigError: ``not_a_run`` or ``run_file``.
        """
        # Before the log: of a run that is over, the whole log is read then.
        state = state_of(self._path)
        for event in self._tail.read():
            self._course.take(event)
        if self._config is None:
            try:
                self._config = read_written_config(self._path).values
            except ConfigError:
                self._config = {}
        return TopSnapshot(RunFolder.open(self._path).record, state, self._course, self._config, time.time())


def live_picture(console: Console, watch: RunWatch, snapshot: TopSnapshot) -> TopSnapshot:
    """Show the run until it is over or the user has seen enough; return the newest snapshot."""
    live = Live(TopView(snapshot, "q ends"), console=console, screen=True, auto_refresh=False)
    with (
        # The run goes on without its watcher, so Ctrl-C is no failure of anything.
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        ExitStack() as stack,
    ):
        # First: Live itself gives no screen back if Ctrl-C comes while it shows its first picture.
        stack.callback(live.stop)
        live.start(refresh=True)
        while snapshot.is_live and not pressed(EVERY_S):
            snapshot = watch.look()
            live.update(TopView(snapshot, "q ends"), refresh=True)
    return snapshot


def facts(snapshot: TopSnapshot) -> dict[str, Any]:
    """Return a snapshot as `raycloak top --json` prints it."""
    course, times = snapshot.course, snapshot.course.times()
    return {
        "run_id": snapshot.record.run_id,
        "name": snapshot.record.name,
        "state": snapshot.state,
        "started_at": snapshot.record.started_at,
        "steps": course.steps,
        "planned_steps": snapshot.planned_steps,
        "epsilon_charged": course.epsilon.last[1] if course.epsilon.last else None,
        "epsilon_planned": course.epsilon_planned,
        "epsilon_cap": course.epsilon_cap,
        "metric": course.metric,
        "result": course.quality.last[1] if course.quality.last else None,
        "workers": course.workers,
        "steps_per_second": 1 / times.whole if times else None,
        "step_seconds": times.whole if times else None,
        "charge_seconds": times.charge if times else None,
        "compute_seconds": times.compute if times else None,
        "reduce_seconds": times.reduce if times else None,
        "seconds_left": course.seconds_left(snapshot.now) if snapshot.is_live else None,
    }


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits so many seconds at most, and returns whether q was pressed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return False
        # The descriptor and not its buffered file, which `select` cannot see into. Nothing is read of a closed one.
        typed = os.read(descriptor, 64)
        return not typed or b"q" in typed.lower()

    try:
        # One key at a time and unseen; Ctrl-C stays a signal.
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
