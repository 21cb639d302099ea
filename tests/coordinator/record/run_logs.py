"""Run directories whose events a test writes itself, as a run writes them."""

from pathlib import Path

from raycloak.coordinator.record.folder import RunFolder, run_lock
from raycloak.metrics.events import EventWriter
from tests.protocol import config


class Moments:
    """A clock of events that only the test moves."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class LoggedRun:
    """A run directory and its log; ``time`` is the clock of its events."""

    def __init__(self, name: str = "run", run_id: str = "ab" * 8, **fields) -> None:
        self.time = Moments()
        self.folder = RunFolder.create(config(name=name, **fields), run_id, "/base", None)
        self.path: Path = self.folder.path
        # As an execution leaves its lock that was killed.
        with run_lock(run_id):
            pass

    def write(self, event: str, **fields) -> None:
        with EventWriter(self.path / "metrics.jsonl", self.time) as events:
            events.write(event, **fields)

    def admit(self, steps: int = 100, **fields) -> None:
        """Begin an execution."""
        terms = {
            "account": f"run-{self.folder.record.run_id}",
            "evidence_class": "simulated",
            "privacy": "private",
            "exactness": "exact",
            "steps_planned": steps,
            "virtual_workers": 8,
            "epsilon_planned": 4.0,
            "epsilon_cap": 8.0,
            "delta": 1e-5,
            "workers": 3,
        }
        self.write("admitted", **{**terms, **fields})

    def step(self, step: int, after: float = 1.0, **fields) -> None:
        """Commit a step; it takes ``after`` seconds, half of it to compute."""
        self.time.now += after
        told = {
            "model_digest": f"{step:064x}",
            "epsilon": 0.04 * (step + 1),
            "workers": 3,
            "attempts": 1,
            "seconds": after,
            "charge_seconds": 0.1 * after,
            "compute_seconds": 0.5 * after,
            "reduce_seconds": 0.2 * after,
            "masked_bytes": 1000,
        }
        self.write("step", step=step, **{**told, **fields})
