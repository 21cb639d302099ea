"""The live progress of a run: one report per step, shown as a bar on a terminal and as plain lines elsewhere."""

from dataclasses import replace
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from raycloak.coordinator.training.reporting import StepReport

LINES_PER_RUN = 10
"""Lines of progress where the output is not a terminal, so that logs stay short."""


def status_line(report: StepReport) -> str:
    """Return budget, accuracy and workers in one line."""
    parts = ["NOT PRIVATE" if report.epsilon is None else f"ε {report.epsilon:.3f}"]
    if report.epsilon is not None and report.epsilon_cap is not None:
        parts[0] += f" of {report.epsilon_cap:g} charged"
    if not report.exact:
        parts.append("NOT EXACT")
    if report.evaluation_accuracy is not None:
        parts.append(f"accuracy {report.evaluation_accuracy:.1%}")
    if report.evaluation_loss is not None:
        parts.append(f"loss {report.evaluation_loss:.6g}")
    parts.append(f"{report.workers} worker{'' if report.workers == 1 else 's'}")
    return " · ".join(parts)


class ProgressDisplay:
    """A context manager that is called with each :class:`StepReport`."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self._measured: tuple[float | None, float | None] = None, None
        self._lines = 0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(name, total=None, status="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, report: StepReport) -> None:
        """Show ``report``; what was measured stays visible until it is measured again."""
        measured = report.evaluation_accuracy, report.evaluation_loss
        if measured != (None, None):
            self._measured = measured
        accuracy, loss = self._measured
        status = status_line(replace(report, evaluation_accuracy=accuracy, evaluation_loss=loss))
        if self._console.is_terminal:
            self._bar.update(self._task, completed=report.step, total=report.steps, status=status)
        elif report.step * LINES_PER_RUN // report.steps > self._lines:
            self._lines = report.step * LINES_PER_RUN // report.steps
            line = f"{self._name}: step {report.step} of {report.steps} · {status}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
