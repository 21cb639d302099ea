"""Callbacks of the user's own: what they are told, and what becomes of one that fails.

Hides how a callback is found, checked and called. A callback runs in the driver, on its main thread, between two acts
of the run. It gets public values alone. It is in no manifest, for nothing that it does changes a byte of the model.

Guarantee: a callback that fails ends no run, since the steps it watches are charged. It is named with its error, the
verdict has a warning, and it is not called again.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.user_code import own_words, resolve, told
from raycloak.workers.terms.manifest import Manifest


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The public facts of a run whose members are admitted; nothing is charged by this execution yet.

    Attributes:
        run_dir: the run directory.
        account: the one that pays.
        steps, virtual_workers, parameters: planned steps, V, and the number of trained coordinates.
        private: False if differential privacy is off.
        evidence_class: ``simulated`` or the hardware class whose root verified.
    """

    run_dir: Path
    run_id: str
    account: str
    steps: int
    virtual_workers: int
    parameters: int
    private: bool
    evidence_class: str


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """A released model's result on the evaluation split, which is public.

    Attributes:
        steps: finished steps that gave the model.
        accuracy, loss, f1: as the verdict has them; None where they are not measured.
        metrics: values of the user's own metrics, by name.
    """

    steps: int
    accuracy: float | None
    loss: float | None
    f1: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A sealed package that was published; ``steps`` finished steps gave its model."""

    steps: int
    digest: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The end of an execution.

    Attributes:
        ending: ``complete``, ``cap_exceeded``, ``stopped``, or the code of the error that ended it.
        metrics: the verdict, as `Trainer.train` returns it; None if no step was finished.
    """

    run_dir: Path
    ending: str
    metrics: Mapping[str, Any] | None


class Callback:
    """The base of callbacks: override what you need. Every argument is public.

    Each execution of a run tells of its own start and end; a resumed run has several. A replay tells nothing. What a
    method returns is ignored; to end a run after its step, call `Trainer.stop`. A method that raises is named, with its
    error, and its callback is not called again: the run goes on, since its steps are charged.
    """

    def on_run_begin(self, started: RunStarted) -> None:
        """Take note that members are admitted and training begins."""

    def on_step_end(self, report: StepReport) -> None:
        """Take note of a committed step; ``report`` has what was measured after it."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Take note of a measurement on the evaluation split; it comes before its step's `on_step_end`."""

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Take note that a sealed package was published."""

    def on_run_end(self, ended: RunEnded) -> None:
        """Take note that this execution is over; the model and the verdict are on disk."""


EVENTS = ("on_run_begin", "on_step_end", "on_evaluation", "on_checkpoint", "on_run_end")


def own_callbacks(named: Sequence[str], given: Sequence[Callback], base: Path | str) -> tuple[Callback, ...]:
    """Return the callbacks of the configuration, made without arguments, and those that were given in Python.

    Raises:
        ConfigError: ``module_function``; ``callback`` if one is no :class:`Callback`, cannot be made, or has a method
            of another signature or of a name that is never called.
    """
    found = (*(_made(name, base) for name in named), *given)
    for callback in found:
        _check(callback)
    return found


def _made(name: str, base: Path | str) -> Any:
    kind = resolve(name, base)
    try:
        return kind()
    except Exception as error:  # noqa: BLE001 - only its type is told: its text may hold private data
        raise ConfigError(
            "callback",
            f"{name} fails with {type(error).__name__} when it is called without arguments.",
            "Name a class derived from raycloak.Callback whose constructor needs nothing.",
        ) from told(error)


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


@dataclass(slots=True)
class CallbackCaller:
    """Tells the callbacks of one run, one after another.

    Attributes:
        warned: called with a sentence about each callback that fails.
    """

    callbacks: Sequence[Callback]
    warned: Callable[[str], None]
    _failed: set[int] = field(default_factory=set)
    _started: bool = False

    def started(self, run_dir: Path, manifest: Manifest, evidence_class: str) -> None:
        """Tell that the members of a run are admitted."""
        self._started = True
        mechanism = manifest.computation.mechanism
        event = RunStarted(
            run_dir=run_dir,
            run_id=manifest.run_id,
            account=manifest.account,
            steps=mechanism.steps,
            virtual_workers=mechanism.virtual_workers,
            parameters=mechanism.dimension,
            private=mechanism.private,
            evidence_class=evidence_class,
        )
        self._tell("on_run_begin", event)

    def stepped(self, report: StepReport) -> None:
        """Tell of a committed step."""
        self._tell("on_step_end", report)

    def evaluated(self, steps: int, found: Evaluation) -> None:
        """Tell of a measurement of the model that ``steps`` steps gave."""
        report = EvaluationReport(steps, found.accuracy, found.loss, found.f1, dict(found.own))
        self._tell("on_evaluation", report)

    def published(self, steps: int, digest: bytes) -> None:
        """Tell of a published package."""
        self._tell("on_checkpoint", CheckpointReport(steps, digest.hex()))

    def ended(self, run_dir: Path, ending: str, metrics: Mapping[str, Any] | None) -> None:
        """Tell of the end of an execution, if its start was told."""
        if self._started:
            self._started = False
            self._tell("on_run_end", RunEnded(run_dir, ending, metrics))

    def _tell(self, event: str, value: object) -> None:
        for index, callback in enumerate(self.callbacks):
            if index in self._failed:
                continue
            try:
                getattr(callback, event)(value)
            except Exception as error:  # noqa: BLE001 - a watcher must not cost the run that it watches
                self._failed.add(index)
                name = type(callback).__name__
                self.warned(f"The callback {name} is not called again: {event} failed with {own_words(error)}")
