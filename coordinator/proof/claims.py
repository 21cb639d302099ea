"""Claims: what a verification says of a run, one row each: proved, not covered, or FAILED with the first bad record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from raycloak.metrics.errors import RaycloakError

C = TypeVar("C")


class ClaimOutcome(StrEnum):
    """The outcome of one claim."""

    PROVED = "proved"
    NOT_COVERED = "not covered"
    FAILED = "FAILED"


class Broken(Exception):
    """The first record that breaks a claim, and why."""

    def __init__(self, record: str, why: str) -> None:
        super().__init__(f"{record}: {why}")
        self.record = record
        self.why = why


class NotThere(Exception):
    """The reason why a claim is not covered: the run has nothing of that kind, or nobody signed it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One row.

    Attributes:
        says: what was shown, what is not covered and why, or which record fails and how.
        record: the first record that breaks a claim; empty unless it failed.
    """

    name: str
    outcome: ClaimOutcome
    says: str
    record: str = ""


@dataclass(frozen=True, slots=True)
class ClaimCheck(Generic[C]):
    """How one claim is derived.

    Attributes:
        rests_on: claims that must hold before this one means anything.
        derive: returns the sentence of a proved claim; raises Broken, NotThere or a refusal.
    """

    name: str
    rests_on: tuple[str, ...]
    derive: Callable[[C], str]


@dataclass(frozen=True, slots=True)
class Report:
    """All claims about one run, and what no outsider can prove, in plain words."""

    run_id: str
    claims: tuple[Claim, ...]
    limits: tuple[str, ...]

    @property
    def failed(self) -> tuple[Claim, ...]:
        """The claims that failed."""
        return tuple(claim for claim in self.claims if claim.outcome is ClaimOutcome.FAILED)

    def facts(self) -> dict[str, Any]:
        """Return the report as JSON."""
        rows = [
            {"claim": each.name, "outcome": each.outcome.value, "says": each.says, "record": each.record}
            for each in self.claims
        ]
        return {
            "run_id": self.run_id,
            "verified": not self.failed,
            "claims": rows,
            "not_covered": list(self.limits),
        }


def examine(checks: Sequence[ClaimCheck[C]], case: C) -> tuple[Claim, ...]:
    """Derive every claim in order. One that rests on a failed claim fails with it."""
    found: dict[str, Claim] = {}
    for check in checks:
        found[check.name] = _examine(check, case, found)
    return tuple(found.values())


def _examine(check: ClaimCheck[C], case: C, before: dict[str, Claim]) -> Claim:
    lost = [name for name in check.rests_on if before[name].outcome is ClaimOutcome.FAILED]
    if lost:
        return Claim(check.name, ClaimOutcome.FAILED, f"it rests on '{lost[0]}', which failed")
    try:
        return Claim(check.name, ClaimOutcome.PROVED, check.derive(case))
    except NotThere as reason:
        return Claim(check.name, ClaimOutcome.NOT_COVERED, str(reason))
    except Broken as broken:
        return Claim(check.name, ClaimOutcome.FAILED, broken.why, broken.record)
    # Refusals of the functions that read each kind of record; their messages name it.
    except RaycloakError as refusal:
        return Claim(check.name, ClaimOutcome.FAILED, refusal.message, refusal.code)
