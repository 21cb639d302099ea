"""Claims: what a verification says of a run, one row each: proved, not covered, or FAILED with the first bad record."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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


def require(condition: bool, record: str, why: str) -> None:
    """Raise Broken about ``record`` unless ``condition`` holds."""
    if not condition:
        raise Broken(record, why)


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
