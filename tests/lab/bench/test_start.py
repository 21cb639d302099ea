"""The bench of a start: how it reads a run's progress, whose processor time it counts, and a program that ends."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.runs.progress import ProgressDisplay
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import RunFailedError
from raycloak_lab.bench.start import LIBRARIES, _progress, _role, bench_start

ROOT = Path(__file__).resolve().parents[3]
STEP = StepReport(1, 60, 1.0, 8.0, None, 3, "00", 0.1)


def test_phases_and_the_first_step_are_read_from_a_runs_progress():
    stream, now = io.StringIO(), [0.0]
    display = ProgressDisplay(Console(file=stream, width=160), "my run", clock=lambda: now[0])
    for phase in ("loading libraries", "connecting to Ray", "training"):
        display.phase(phase)
        now[0] += 1.0
    display(STEP)
    stream.write("my run 0:20 training, for 10.0 s\nmetrics: http://127.0.0.1:1/metrics\n")
    read = [_progress("my run", line) for line in stream.getvalue().splitlines(keepends=True)]
    assert read[:3] == ["loading libraries", "connecting to Ray", "training"]
    assert read[3].startswith("step 1 of 60")
    assert read[4:] == [None, None]


@pytest.mark.parametrize(
    ("title", "parent", "role"),
    [
        ("ray::LedgerActor", "raylet", "LedgerActor"),
        ("ray::TrainWorkerActor.step", "raylet", "TrainWorkerActor"),
        ("python -m a.vault", "ray::TrainWorkerActor.receive", "TrainWorkerActor"),
        ("ray::IDLE", "raylet", "ray"),
        ("/usr/bin/raylet --session", "python", "ray"),
    ],
)
def test_processor_time_is_counted_by_role(title, parent, role):
    assert _role(title, parent) == role
    assert role == "ray" or role in LIBRARIES


def test_a_run_that_is_refused_ends_the_bench():
    path, overrides = ROOT / "examples" / "digits.yaml", ("metrics.bind=203.0.113.1:1",)
    with pytest.raises(RunFailedError, match=r"before it had started: error: metrics_bind: ") as refused:
        bench_start(load_config(path, list(overrides)), path, overrides, 1)
    assert refused.value.code == "bench_start"
