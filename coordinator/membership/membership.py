"""Membership: the members of a run from their admission on; one part for each way to deal with them.

A worker that fails or is refused is named, with its code, and another is started in its place. Nothing here holds a
key or an example: keys go from the orchestrator to their host, wrapped for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.coordinator.aggregation.ranges import ParameterRange
from raycloak.coordinator.membership.admission import MemberAdmission
from raycloak.coordinator.membership.founders import Founders
from raycloak.coordinator.membership.growth import Growth
from raycloak.coordinator.membership.hosting import Hosts
from raycloak.coordinator.membership.members import Members
from raycloak.workers.messages import Admission


@dataclass(frozen=True, slots=True)
class Membership:
    """An admitted membership, and the four ways to deal with it.

    Attributes:
        members: the workers and aggregators that take part right now.
        admission: admits, renews and revokes members.
        growth: replaces, adds and removes workers, and waits for newcomers.
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
        newer: Callable[[], CollateralBundle] | None,
        revocations: Callable[[], int],
        on_join: Callable[[str], None],
    ) -> Self:
        """Admit the founders, and be ready for newcomers.

        Args:
            terms: what each worker presents itself for.
            ranges: one per aggregator.
            newer, revocations: see `raycloak.coordinator.membership.admission.MemberAdmission`.
            on_join: told the member id of each worker that joins the run after its start.

        Raises:
            RefusedError: ``too_few_workers``, with the code of each refusal.
        """
        members = founders.members
        admission = MemberAdmission(members, terms, ranges, founders.setup.base, newer, revocations)
        admission.admit_founders()
        growth = Growth(members, admission, founders.setup, on_join)
        return cls(members, admission, growth, Hosts(members, growth, terms.manifest))
