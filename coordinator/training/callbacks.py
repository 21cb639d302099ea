"""The user's own callbacks: what they may define, what they are told, and how they are found and checked.

Every field of a report is declared with its privacy class, and none is secret. A callback is in no manifest, because
nothing that it does changes a byte of the model. `coordinator/training/callback_caller.py` calls it.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raycloak.coordinator.training.reporting import MembershipReport, StepReport
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.reports import Fact, Release, report
from raycloak.workers.inputs.user_code import resolve, told


@report
class RunStarted:
    """The public facts of a run whose members are admitted; this execution has charged nothing yet.

    Attributes:
        run_dir: the run directory.
        name: the configuration's name.
        account: the account that pays.
        steps, virtual_workers, parameters: planned steps, V, and the number of trained coordinates.
        finished_steps: steps that earlier executions of the run finished; 0 in the first.
        private: False if differential privacy is off; then every epsilon is None.
        exact: whether every operation has a deterministic kernel.
        evidence_class: ``simulated`` or the hardware class whose root verified.
        epsilon_planned, epsilon_cap, delta: what the plan costs a fresh account, what the account may spend, and the
            delta of both.
        noise_multiplier, sample_rate: z and q of the gradients.
        config: the configuration, as ``config.yaml`` in the run directory has it.
    """

    run_dir: Fact[Path]
    run_id: Fact[str]
    name: Fact[str]
    account: Fact[str]
    steps: Fact[int]
    virtual_workers: Fact[int]
    parameters: Fact[int]
    finished_steps: Fact[int]
    private: Fact[bool]
    exact: Fact[bool]
    evidence_class: Fact[str]
    epsilon_planned: Fact[float | None]
    epsilon_cap: Fact[float | None]
    delta: Fact[float | None]
    noise_multiplier: Fact[float | None]
    sample_rate: Fact[float]
    config: Fact[Mapping[str, Any]]

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that every output about this run carries: NOT PRIVATE, NOT EXACT, SIMULATED."""
        marks = {"NOT PRIVATE": not self.private, "NOT EXACT": not self.exact}
        return tuple(mark for mark, due in {**marks, "SIMULATED": self.evidence_class == "simulated"}.items() if due)


@report
class EvaluationReport:
    """A released model's result on the evaluation split, which is public.

    Attributes:
        steps: finished steps that gave the model.
        accuracy, loss, f1: as the verdict has them; None where they are not measured.
        metrics: values of the user's own metrics, by name.
    """

    steps: Fact[int]
    accuracy: Release[float | None]
    loss: Release[float | None]
    f1: Release[float | None]
    metrics: Release[Mapping[str, float]]


@report
class MeasurementReport:
    """A release of a measurement on private examples, noised and charged for.

    Attributes:
        query: ``class_counts`` or ``evaluation``.
        number: which release of it, from 0.
        steps: finished steps that gave the model.
        values: by name, such as ``loss``, ``accuracy`` or ``count_0``.
        noise_deviation: standard deviation of the noise in each value.
    """

    query: Fact[str]
    number: Fact[int]
    steps: Fact[int]
    values: Release[Mapping[str, float]]
    noise_deviation: Fact[Mapping[str, float]]


@report
class CheckpointReport:
    """A sealed package that was published; ``steps`` finished steps gave its model."""

    steps: Fact[int]
    digest: Release[str]


@report
class RunEnded:
    """The end of an execution.

    Attributes:
        ending: ``complete``, ``cap_exceeded``, ``early_stopped``, ``stopped``, or the code of the error that ended it.
        metrics: the verdict, as `Trainer.train` returns it; None if no step was finished.
    """

    run_dir: Fact[Path]
    ending: Fact[str]
    metrics: Release[Mapping[str, Any] | None]


Report = RunStarted | StepReport | EvaluationReport | MeasurementReport | CheckpointReport | MembershipReport | RunEnded


class Callback:
    """The base of callbacks: override what you need. Every argument is public.

    A callback has its own thread in the driver: it hears everything in order, while the run continues. It gets copies,
    so nothing that it does changes the run. The return value of a method is ignored; `Trainer.stop` ends a run after
    the step that it has reached by then.

    Each execution of a run reports its own start and end; a resumed run has several. A replay reports nothing.

    If a method raises, it is named with its error, and its callback is not called again. If a call takes longer than a
    minute, it is named, and the run does not wait for it. At most 1,000 reports wait for a callback: beyond that, each
    new report drops the oldest step, and the callback is named. At the end, the run waits up to two minutes until all
    callbacks have heard everything.
    """

    def on_run_begin(self, started: RunStarted) -> None:
        """Take note that members are admitted and training begins."""

    def on_step_end(self, report: StepReport) -> None:
        """Take note of a committed step; ``report`` has what was measured after it."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Take note of a result on the evaluation split; it comes before its step's `on_step_end`."""

    def on_measurement(self, report: MeasurementReport) -> None:
        """Take note of a noised release about private examples; it comes before the next step."""

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Take note that a sealed package was published."""

    def on_membership(self, report: MembershipReport) -> None:
        """Take note that a member joined the running training or was lost."""

    def on_run_end(self, ended: RunEnded) -> None:
        """Take note that this execution is over; the model and the verdict are on disk."""


EVENTS: Mapping[str, type[Report]] = {
    "on_run_begin": RunStarted,
    "on_step_end": StepReport,
    "on_evaluation": EvaluationReport,
    "on_measurement": MeasurementReport,
    "on_checkpoint": CheckpointReport,
    "on_membership": MembershipReport,
    "on_run_end": RunEnded,
}
"""Every method of a callback, and what it is told."""


def own_callbacks(named: Sequence[str], given: Sequence[Callback], base: Path | str) -> tuple[Callback, ...]:
    """Return the callbacks of the configuration, made without arguments, and those that were given in Python.

    Raises:
        ConfigError: ``module_function``; ``callback`` if one is no :class:`Callback`, cannot be made, or has a method
            of another signature or of a name that is never called.
    """
    found: list[Callback] = []
    for name in named:
        kind = resolve(name, base)
        try:
            found.append(kind())
        except Exception as error:  # noqa: BLE001 - only its type is told: its text may hold private data
            raise ConfigError(
                "callback",
                f"{name} fails with {type(error).__name__} when it is called without arguments.",
                "Name a class derived from raycloak.Callback whose constructor needs nothing.",
            ) from told(error)
    found += given
    for callback in found:
        _check(callback)
    return tuple(found)


def _check(callback: object) -> None:
    name = type(callback).__name__
    if not isinstance(callback, Callback):
        raise ConfigError("callback", f"a {name} is no raycloak.Callback.", "Derive its class from raycloak.Callback.")
    unknown = sorted(each for each in dir(callback) if each.startswith("on_") and each not in EVENTS)
    if unknown:
        raise ConfigError("callback", f"{name}.{unknown[0]} is never called.", f"The methods are {', '.join(EVENTS)}.")
    for event in EVENTS:
        try:
            inspect.signature(getattr(callback, event)).bind(None)
        except TypeError:
            raise ConfigError(
                "callback", f"{name}.{event} does not take one argument.", f"Define {event}(self, report)."
            ) from None
