"""Hosting: which worker hosts which virtual workers, and which keys each worker was given.

The spread is a pure function: even, and moving as little as possible. The handout remembers the keys of the current
epoch and how far each worker has seen the evidence log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.release import KeyRelease
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.membership.growth import Growth
from raycloak.coordinator.membership.members import Members
from raycloak.coordinator.planning.plan import hosted_at_most

Hosting = Mapping[str, tuple[int, ...]]


def rehost(current: Hosting, workers: Sequence[str], virtual_workers: int) -> dict[str, tuple[int, ...]]:
    """Spread ``virtual_workers`` over ``workers``, starting from ``current``.

    Guarantee: every virtual worker has exactly one host, and loads differ by at most one. No placement with these loads
    keeps more virtual workers where they are. The result depends on nothing but the arguments.

    Args:
        current: hosting so far; hosts that are not in ``workers`` lose theirs. May be empty.
        workers: member ids, at least one.
    """
    assert workers, "a run has at least one worker"
    small, larger = divmod(virtual_workers, len(workers))
    # The workers that already host most keep the larger shares, so the fewest virtual workers move.
    by_load = sorted(workers, key=lambda worker: (-len(current.get(worker, ())), worker))
    share = {worker: small + (index < larger) for index, worker in enumerate(by_load)}
    kept = {worker: sorted(current.get(worker, ()))[: share[worker]] for worker in workers}
    placed = {v for held in kept.values() for v in held}
    homeless = iter(v for v in range(virtual_workers) if v not in placed)
    return {
        worker: tuple(sorted(held + [next(homeless) for _ in range(share[worker] - len(held))]))
        for worker, held in sorted(kept.items())
    }


def moved(before: Hosting, after: Hosting) -> dict[str, tuple[int, ...]]:
    """Return the virtual workers that each worker of ``after`` hosts and did not host in ``before``."""
    return {
        worker: tuple(v for v in hosted if v not in before.get(worker, ()))
        for worker, hosted in after.items()
        if set(hosted) - set(before.get(worker, ()))
    }


@dataclass(slots=True)
class Handout:
    """The record of the keys that each worker was given; it asks the orchestrator for them.

    Attributes:
        most: virtual workers whose keys of one epoch a worker may ever hold; None for any number.
    """

    control: Control
    most: int | None
    _epoch: int = -1
    _keyed: Hosting = field(default_factory=dict)
    _held: dict[str, set[int]] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    def begin(self, epoch: int) -> None:
        """Start handing out keys for ``epoch``. A new epoch clears all earlier grants."""
        if epoch != self._epoch:
            self._epoch, self._keyed, self._held = epoch, {}, {}

    def exposed(self, hosting: Hosting) -> str | None:
        """Return a worker that ``hosting`` would give more keys of this epoch than it may hold, if any."""
        if self.most is None:
            return None
        held = {i: self._held.get(i, set()) | set(hosted) for i, hosted in hosting.items()}
        return next((member_id for member_id, each in held.items() if len(each) > self.most), None)

    def missing(self, hosting: Hosting) -> Hosting:
        """Return the keys that workers lack for ``hosting``, and expect them to be given next."""
        needs = moved(self._keyed, hosting)
        # A worker drops the keys that a roster does not give it: if it is to host again, they are sent again.
        self._keyed = hosting
        return needs

    def release(self, member_id: str, virtual_workers: tuple[int, ...]) -> KeyRelease:
        """Return keys for a worker, with the proof that the log continues what the worker has seen of it."""
        seen = self._seen.get(member_id, 0)
        self._held.setdefault(member_id, set()).update(virtual_workers)
        return self.control.orchestrator.release(member_id, self._epoch, virtual_workers, seen)

    def accepted(self, member_id: str, release: KeyRelease, commitments: Envelope) -> None:
        """Record that a worker took its keys, and its commitments to the slices they belong to."""
        self._seen[member_id] = release.log_length
        self.control.orchestrator.record_data(commitments)


@dataclass(slots=True)
class Hosts:
    """Places every virtual worker on a worker.

    Attributes:
        hosting: virtual workers of each worker; covers all V once they were placed.
    """

    members: Members
    growth: Growth
    _handout: Handout
    hosting: Hosting = field(default_factory=dict)

    @classmethod
    def of(cls, members: Members, growth: Growth) -> Self:
        """Begin without any host."""
        config = members.config
        counted = config.dp_config.enabled and config.dp_config.colluding_workers > 0
        most = hosted_at_most(config, config.fewest_workers) if counted else None
        return cls(members, growth, Handout(members.control, most))

    def place(self, epoch: int) -> None:
        """Host every virtual worker on the current workers and release the keys they miss for ``epoch``.

        A host that fails to take its keys, or that opened other data than the run began with, leaves, and the rest
        is placed again.

        Guarantee: with ``colluding_workers``, no worker is ever given keys of more virtual workers of one epoch than
        the noise allows for; one that would be leaves instead.

        Raises:
            RefusedError: ``too_few_workers``.
            RunFailedError: ``too_many_failures``.
        """
        self._handout.begin(epoch)
        while True:
            self.growth.wait_for_enough()
            self.growth.refill()
            self.hosting = rehost(self.hosting, list(self.members.workers), self.members.config.virtual_workers)
            if (exposed := self._handout.exposed(self.hosting)) is not None:
                self.members.take_leave(exposed, "key_share")
                continue
            needs = self._handout.missing(self.hosting)
            if not needs:
                return
            self._hand_out(needs)

    def _hand_out(self, needs: Hosting) -> None:
        members = self.members
        asked, released = {}, {}
        for member_id, virtual_workers in needs.items():
            released[member_id] = self._handout.release(member_id, virtual_workers)
            asked[member_id] = members.workers[member_id].accept_keys(released[member_id])
        members.collect(asked, lambda i, commitments: self._handout.accepted(i, released[i], commitments))
        if not members.workers and members.departures.share_a_cause(len(asked)):
            raise members.too_few()
