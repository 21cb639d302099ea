"""The figures of the chaos bench: the phases that were hit, and the seconds until the run had recovered. Pure.

A step's event has the seconds of its last attempt. A step may need several attempts, or be lost with its driver. The
phase that was hit is then judged by the usual lengths of phases, taken from the undisturbed steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal, get_args

from raycloak_lab.bench.chaos.child_run import Left, StepSeen
from raycloak_lab.bench.chaos.schedule import Role, SignalName

Phase = Literal["between", "charge", "compute", "reduce"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class Kill:
    """A sent signal, with its Unix time in seconds."""

    role: Role
    signal: SignalName
    time: float
    pid: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """The usual seconds of the phases of a step, and from the end of one step to the beginning of the next."""

    between: float
    charge: float
    compute: float
    reduce: float

    @property
    def total(self) -> float:
        """The seconds from one commit to the next."""
        return self.between + self.charge + self.compute + self.reduce

    def phase_at(self, seconds: float) -> Phase:
        """Return the phase that is in progress ``seconds`` after a commit."""
        for phase in PHASES[:-1]:
            seconds -= float(getattr(self, phase))
            if seconds < 0:
                return phase
        return "reduce"


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery from a kill, in seconds from the signal; None if it did not happen before the run ended.

    Attributes:
        commit_s: time to the commit of the step it hit.
        settled_s: time to the commit of the first step that began after the signal. That step needs the process that
            was hit, even if the step in progress no longer did.
        members_s: time to the first commit with all workers, after the run had missed the one that was hit.
    """

    kill: Kill
    phase: Phase
    commit_s: float | None
    settled_s: float | None
    members_s: float | None


@dataclass(frozen=True, slots=True)
class RecoverySpread:
    """The seconds over several recoveries. ``p90_s`` is the smallest that nine of ten do not exceed."""

    count: int
    median_s: float
    p90_s: float
    max_s: float


def usual_lengths(steps: Sequence[StepSeen]) -> Lengths:
    """Return medians over the steps of one attempt that directly follow another; over all steps if there are none."""
    pairs = [(a, b) for a, b in pairwise(steps) if b.step == a.step + 1 and b.attempts == 1]
    assert pairs, "a run is disturbed only after its first steps"
    return Lengths(
        between=median(max(0.0, b.began - a.time) for a, b in pairs),
        charge=median(b.charge_seconds for _, b in pairs),
        compute=median(b.compute_seconds for _, b in pairs),
        reduce=median(b.reduce_seconds for _, b in pairs),
    )


def phase_hit(kill: Kill, steps: Sequence[StepSeen], usual: Lengths) -> Phase:
    """Return the phase that a kill met."""
    before = max((each.time for each in steps if each.time <= kill.time), default=kill.time)
    hit = next((each for each in steps if each.time > kill.time), None)
    if hit is None or kill.role == "driver":
        return usual.phase_at(kill.time - before)
    since = kill.time - hit.began
    if since < 0:
        return "between"
    if since < hit.charge_seconds:
        return "charge"
    last_attempt = hit.seconds - hit.compute_seconds - hit.reduce_seconds
    if hit.attempts > 1 and since < last_attempt:
        return "compute" if since - hit.charge_seconds < usual.compute else "reduce"
    return "compute" if since < hit.seconds - hit.reduce_seconds else "reduce"


def recovery(
    kill: Kill, steps: Sequence[StepSeen], departures: Sequence[Left], usual: Lengths, workers: int
) -> Recovery:
    """Measure what followed ``kill`` in its run's events. A complete run has ``workers`` workers."""
    noticed = kill.time
    if kill.role in ("worker", "node"):
        noticed = next((left.time for left in departures if left.time > kill.time), math.inf)
    # Not the first commit that follows: a driver that resumes from a package repeats steps before it.
    hit = 1 + max((each.step for each in steps if each.time <= kill.time), default=-1)
    after = [each for each in steps if each.time > kill.time and each.step >= hit]
    return Recovery(
        kill=kill,
        phase=phase_hit(kill, steps, usual),
        commit_s=_seconds(kill, after),
        settled_s=_seconds(kill, (each for each in after if each.began >= kill.time)),
        members_s=_seconds(kill, (each for each in after if each.time > noticed and each.workers >= workers)),
    )


def _seconds(kill: Kill, steps: Iterable[StepSeen]) -> float | None:
    first = next(iter(steps), None)
    return None if first is None else first.time - kill.time


def spread(seconds: Iterable[float | None]) -> RecoverySpread | None:
    """Summarise the known values; None if there are none."""
    known = sorted(value for value in seconds if value is not None)
    if not known:
        return None
    return RecoverySpread(len(known), median(known), known[math.ceil(0.9 * len(known)) - 1], known[-1])


def longest_step(steps: Sequence[StepSeen], apart: Sequence[float]) -> float:
    """Return the most seconds from one commit to the next, joins and checkpoints included.

    Args:
        apart: Unix times of events that are reported apart. A step that one of them fell into is left out.
    """
    gaps = ((a, b) for a, b in pairwise(steps) if not any(a.time <= when < b.time for when in apart))
    return max((b.time - a.time for a, b in gaps), default=0.0)
