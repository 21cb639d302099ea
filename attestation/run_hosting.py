"""Which virtual workers' keys a member of a run may have again over the evidence service."""

from collections.abc import Iterable, Mapping


class RunHosting:
    """Follows what the run decides: the keys it releases, the rosters it opens, and whom it expels.

    Guarantee: a virtual worker is the one member's whom the run gave it last, and nobody's before that. A new
    incarnation of the orchestrator knows of none until the run says it again.
    """

    def __init__(self) -> None:
        self._host: dict[int, str] = {}

    def released(self, member_id: str, virtual_workers: Iterable[int]) -> None:
        """The keys of ``virtual_workers`` were released to ``member_id``, and to nobody else any more."""
        self._host |= dict.fromkeys(virtual_workers, member_id)

    def rostered(self, hosting: Mapping[str, Iterable[int]]) -> None:
        """A roster says who hosts what."""
        self._host = {v: member_id for member_id, hosted in hosting.items() for v in hosted}

    def expelled(self, member_id: str) -> None:
        """A member has left."""
        self._host = {v: host for v, host in self._host.items() if host != member_id}

    def of(self, member_id: str) -> tuple[int, ...]:
        """The virtual workers of a member, ascending."""
        return tuple(sorted(v for v, host in self._host.items() if host == member_id))
