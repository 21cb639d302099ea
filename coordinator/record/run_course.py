"""The course of a run so far, made of the events of its log, in memory that does not grow with the run.

Hides how events become figures: steps that a resume repeats, pauses between executions, and curves of any length.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from raycloak.coordinator.record.run_reader import Event

RATED = 50
"""Newest steps that rates and phase times are means of: most schedules evaluate at least once among them."""

INCIDENTS = 50
"""Newest incidents that are kept; their counts are of all."""

CURVE_POINTS = 512
"""Most points of a curve: more than a terminal has columns."""


class Curve:
    """Values by step. Beyond `CURVE_POINTS` it keeps every second, fourth ... value; the newest, least and most stay.

    Attributes:
        last, least, most: (step, value); None while there is none.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._every = 1
        self._seen = 0
        self.last: tuple[int, float] | None = None
        self.least: tuple[int, float] | None = None
        self.most: tuple[int, float] | None = None

    @property
    def points(self) -> list[tuple[int, float]]:
        """The kept points in order, with the newest."""
        last = [] if self.last is None or self.last in self._points[-1:] else [self.last]
        return [*self._points, *last]

    def add(self, step: int, value: float) -> None:
        """Add a value. One of a step that a resume repeats takes the place of all from that step on."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()
        self.last = step, value
        if self.least is None or value < self.least[1]:
            self.least = self.last
        if self.most is None or value > self.most[1]:
            self.most = self.last
        if self._seen % self._every == 0:
            self._points.append(self.last)
        self._seen += 1
        if len(self._points) > CURVE_POINTS:
            self._points = self._points[::2]
            self._every *= 2


@dataclass(frozen=True, slots=True)
class Incident:
    """A disturbance of a run: ``time`` in Unix seconds, and a short phrase."""

    time: float
    says: str


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of steps, in seconds: means over the newest ones of this execution.

    Attributes:
        whole: from one step's end to the next one's.
        charge, compute, reduce: parts of the last attempt.
        other: the rest, such as failed attempts, evaluations and sealing.
        masked_bytes: of a step.
    """

    whole: float
    charge: float
    compute: float
    reduce: float
    masked_bytes: float

    @property
    def other(self) -> float:
        """The part of a step that no phase has."""
        return max(0.0, self.whole - self.charge - self.compute - self.reduce)


@dataclass(slots=True)
class RunCourse:
    """The figures of a run as far as its log goes; :meth:`take` adds one event.

    Attributes:
        account, manifest_digest, evidence_class, private, exact, planned_steps, virtual_workers: terms of the run; None
            before its members are admitted.
        epsilon_planned, epsilon_cap, delta: likewise; None if nothing is private.
        executions: how often it was started; ``resumed_at`` is the step at which the newest one began.
        began_at, last_at: Unix time of the first and the newest event.
        steps: committed steps. ``repeated``: steps that were computed again after a resume.
        retried: attempts beyond the first one of each step.
        workers: members now.
        model_digest: after the newest step.
        epsilon: charged to the account after each step. ``quality``: accuracy or loss on the public split.
        metric: ``accuracy`` or ``loss``, whichever is measured.
        own_metrics: newest values of the user's own metrics.
        departures, restarts: by code, and by role. ``joins``: newcomers.
        incidents: the newest ones.
    """

    account: str | None = None
    manifest_digest: str | None = None
    evidence_class: str | None = None
    private: bool | None = None
    exact: bool | None = None
    planned_steps: int | None = None
    virtual_workers: int | None = None
    epsilon_planned: float | None = None
    epsilon_cap: float | None = None
    delta: float | None = None
    executions: int = 0
    resumed_at: int | None = None
    began_at: float | None = None
    last_at: float | None = None
    steps: int = 0
    repeated: int = 0
    retried: int = 0
    workers: int | None = None
    model_digest: str | None = None
    epsilon: Curve = field(default_factory=Curve)
    quality: Curve = field(default_factory=Curve)
    metric: str | None = None
    own_metrics: dict[str, float] = field(default_factory=dict)
    departures: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    joins: int = 0
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=INCIDENTS))
    _timed: deque[tuple[float, list[float]]] = field(default_factory=lambda: deque(maxlen=RATED + 1))

    @classmethod
    def of(cls, events: Iterable[Event]) -> "RunCourse":
        """Return the course that a whole log tells of."""
        course = cls()
        for event in events:
            course.take(event)
        return course

    def take(self, event: Event) -> None:
        """Add one event; one of an unknown kind, or a field that is missing, changes nothing."""
        time = number(event, "time") or 0.0
        if self.began_at is None:
            self.began_at = time
        self.last_at = time
        match event["event"]:
            case "admitted":
                self._admitted(event, time)
            case "step":
                self._step(event, time)
            case "metric" if (value := number(event, "value")) is not None:
                self.own_metrics[str(event.get("value_name"))] = value
            case "departure":
                self.departures[str(event.get("code"))] += 1
                self._incident(time, f"a member left: {event.get('code')}")
            case "join":
                self.joins += 1
                self.workers = count(event, "workers") or self.workers
                self._incident(time, f"a member joined, {self.workers} now")
            case "restart":
                self.restarts[str(event.get("role"))] += 1
                self._incident(time, f"the {event.get('role')} was started again: {event.get('cause')}")

    def times(self) -> StepTimes | None:
        """Return mean times of the newest steps; None before this execution's first one.

        Guarantee: time between two executions counts nowhere.
        """
        if len(self._timed) < 2:
            return None
        (began, _), *steps = self._timed
        whole = (steps[-1][0] - began) / len(steps)
        # A clock that was set back gives none.
        if whole <= 0:
            return None
        return StepTimes(whole, *map(fmean, zip(*(parts for _, parts in steps), strict=True)))

    def seconds_left(self, now: float) -> float | None:
        """Return how long the steps that are left take at the newest rate; None if that cannot be told."""
        times = self.times()
        if times is None or self.planned_steps is None or self.last_at is None:
            return None
        return max(0.0, self._timed[-1][0] + (self.planned_steps - self.steps) * times.whole - now)

    def seconds_silent(self, now: float) -> float | None:
        """Return the time since the newest step or start of an execution."""
        return max(0.0, now - self._timed[-1][0]) if self._timed else None

    def _admitted(self, event: Event, time: float) -> None:
        self.executions += 1
        if self.executions > 1:
            self._incident(time, "resumed")
        self.resumed_at = None
        self.account, self.evidence_class = text(event, "account"), text(event, "evidence_class")
        self.manifest_digest = text(event, "manifest_digest")
        self.private = None if "privacy" not in event else event["privacy"] == "private"
        self.exact = None if "exactness" not in event else event["exactness"] == "exact"
        self.planned_steps, self.virtual_workers = count(event, "steps_planned"), count(event, "virtual_workers")
        self.epsilon_planned = number(event, "epsilon_planned")
        self.epsilon_cap, self.delta = number(event, "epsilon_cap"), number(event, "delta")
        self.workers = count(event, "workers")
        # What lies between two executions is no time of a step.
        self._timed.clear()
        self._timed.append((time, []))

    def _step(self, event: Event, time: float) -> None:
        step = count(event, "step")
        if step is None:
            return
        if self.resumed_at is None:
            self.resumed_at = step
        self.repeated += max(0, self.steps - step) if self.resumed_at == step else 0
        self.steps = step + 1
        self.workers = count(event, "workers") or self.workers
        self.model_digest = text(event, "model_digest")
        if (epsilon := number(event, "epsilon")) is not None:
            self.epsilon.add(self.steps, epsilon)
        for metric in ("accuracy", "loss"):
            if (value := number(event, f"evaluation_{metric}")) is not None:
                self.metric = metric
                self.quality.add(self.steps, value)
        if (attempts := count(event, "attempts") or 1) > 1:
            self.retried += attempts - 1
            self._incident(time, f"step {self.steps} took {attempts} attempts")
        parts = ("charge_seconds", "compute_seconds", "reduce_seconds", "masked_bytes")
        self._timed.append((time, [number(event, name) or 0.0 for name in parts]))

    def _incident(self, time: float, says: str) -> None:
        self.incidents.append(Incident(time, says))


def number(values: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a record; None if it is missing or is none."""
    value = values.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def count(values: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of a record, likewise."""
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(values: Mapping[str, Any], name: str) -> str | None:
    """Return a text of a record, likewise."""
    value = values.get(name)
    return value if isinstance(value, str) else None
