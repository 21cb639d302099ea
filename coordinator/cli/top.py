"""The command ``raycloak top``: a run's picture, renewed while it goes on. It only reads files of the run directory."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloak.coordinator.cli.options import RunName
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from raycloak.coordinator.cli.views.top import TopSnapshot

EVERY_S = 0.5
"""Seconds between two looks: an eye reads no faster, and a look costs a millisecond."""


def top_command(output: Output, run: RunName) -> None:
    """Watch a run: ε against its plan, accuracy, members, phase times, rate and time left; q ends. Reads files only."""
    from raycloak.coordinator.cli.views.top import TopView
    from raycloak.coordinator.record.run_list import find_run

    watch = RunWatch(find_run(run))
    snapshot = watch.look()
    if output.terminal is not None and snapshot.is_live:
        snapshot = _live(output.terminal, watch, snapshot)
    output.result(facts(snapshot), TopView(snapshot))


def _live(console: "Console", watch: "RunWatch", snapshot: "TopSnapshot") -> "TopSnapshot":
    """Show the run until it is over or the user has seen enough; return the newest snapshot."""
    from rich.live import Live

    from raycloak.coordinator.cli.views.top import TopView

    def picture(of: "TopSnapshot") -> TopView:
        return TopView(of, "q ends")

    live = Live(picture(snapshot), console=console, screen=True, auto_refresh=False)
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
            live.update(picture(snapshot), refresh=True)
    return snapshot


class RunWatch:
    """A reader of one run, which reads only what was added since its last look."""

    def __init__(self, path: Path) -> None:
        from raycloak.coordinator.record.run_course import RunCourse
        from raycloak.coordinator.record.run_reader import EventTail

        self._path = path
        self._tail = EventTail(path)
        self._course = RunCourse()
        self._config: Mapping[str, Any] | None = None

    def look(self) -> "TopSnapshot":
        """Return the run as it is now.

        Raises:
            ConfigError: ``not_a_run`` or ``run_file``.
        """
        from raycloak.coordinator.cli.views.top import TopSnapshot
        from raycloak.coordinator.record.folder import RunFolder
        from raycloak.coordinator.record.run_reader import read_written_config, state_of

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


def facts(snapshot: "TopSnapshot") -> dict[str, Any]:
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
