"""Departures: the members that a run has lost, why, and how many failures it survives."""

from collections.abc import Callable
from dataclasses import dataclass, field

from raycloak.coordinator.cluster.control import START_AGAIN
from raycloak.metrics.errors import RefusedError, RunFailedError

# Causes that befall a worker, unlike a refusal that it answers with: a replacement may well succeed.
ACCIDENTS = frozenset({"died", "unreachable", "deadline"})

# Reasons to leave between two steps that are no failure, so they never use up max_failures.
ASKED = {
    "left": "it was asked to end",
    "preempted": "its node is being drained",
    "revoked": "it was revoked",
    "key_share": "it held as many virtual workers' keys in this epoch as the noise allows for",
}


@dataclass(frozen=True, slots=True)
class Departure:
    """A member that was refused, was lost or left, and why.

    Attributes:
        joined: False for a newcomer that was refused or lost before it was admitted.
    """

    member_id: str
    code: str
    message: str
    joined: bool = True

    @property
    def asked_for(self) -> bool:
        """Return whether it left between two steps as it was asked to, and so does not count as a failure."""
        return self.code in ASKED


@dataclass(slots=True)
class Departures:
    """All departures of a run, in order.

    Attributes:
        max_failures: losses the run survives; a newcomer that fails ends no run, but counts in :attr:`allow_newcomers`.
        told: told of each departure as it happens.
    """

    max_failures: int
    told: Callable[[Departure], None]
    all: list[Departure] = field(default_factory=list)
    _losses: int = 0
    _failed_joins: int = 0

    def add(self, departure: Departure, *, newcomer: bool = False) -> None:
        """Record a departure; ``newcomer`` is one that has not finished a step."""
        self.all.append(departure)
        if newcomer:
            self._failed_joins += not departure.asked_for
        else:
            self._losses += not departure.asked_for
        self.told(departure)

    @property
    def allow_newcomers(self) -> bool:
        """Return whether another worker may be started, after losses and failed newcomers."""
        return self._losses + self._failed_joins <= self.max_failures

    def check(self) -> None:
        """Raise RunFailedError ``too_many_failures`` once more than ``max_failures`` members were lost."""
        if self._losses > self.max_failures:
            raise RunFailedError(
                "too_many_failures", f"more than {self.max_failures} failures: {self.reasons()}.", START_AGAIN
            )

    def share_a_cause(self, last: int) -> bool:
        """Return whether the newest ``last`` departures share one cause that would meet any replacement as well."""
        codes = {departure.code for departure in self.all[-last:]}
        return len(codes) == 1 and not codes & ACCIDENTS

    def too_few(self, left: int, needed: int) -> RefusedError:
        """Return the error of a run with ``left`` workers that needs ``needed``."""
        return RefusedError(
            "too_few_workers", f"{left} workers are left, the run needs {needed}: {self.reasons()}.", START_AGAIN
        )

    def reasons(self) -> str:
        """Return every departure with its reason, in one line."""
        return "; ".join(f"{d.member_id}: {d.code} ({d.message})" for d in self.all) or "none was started"
