"""Hosting as the orchestrator sees it: which virtual workers' keys a member may have.

A run's coordinator decides it from step to step. A standalone evidence service follows a table that its operator fixes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from raycloak.attestation.core.messages import Envelope
from raycloak.metrics.errors import ConfigError, EvidenceError, ProtocolError

if TYPE_CHECKING:
    from raycloak.attestation.orchestrator.orchestrator import RunSession


class RunHosting:
    """The hosting of a run, as its decisions have left it: keys released, rosters opened, members expelled.

    Guarantee: a virtual worker belongs to the one member that the run gave its keys to last. A new incarnation of the
    orchestrator knows no hosts until the run names them again.
    """

    def __init__(self) -> None:
        self._host: dict[int, str] = {}
        self._roster: Envelope | None = None

    def released(self, member_id: str, virtual_workers: Iterable[int]) -> None:
        """Note that ``member_id`` has the keys of ``virtual_workers``; their former hosts lose them."""
        self._host |= dict.fromkeys(virtual_workers, member_id)

    def rostered(self, hosting: Mapping[str, Iterable[int]], roster: Envelope) -> None:
        """Note the newest roster, and the hosts that it names."""
        self._host = {v: member_id for member_id, hosted in hosting.items() for v in hosted}
        self._roster = roster

    def expelled(self, member_id: str) -> None:
        """Forget a member that has left."""
        self._host = {v: host for v, host in self._host.items() if host != member_id}

    def hosted(self, member_id: str) -> tuple[int, ...]:
        """Return the virtual workers of a member, ascending."""
        return tuple(sorted(v for v, host in self._host.items() if host == member_id))

    def newest_roster(self) -> Envelope | None:
        """Return the newest roster; None before the first."""
        return self._roster


@dataclass(frozen=True, slots=True)
class StaticHosting:
    """The table of a standalone service: virtual workers by member id.

    Attributes:
        workers: the virtual workers of each host.
        aggregators: in range order.
    """

    workers: Mapping[str, tuple[int, ...]]
    aggregators: tuple[str, ...] = ()

    @classmethod
    def of(cls, workers: Mapping[str, tuple[int, ...]], aggregators: tuple[str, ...], count: int) -> "StaticHosting":
        """Check a table; ConfigError ``hosting`` unless each of ``count`` virtual workers is hosted once."""
        covered = sorted(v for hosted in workers.values() for v in hosted)
        if covered != list(range(count)):
            raise ConfigError(
                "hosting",
                f"hosting must name each of {count} virtual workers once; it names {covered}.",
                "Give each to one worker.",
            )
        return cls(workers, aggregators)


class Hosting(Protocol):
    """The part of a hosting that a service answers from."""

    def hosted(self, member_id: str) -> Sequence[int]:
        """Return the virtual workers whose keys a member may have."""

    def newest_roster(self) -> Envelope | None:
        """Return the roster to show; None before the first."""


@dataclass(frozen=True, slots=True)
class AnyHosting:
    """The hosting of a service that does not decide it: any member may have any keys, and there are no rosters."""

    virtual_workers: int

    def hosted(self, member_id: str) -> range:
        return range(self.virtual_workers)

    def newest_roster(self) -> None:
        return None


class TableHosting:
    """The hosting of a table, whose rosters are opened as its members present fresh evidence.

    The rosters are of step 0. A service that runs for long uses up the attempts of a step, because each fresh piece of
    evidence takes one. Its rosters are then for the next step.
    """

    def __init__(self, table: StaticHosting, session: "RunSession") -> None:
        self._table = table
        self._session = session
        self._step = 0
        self._newest: tuple[frozenset[bytes], Envelope] | None = None

    def hosted(self, member_id: str) -> tuple[int, ...]:
        """Return the virtual workers of a member; none if the table does not have it."""
        return self._table.workers.get(member_id, ())

    def newest_roster(self) -> Envelope | None:
        """Return the newest roster, reopened after fresh evidence of a member; None until all members are admitted.

        Raises:
            ProtocolError: ``no_roster`` if a roster cannot be opened now.
        """
        found = [self._session.admission.find(name) for name in (*self._table.workers, *self._table.aggregators)]
        evidence = frozenset(each.appraisal.evidence_digest for each in found if each is not None)
        if None in found:
            return None
        if self._newest is None or self._newest[0] != evidence:
            try:
                self._newest = evidence, self._opened()
            except EvidenceError as refusal:
                raise ProtocolError("no_roster", refusal.message, "Ask again later.") from None
        return self._newest[1]

    def _opened(self) -> Envelope:
        while True:
            try:
                return self._session.open_step(self._step, self._table.workers, self._table.aggregators, ())
            except ProtocolError as refusal:
                if refusal.code != "attempts_exhausted":
                    raise
            self._step += 1
