"""The base of loggers: from the reports of a run to numbers by name and step, the same for every tool.

Hides which name a value gets. A tool's own class opens its run, takes numbers and words, and closes. It gets only
reports and files of the run directory, all of which are public.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raycloak.coordinator.planning.first_look import require_library
from raycloak.coordinator.record.run_comparison import leaves
from raycloak.coordinator.training.callbacks import (
    Callback,
    CheckpointReport,
    EvaluationReport,
    MeasurementReport,
    RunEnded,
    RunStarted,
)
from raycloak.coordinator.training.reporting import MembershipReport, StepReport

FILES = ("config.yaml", "manifest.json", "measurements.json", "metrics.jsonl", "verdict.json")
"""The files of a run directory that say in public what was done; `WEIGHTS` is the released model."""

WEIGHTS = "parameters.safetensors"

_VERDICT = (
    "privacy_epsilon",
    "privacy_epsilon_if_stop_was_blind",
    "privacy_epsilon_one_worker",
    "privacy_epsilon_charged",
    "privacy_delta",
    "wall_seconds",
    "masked_bytes",
)
"""The numbers of a verdict that no step has shown."""


class Logger(Callback, ABC):
    """The base of loggers.

    Args:
        tool: as the extra that installs its library is called.

    Raises:
        ConfigError: ``logger_library`` if its library is not installed.
    """

    def __init__(self, tool: str) -> None:
        require_library(tool)
        self._step = 0
        self._departures = 0

    @abstractmethod
    def _open(self, started: RunStarted) -> None:
        """Open the tool's run, the same one that an earlier execution of this run opened."""

    @abstractmethod
    def _numbers(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers after so many finished steps."""

    @abstractmethod
    def _word(self, name: str, value: str) -> None:
        """Log a word about the run as a whole; the newest value of a name counts."""

    @abstractmethod
    def _close(self, ended: RunEnded, files: Sequence[Path], weights: Path | None) -> None:
        """Log what the run directory holds, and close the tool's run."""

    def on_run_begin(self, started: RunStarted) -> None:
        """Open the tool's run."""
        self._step, self._departures = started.finished_steps, 0
        self._open(started)

    def on_step_end(self, report: StepReport) -> None:
        """Log a step. Its evaluation was logged by then."""
        self._step = report.step
        self._log({"epsilon": report.epsilon, "workers": report.workers, "step_seconds": report.seconds}, report.step)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Log a result on the public split; the user's own metrics have ``evaluation_`` before their name."""
        own = {f"evaluation_{name}": value for name, value in report.metrics.items()}
        built_in = {f"evaluation_{name}": getattr(report, name) for name in ("accuracy", "loss", "f1")}
        self._log({**own, **built_in}, report.steps)

    def on_measurement(self, report: MeasurementReport) -> None:
        """Log a noised release, with the deviation of its noise beside each value."""
        prefix = f"measured_{report.query}_"
        values = {f"{prefix}{name}": value for name, value in report.values.items()}
        noise = {f"{prefix}{name}_noise_deviation": value for name, value in report.noise_deviation.items()}
        self._log({**values, **noise}, report.steps)

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Log which package is the newest."""
        self._word("checkpoint", f"step {report.steps}: {report.digest}")

    def on_membership(self, report: MembershipReport) -> None:
        """Log how many members this execution has lost or refused."""
        if report.change != "joined":
            self._departures += 1
            self._log({"departures": self._departures}, self._step)

    def on_run_end(self, ended: RunEnded) -> None:
        """Log the verdict and the files of the run directory."""
        verdict = ended.metrics or {}
        self._word("ending", ended.ending)
        if "model_digest" in verdict:
            self._word("model_digest", verdict["model_digest"])
        self._log({name: verdict.get(name) for name in _VERDICT}, int(verdict.get("steps", self._step)))
        weights = ended.run_dir / WEIGHTS
        files = [path for name in FILES if (path := ended.run_dir / name).exists()]
        self._close(ended, files, weights if weights.exists() else None)

    def _log(self, numbers: Mapping[str, float | None], step: int) -> None:
        known = {name: float(value) for name, value in numbers.items() if value is not None}
        if known:
            self._numbers(known, step)


def words_of(started: RunStarted) -> dict[str, str]:
    """Return the words that identify a run in a tool."""
    return {
        "run_id": started.run_id,
        "run_dir": str(started.run_dir),
        "account": started.account,
        "evidence_class": started.evidence_class,
    }


def settings_of(started: RunStarted) -> dict[str, Any]:
    """Return the settings of a run as one flat mapping, by dotted names: the configuration, and what its plan chose."""
    planned = {
        "plan.steps": started.steps,
        "plan.virtual_workers": started.virtual_workers,
        "plan.parameters": started.parameters,
        "plan.epsilon": started.epsilon_planned,
        "plan.epsilon_cap": started.epsilon_cap,
        "plan.delta": started.delta,
        "plan.noise_multiplier": started.noise_multiplier,
        "plan.sample_rate": started.sample_rate,
    }
    settings = {**dict(leaves(started.config)), **planned}
    return {name: value for name, value in settings.items() if value not in (None, {})}
