"""Who hosts what where no coordinator decides: a table that the operator of a standalone evidence service fixes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from attestation.admissions import Admissions
from attestation.commit_book import StepCommit
from attestation.messages import Envelope
from attestation.roster import Query
from metrics.errors import ConfigError, EvidenceError, ProtocolError


class RosterOpener(Protocol):
    """What this asks of `attestation.orchestrator.EvidenceOrchestrator`."""

    def open_step(
        self,
        step: int,
        hosting: Mapping[str, tuple[int, ...]],
        aggregators: tuple[str, ...],
        commits: tuple[StepCommit, ...],
        query: Query = "gradient",
    ) -> Envelope: ...


@dataclass(frozen=True, slots=True)
class StaticHosting:
    """Virtual workers by member id.

    Attributes:
        workers: who hosts which virtual workers.
        aggregators: in range order.
    """

    workers: Mapping[str, tuple[int, ...]]
    aggregators: tuple[str, ...] = ()

    @classmethod
    def of(cls, workers: Mapping[str, tuple[int, ...]], aggregators: tuple[str, ...], count: int) -> "StaticHosting":
        """ConfigError ``hosting`` unless each of ``count`` virtual workers is hosted once."""
        covered = sorted(v for hosted in workers.values() for v in hosted)
        if covered != list(range(count)):
            raise ConfigError(
                "hosting",
                f"hosting must name each of {count} virtual workers once; it names {covered}.",
                "Give each to one worker.",
            )
        return cls(workers, aggregators)

    def hosted(self, member_id: str) -> tuple[int, ...]:
        """The virtual workers of a member; none if the table does not have it."""
        return self.workers.get(member_id, ())

    def rosters(self, orchestrator: RosterOpener, admissions: Admissions) -> Callable[[], Envelope | None]:
        """The newest roster, opened once all of the table are admitted, and again when one of them is new.

        It is of step 0, and of the next step once a step has had as many rosters as it may have: in a service that runs
        for long, each member that presents fresh evidence makes for another one.
        """
        newest: list[Envelope] = []
        shown: list[frozenset[bytes]] = []
        reached = 0

        def opened() -> Envelope:
            nonlocal reached
            while True:
                try:
                    return orchestrator.open_step(reached, self.workers, self.aggregators, ())
                except ProtocolError as refusal:
                    if refusal.code != "attempts_exhausted":
                        raise
                reached += 1

        def roster() -> Envelope | None:
            members = [admissions.find(name) for name in (*self.workers, *self.aggregators)]
            evidence = frozenset(member.appraisal.evidence_digest for member in members if member is not None)
            if len(evidence) < len(members):
                return None
            if shown != [evidence]:
                try:
                    newest[:] = [opened()]
                except EvidenceError as refusal:
                    raise ProtocolError("no_roster", refusal.message, "Ask again later.") from None
                shown[:] = [evidence]
            return newest[0]

        return roster
