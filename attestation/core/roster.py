"""Rosters: the members of one attempt of one step, with their keys and the virtual workers that they host.

The orchestrator signs a roster. Its digest is in every mask key, header and payload tag. So two workers that were shown
different rosters cannot produce masks that cancel.
"""

from typing import ClassVar, Literal

from raycloak.attestation.core.evidence import Role
from raycloak.attestation.core.messages import Envelope, Message, open_envelope
from raycloak.metrics.errors import ProtocolError

Query = Literal["gradient", "evaluation", "class_counts"]
"""The property of an example that is summed. A run has at most one mechanism of each, and each counts steps from 0."""


class Member(Message):
    """One attested actor of a roster.

    Attributes:
        mask_key, identity_key: X25519 and Ed25519 public keys that its evidence binds.
        evidence_digest: digest of the presentation that admitted it.
        virtual_workers: the virtual workers that it hosts in this attempt, ascending; empty for an aggregator.
        joined: ratchet index at its admission.
    """

    DOMAIN: ClassVar[str] = "raycloak/member/v1"

    member_id: str
    role: Role
    mask_key: bytes
    identity_key: bytes
    evidence_digest: bytes
    virtual_workers: tuple[int, ...]
    joined: int


class RosterMembers(Message):
    """The members of rosters. Most steps of a run have the same ones, so the evidence log names them by a digest."""

    DOMAIN: ClassVar[str] = "raycloak/roster-members/v1"

    members: tuple[Member, ...]


class MaskCircle(Message):
    """The circle on which the workers of a roster stand, where not all pairs mask.

    Attributes:
        seed: nonce of the first roster with these workers; their order on the circle follows from it.
        reach: each worker masks with so many nearest ones on either side.
        colluding_workers: number of workers that the masks withstand, of those fixed before the seed was drawn.
    """

    DOMAIN: ClassVar[str] = "raycloak/mask-circle/v1"

    seed: bytes
    reach: int
    colluding_workers: int


class Roster(Message):
    """One attempt of one step.

    Attributes:
        query, step: the mechanism, and the number of its release.
        attempt: strictly increasing per (run, query, step), also over restarts of the orchestrator.
        ratchet: number of steps committed in this session; pair secrets stand at this index.
        nonce: 32 random bytes, so that no two rosters share a digest.
        members: workers in the order of their ids, then the aggregator of each range in range order.
        circle: says which pairs of workers mask; None for all pairs. See `raycloak.attestation.core.mask_graph`.
    """

    DOMAIN: ClassVar[str] = "raycloak/roster/v2"

    run_id: str
    manifest_digest: bytes
    query: Query = "gradient"
    step: int
    attempt: int
    ratchet: int
    nonce: bytes
    members: tuple[Member, ...]
    circle: MaskCircle | None = None

    @property
    def workers(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.role == "worker")

    @property
    def aggregators(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.role == "aggregator")

    def member(self, member_id: str) -> Member:
        """Return the entry of ``member_id``; ProtocolError ``roster_member`` if it has none."""
        for member in self.members:
            if member.member_id == member_id:
                return member
        raise ProtocolError("roster_member", f"{member_id} is not in the roster of step {self.step}")


def open_roster(
    envelope: Envelope,
    *,
    orchestrator_key: bytes,
    run_id: str,
    manifest_digest: bytes,
    virtual_workers: int,
    minimum_workers: int,
) -> Roster:
    """Verify a roster.

    Guarantee: returns only a roster that the orchestrator signed for this run and manifest. At least
    ``minimum_workers`` distinct workers cover every virtual worker exactly once, and no key appears twice.

    Raises:
        ProtocolError: ``signature``, ``roster_mismatch``, ``roster_cover``, ``roster_too_small`` or
            ``roster_duplicate``.
    """
    roster = open_envelope(Roster, envelope, orchestrator_key)
    check_roster(
        roster,
        run_id=run_id,
        manifest_digest=manifest_digest,
        virtual_workers=virtual_workers,
        minimum_workers=minimum_workers,
    )
    return roster


def check_roster(
    roster: Roster, *, run_id: str, manifest_digest: bytes, virtual_workers: int, minimum_workers: int
) -> None:
    """Check a roster whose origin is known, as :func:`open_roster` does; the errors are the same, except
    ``signature``."""
    if (roster.run_id, roster.manifest_digest) != (run_id, manifest_digest):
        raise ProtocolError("roster_mismatch", "the roster belongs to another run or manifest")
    covered = sorted(v for worker in roster.workers for v in worker.virtual_workers)
    if covered != list(range(virtual_workers)):
        raise ProtocolError(
            "roster_cover", f"the roster must cover each of {virtual_workers} virtual workers once; it has {covered}"
        )
    if len(roster.workers) < minimum_workers:
        raise ProtocolError(
            "roster_too_small", f"the roster has {len(roster.workers)} workers, the manifest asks for {minimum_workers}"
        )
    for values in zip(*((m.member_id, m.mask_key, m.identity_key) for m in roster.members), strict=True):
        if len(set(values)) != len(values):
            raise ProtocolError("roster_duplicate", "two members of the roster share an id or a key")
