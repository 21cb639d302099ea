"""Progress shows the budget as it is spent; on a terminal as a bar, elsewhere as a few lines."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from raycloak.coordinator.cli.progress import ProgressDisplay, status_line
from raycloak.coordinator.training.reporting import StepReport

REPORT = StepReport(
    step=1,
    steps=200,
    epsilon=1.25,
    epsilon_cap=8.0,
    evaluation_accuracy=None,
    workers=3,
    parameter_digest="ab" * 32,
    seconds=0.1,
)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (REPORT, "ε 1.250 of 8 charged · 3 workers"),
        (replace(REPORT, evaluation_accuracy=0.931), "ε 1.250 of 8 charged · accuracy 93.1% · 3 workers"),
        (replace(REPORT, epsilon=None, epsilon_cap=None, workers=1), "NOT PRIVATE · 1 worker"),
        (replace(REPORT, exact=False), "ε 1.250 of 8 charged · NOT EXACT · 3 workers"),
        (replace(REPORT, evaluation_loss=0.25), "ε 1.250 of 8 charged · loss 0.25 · 3 workers"),
    ],
)
def test_the_status_line(report, line):
    assert status_line(report) == line


def shown(terminal, reports):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with ProgressDisplay(console, "digits") as display:
        for report in reports:
            display(report)
    return stream.getvalue()


def test_without_a_terminal_a_run_prints_ten_lines():
    lines = shown(False, [replace(REPORT, step=step) for step in range(1, 201)]).splitlines()
    assert len(lines) == 10
    assert lines[0] == "digits: step 20 of 200 · ε 1.250 of 8 charged · 3 workers"
    assert lines[-1].startswith("digits: step 200 of 200")


def test_the_last_accuracy_stays_visible():
    measured = replace(REPORT, step=1, steps=2, evaluation_accuracy=0.5)
    lines = shown(False, [measured, replace(measured, step=2, evaluation_accuracy=None)]).splitlines()
    assert "accuracy 50.0%" in lines[-1]


def test_the_last_loss_stays_visible():
    measured = replace(REPORT, step=1, steps=2, evaluation_loss=0.5)
    lines = shown(False, [measured, replace(measured, step=2, evaluation_loss=None)]).splitlines()
    assert "loss 0.5" in lines[-1]


def test_a_terminal_shows_a_bar_with_budget_accuracy_and_workers():
    text = shown(True, [replace(REPORT, step=200, evaluation_accuracy=0.94)])
    assert "200/200" in text
    assert "ε 1.250 of 8 charged · accuracy 94.0% · 3 workers" in text
