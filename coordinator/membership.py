"""Membership: the members of a run from their admission on, by subject.

A worker that fails or is refused is named, with its code, and another is started in its place. Nothing here holds a
key or an example: keys go from the orchestrator to their host, wrapped for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from coordinator.founders import Founders
from coordinator.growth import Growth
from coordinator.handout import Hosts
from coordinator.member_admission import MemberAdmission
from coordinator.members import Members
from coordinator.ranges import ParameterRange
from coordinator.review import Review
from workers.worker_messages import Admission


@dataclass(frozen=True, slots=True)
class Membership:
    """An admitted membership, and the four ways to deal with it.

    Attributes:
        members: the workers and aggregators that take part right now.
        admission: admits, renews and revokes members.
        growth: replaces, adds and lets go workers, and waits for them.
        hosts: places virtual workers on workers, with their keys.
    """

    members: Members
    admission: MemberAdmission
    growth: Growth
    hosts: Hosts

    @classmethod
    def admit(
        cls,
        founders: Founders,
        terms: Admission,
        ranges: Sequence[ParameterRange],
        revocations: Callable[[], int],
        on_join: Callable[[str], None],
    ) -> Self:
        """Admit the founders, and be ready for newcomers.

        Args:
            terms: what each worker presents itself for.
            ranges: one per aggregator.
            revocations: counts them so far; see `coordinator.review.Review`.
            on_join: told the member id of each worker that joins the run after its start.

        Raises:
            RefusedError: ``too_few_workers``, with the code of each refusal.
        """
        members = founders.members
        review = Review(members.control, members.timer, revocations)
        admission = MemberAdmission.of(members, terms, ranges, review)
        admission.admit_founders()
        growth = Growth.of(members, admission, founders.setup, on_join)
        return cls(members, admission, growth, Hosts.of(members, growth))
