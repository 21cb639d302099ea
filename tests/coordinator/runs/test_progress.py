"""Progress shows where a run is from its first second; on a terminal as a bar, elsewhere as a line now and then."""

import io
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from raycloak.coordinator.runs.progress import ProgressDisplay, duration_text, rate_text, status_line, waiting
from raycloak.coordinator.training.reporting import StepReport

REPORT = StepReport(
    step=1,
    steps=200,
    epsilon=1.25,
    epsilon_cap=8.0,
    evaluation_accuracy=None,
    workers=3,
    model_digest="ab" * 32,
    seconds=0.1,
    epsilon_planned=7.9802,
)
STATUS = "ε 1.250 of 8 charged (this run's plan 7.981)"
DEADLINE_S = 60


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (REPORT, f"{STATUS} · 3 workers"),
        (replace(REPORT, epsilon_planned=None), "ε 1.250 of 8 charged · 3 workers"),
        # Rounded up, as in the plan and the verdict.
        (replace(REPORT, epsilon=1.2501), "ε 1.251 of 8 charged (this run's plan 7.981) · 3 workers"),
        (replace(REPORT, evaluation_accuracy=0.931), f"{STATUS} · accuracy 93.1% · 3 workers"),
        (replace(REPORT, epsilon=None, epsilon_cap=None, epsilon_planned=None, workers=1), "NOT PRIVATE · 1 worker"),
        (replace(REPORT, exact=False), f"{STATUS} · NOT EXACT · 3 workers"),
        (replace(REPORT, evaluation_loss=0.25), f"{STATUS} · loss 0.25 · 3 workers"),
    ],
)
def test_the_status_line(report, line):
    assert status_line(report) == line


@pytest.mark.parametrize(
    ("steps_per_s", "left", "text"),
    [
        (4.0, 40, "4.0 steps/s · 0:10 left"),
        (0.5, 100, "2.0 s/step · 3:20 left"),
        (0.01, 400, "100.0 s/step · 11:06:40 left"),
        (2.0, 0, "2.0 steps/s"),
    ],
)
def test_the_rate_and_what_is_left(steps_per_s, left, text):
    assert rate_text(steps_per_s, left) == text
    assert duration_text(59) == "0:59"


class Watched:
    """A display whose clock only the test moves, and what it printed."""

    def __init__(self, terminal=False, every_s=10.0, width=160):
        self.now, self._stream = 100.0, io.StringIO()
        console = Console(file=self._stream, force_terminal=terminal, width=width)
        self.display = ProgressDisplay(console, "digits", every_s, lambda: self.now)

    def phase(self, what, after=0.0):
        self.now += after
        self.display.phase(what)

    def step(self, step, after, **changes):
        self.now += after
        self.display(replace(REPORT, step=step, **changes))

    @property
    def text(self):
        return self._stream.getvalue()

    @property
    def lines(self):
        return self.text.splitlines()


def test_a_log_has_each_phase_of_the_start_and_what_it_took():
    watched = Watched()
    watched.phase("loading libraries")
    watched.phase("connecting to Ray", after=5.25)
    watched.phase("training", after=60.5)
    assert watched.lines == [
        "digits 0:00 loading libraries",
        "digits 0:05 connecting to Ray (after loading libraries 5.2 s)",
        "digits 1:06 training (after connecting to Ray 60.5 s)",
    ]


def test_a_log_gets_a_line_of_the_first_step_then_every_ten_seconds_and_at_the_end():
    watched = Watched()
    watched.phase("training")
    for step in range(1, 201):
        watched.step(step, after=0.5)
    assert watched.lines[1].startswith("digits 0:00 step 1 of 200")
    assert watched.lines[2] == f"digits 0:10 step 21 of 200 · 2.0 steps/s · 1:30 left · {STATUS} · 3 workers"
    assert watched.lines[-1] == f"digits 1:40 step 200 of 200 · 2.0 steps/s · {STATUS} · 3 workers"
    assert len(watched.lines) == 1 + 1 + 10


def test_the_rate_is_of_the_newest_steps():
    watched = Watched()
    watched.phase("training")
    for step in range(1, 51):
        watched.step(step, after=10.0)
    for step in range(51, 101):
        watched.step(step, after=1.0)
    assert "1.0 steps/s · 1:40 left" in watched.lines[-1]


@pytest.mark.parametrize("begun", [False, True])
def test_a_log_stays_alive_while_nothing_is_finished(begun):
    """A line comes from a thread of its own: the caller waits for a phase or a step and says nothing."""
    stream, said = io.StringIO(), threading.Event()
    stream.write = lambda text: said.set() if ("for " if not begun else "step 3 of 200") in text else None
    with ProgressDisplay(Console(file=stream, width=160), "digits", every_s=0.05) as display:
        display.phase("starting workers")
        if begun:
            display(replace(REPORT, step=3))
        assert said.wait(DEADLINE_S)
    assert not any(thread.name == "progress" and thread.is_alive() for thread in threading.enumerate())


def test_a_log_says_what_follows_a_stop_and_no_step_that_is_over():
    stream, said = io.StringIO(), threading.Event()
    stream.write = lambda text: said.set() if "writing the result, for " in text else None
    with ProgressDisplay(Console(file=stream, width=160), "digits", every_s=0.05) as display:
        display.phase("training")
        display(replace(REPORT, step=3))
        display.phase("writing the result")
        assert said.wait(DEADLINE_S)


def test_a_display_that_said_something_lately_says_nothing_more():
    watched = Watched(every_s=0.05)
    with watched.display:
        watched.phase("starting workers")
        # Time passes for the thread and not for the display.
        time.sleep(0.3)
    assert len(watched.lines) == 1


def test_the_last_accuracy_or_loss_stays_visible():
    for field, text in (("evaluation_accuracy", "accuracy 50.0%"), ("evaluation_loss", "loss 0.5")):
        watched = Watched()
        watched.step(1, after=1.0, steps=2, **{field: 0.5})
        watched.step(2, after=1.0, steps=2)
        assert text in watched.lines[-1]


def test_a_narrow_terminal_shows_all_of_bar_rate_budget_accuracy_and_workers():
    watched = Watched(terminal=True, width=60)
    with watched.display:
        watched.phase("loading libraries")
        watched.phase("training", after=5.0)
        watched.step(199, after=0.5)
        watched.step(200, after=0.5, evaluation_accuracy=0.94)
    assert "200/200" in watched.text
    assert f"2.0 steps/s · {STATUS} · accuracy 94.0% · 3 workers" in " ".join(watched.text.split())
    assert "started in 0:05: loading libraries 5.0 s" in watched.text
    assert "…" not in watched.text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_command_that_waits_says_so_and_one_that_is_quick_leaves_nothing(terminal):
    stream, said = io.StringIO(), threading.Event()
    stream.write = lambda text: said.set() if "reading all examples" in text else None
    with waiting(Console(file=stream, force_terminal=terminal), "reading all examples", every_s=0.05):
        assert said.wait(DEADLINE_S)
    quick = io.StringIO()
    with waiting(Console(file=quick, force_terminal=False), "reading all examples"):
        pass
    assert not quick.getvalue()
