"""The live progress of a command, from its first second: a bar on a terminal, and a line every few seconds elsewhere.

The start has phases, each shown with how long it takes. Then every step shows its rate, the time that is left, and the
budget. A log gets a line at every change of phase, at the first step, and every few seconds in between, also while
nothing is finished. :func:`waiting` is for commands that have one phase alone, such as a plan.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.text import Text

from raycloak.coordinator.console.figures import epsilon_text

# A start that waits for libraries shows that it does, so nothing heavy is imported before it.
if TYPE_CHECKING:
    from raycloak.coordinator.training.reporting import StepReport

EVERY_S = 10.0
"""Seconds between two lines of progress where the output is not a terminal."""

_RATED = 20
"""Newest steps that the rate is taken over: it follows a cluster that grows, and does not jump with one step."""


def status_line(report: "StepReport") -> str:
    """Return budget, accuracy and workers in one line."""
    parts = ["NOT PRIVATE" if report.epsilon is None else f"ε {epsilon_text(report.epsilon)}"]
    if report.epsilon is not None and report.epsilon_cap is not None:
        parts[0] += f" of {report.epsilon_cap:g} charged"
    if report.epsilon is not None and report.epsilon_planned is not None:
        parts[0] += f" (this run's plan {epsilon_text(report.epsilon_planned)})"
    if not report.exact:
        parts.append("NOT EXACT")
    if report.evaluation_accuracy is not None:
        parts.append(f"accuracy {report.evaluation_accuracy:.1%}")
    if report.evaluation_loss is not None:
        parts.append(f"loss {report.evaluation_loss:.6g}")
    parts += [f"{name} {value:.6g}" for name, value in report.evaluation_metrics.items()]
    parts.append(f"{report.workers} worker{'' if report.workers == 1 else 's'}")
    return " · ".join(parts)


def rate_text(steps_per_s: float, steps_left: int) -> str:
    """Return the rate of steps, and how long those that are left take at it."""
    rate, left = pace_text(steps_per_s), round(steps_left / steps_per_s)
    return rate if not left else f"{rate} · {duration_text(left)} left"


def pace_text(steps_per_s: float) -> str:
    """Return the rate of steps, or its inverse where a step takes longer than a second."""
    return f"{steps_per_s:.1f} steps/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.1f} s/step"


def duration_text(seconds: int) -> str:
    """Return ``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def waiting(console: Console, what: str, every_s: float = EVERY_S) -> Iterator[None]:
    """Show that a command works on ``what``: at once on a terminal, elsewhere by a line every few seconds.

    Nothing of it stays on a terminal, and a command that is quick leaves none in a log either.
    """
    if console.is_terminal:
        spinner = Spinner("dots", Text(what))
        with Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield
        return
    over, began = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(every_s):
            text = f"{what}, for {time.monotonic() - began:.1f} s"
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=say, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Bar(Progress):
    """A bar, and the status below it, which folds in a narrow terminal. Beside the bar it was cut."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["status"]) for task in self.tasks)


class ProgressDisplay:
    """A context manager that is told each phase, and called with each :class:`StepReport`.

    Args:
        every_s: seconds between two lines where the console is not a terminal.
        clock: in seconds; it only goes forward.
    """

    def __init__(
        self, console: Console, name: str, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._name = name
        self._every_s = every_s
        self._clock = clock
        self._began = clock()
        self._phase = ("starting", self._began)
        self._phases: list[str] = []
        self._report: StepReport | None = None
        # When the newest steps ended, and with how many steps done.
        self._ends: list[tuple[float, int]] = []
        self._over = threading.Event()
        # The thread of lines and the one that trains show one state.
        self._lock = threading.Lock()
        self._said_at = self._began
        self._beat = threading.Thread(target=self._keep_alive, name="progress", daemon=True)
        self._bar = _Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(name, total=None, status="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        if not self._console.is_terminal:
            self._beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._beat.is_alive():
            self._beat.join()
        self._bar.stop()

    def phase(self, what: str) -> None:
        """Show that another phase begins, and how long the one before it took."""
        with self._lock:
            now = self._clock()
            before, since = self._phase
            self._phase = what, now
            took = f"{before} {now - since:.1f} s"
            self._phases.append(took)
            if self._console.is_terminal:
                self._bar.update(self._task, status=what)
            # The display's own phase is the first, and takes no time.
            self._say(f"{what} (after {took})" if len(self._phases) > 1 else what, now)

    def __call__(self, report: "StepReport") -> None:
        """Show ``report``; what was measured stays visible until it is measured again."""
        with self._lock:
            now = self._clock()
            first = self._report is None
            if self._report is None:
                # The first step is measured from where the phase of training began.
                self._ends.append((self._phase[1], report.step - 1))
                # The times of the start's phases stay above the bar; a log has them already.
                if self._console.is_terminal and len(self._phases) > 1:
                    started = f"started in {duration_text(round(self._phase[1] - self._began))}"
                    self._console.print(f"{started}: {' · '.join(self._phases[1:])}", markup=False, highlight=False)
            elif report.evaluation_accuracy is None and report.evaluation_loss is None:
                measured, own = self._report, self._report.evaluation_metrics
                accuracy, loss = measured.evaluation_accuracy, measured.evaluation_loss
                report = replace(report, evaluation_accuracy=accuracy, evaluation_loss=loss, evaluation_metrics=own)
            self._report = report
            self._ends = [*self._ends, (now, report.step)][-_RATED - 1 :]
            if self._console.is_terminal:
                self._bar.update(self._task, completed=report.step, total=report.steps, status=self._status(report))
            elif first or report.step == report.steps or now - self._said_at >= self._every_s:
                self._say(self._step_line(report), now)

    def _keep_alive(self) -> None:
        """Say where the run is whenever nothing was said for a while; ends with the display."""
        while not self._over.wait(max(0.05, self._said_at + self._every_s - self._clock())):
            with self._lock:
                now = self._clock()
                if now - self._said_at < self._every_s:
                    continue
                what, since = self._phase
                if self._report is None or since > self._ends[-1][0] or self._report.step == self._report.steps:
                    self._say(f"{what}, for {now - since:.1f} s", now)
                else:
                    self._say(self._step_line(self._report), now)

    def _step_line(self, report: "StepReport") -> str:
        return f"step {report.step} of {report.steps} · {self._status(report)}"

    def _status(self, report: "StepReport") -> str:
        (first, before), (last, done) = self._ends[0], self._ends[-1]
        if last <= first:
            return status_line(report)
        return f"{rate_text((done - before) / (last - first), report.steps - done)} · {status_line(report)}"

    def _say(self, text: str, now: float) -> None:
        """Print a line of a log, which begins with the run's name and its age."""
        self._said_at = now
        if not self._console.is_terminal:
            line = f"{self._name} {duration_text(round(now - self._began))} {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
