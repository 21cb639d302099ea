"""Limits who may take part together: a GPU serves one member, a platform as many workers as the policy says.

Somebody other than a machine's owner can present its genuine evidence. Counting machines and GPUs, and listing them in
the policy, limits how many members one machine can pretend to be.
"""

from collections.abc import Iterable

from raycloak.attestation.appraisal.appraisal import Appraisal
from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.policy.policy import Policy


class Enrolment:
    """The enrolled members, by platform and GPU. Checking one more costs the same, however many there are."""

    def __init__(self) -> None:
        self._members: dict[str, Appraisal] = {}
        self._owners: dict[bytes, str] = {}
        self._workers: dict[bytes, set[str]] = {}

    def check(self, member: Appraisal, policy: Policy) -> None:
        """Judge a member that wants to join the enrolled ones, or to take part again.

        Raises:
            EvidenceError: as :func:`check_enrolment`.
        """
        for gpu in member.gpus:
            owner = self._owners.get(gpu.platform_id, member.member_id)
            if owner != member.member_id:
                refuse(Refusal.PEER_NOT_BOUND, f"a GPU of '{member.member_id}' is enrolled by '{owner}' already")
        workers = self._workers.get(member.platform_id, set())
        # A member that presents anew does not stand in its own way.
        others = len(workers) - (member.member_id in workers)
        most = policy.workers_per_platform
        if member.role == "worker" and most is not None and others >= most:
            who = f"'{member.member_id}' is worker {others + 1} on platform {member.platform_id.hex()[:32]}"
            refuse(Refusal.PEER_NOT_BOUND, f"{who}, where workers_per_platform is {most}")

    def in_the_way(self, member: Appraisal, policy: Policy) -> list[str]:
        """Return who must leave for :meth:`check` to pass: owners of its GPUs, and the oldest on its machine."""
        owners = {self._owners.get(gpu.platform_id, member.member_id) for gpu in member.gpus}
        workers, most = self._workers.get(member.platform_id, set()), policy.workers_per_platform
        # In the order of enrolment, so that the oldest leave first.
        beside = [i for i in self._members if i in workers and i not in owners | {member.member_id}]
        if member.role == "worker" and most is not None:
            owners |= set(beside[: max(0, len(beside) + 1 - most)])
        return sorted(owners - {member.member_id})

    def put(self, member: Appraisal) -> None:
        """Enrol a member, replacing its earlier enrolment."""
        self.drop(member.member_id)
        self._members[member.member_id] = member
        self._owners.update((gpu.platform_id, member.member_id) for gpu in member.gpus)
        if member.role == "worker":
            self._workers.setdefault(member.platform_id, set()).add(member.member_id)

    def drop(self, member_id: str) -> None:
        """Forget a member. An unknown one is not an error."""
        member = self._members.pop(member_id, None)
        if member is not None:
            for gpu in member.gpus:
                self._owners.pop(gpu.platform_id, None)
            workers = self._workers.get(member.platform_id, set())
            workers.discard(member_id)
            if not workers:
                self._workers.pop(member.platform_id, None)


def check_enrolment(members: Iterable[Appraisal], policy: Policy) -> None:
    """Judge members that take part at the same time. Each member must be given once.

    Guarantee: returns only if every GPU belongs to one member, and no platform has more workers than
    ``workers_per_platform``.

    Raises:
        EvidenceError: ``peer_not_bound``.
    """
    enrolment = Enrolment()
    for member in members:
        enrolment.check(member, policy)
        enrolment.put(member)
