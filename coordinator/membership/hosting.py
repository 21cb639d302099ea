"""Hosting: which worker hosts which virtual workers, and which keys each worker was given.

The spread is a pure function: even, and moving as little as possible. The hosts remember the keys of the current
epoch and how far each worker has seen the evidence log.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.coordinator.membership.growth import Growth
from raycloak.coordinator.membership.machine_room import Hosting, MachineRoom
from raycloak.coordinator.membership.members import Members
from raycloak.metrics.errors import RefusedError
from raycloak.workers.terms.manifest import Manifest


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
class Hosts:
    """Places every virtual worker on a worker, and gives each worker its keys, which the orchestrator seals to it.

    Attributes:
        hosting: virtual workers of each worker; covers all of them once they were placed.
    """

    members: Members
    growth: Growth
    manifest: Manifest
    hosting: Hosting = field(default_factory=dict)
    # By virtual worker, to the slice of each that was ever hosted in this session.
    _commitments: dict[int, bytes] = field(default_factory=dict)
    # The keys of which epoch each worker was given, and how far each has seen the evidence log.
    _epoch: int = -1
    _keyed: Hosting = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    @property
    def commitments(self) -> tuple[bytes, ...]:
        """The commitments to all slices, by virtual worker; they are complete once all were placed."""
        return tuple(commitment for _, commitment in sorted(self._commitments.items()))

    def place(self, epoch: int) -> None:
        """Host every virtual worker on the current workers and release the keys they miss for ``epoch``.

        A host that fails to take its keys, or that opened other data than the run began with, leaves, and the rest
        is placed again.

        Guarantee: with ``colluding_workers``, no machine is ever given keys of more virtual workers of one epoch than
        the noise allows for. If no placement keeps to that, newcomers are waited for, and then a worker on a full
        machine leaves, once for each machine, so that another may join elsewhere.

        Raises:
            RefusedError: ``too_few_workers``; ``key_share`` if newcomers came to full machines, or none came in time.
            RunFailedError: ``too_many_failures``.
        """
        if epoch != self._epoch:
            # A new epoch clears all earlier grants.
            self._epoch, self._keyed = epoch, {}
        vacated: set[str] = set()
        while True:
            self.growth.wait_for_enough()
            self.growth.refill()
            workers, virtual_workers = list(self.members.workers), self.manifest.computation.mechanism.virtual_workers
            hosting = rehost(self.hosting, workers, virtual_workers)
            if (most := self.manifest.keys_per_machine) is not None:
                room = MachineRoom(most, self.members.control.orchestrator.held_by_machine(epoch))
                within = room.rehost(self.hosting, workers, virtual_workers)
                if within is None and (full := room.exceeded(hosting)) is not None:
                    self._seek_room(room, full, vacated)
                    continue
                hosting = within or hosting
            self.hosting = hosting
            needs = moved(self._keyed, hosting)
            # A worker drops the keys that a roster does not give it: if it is to host again, they are sent again.
            self._keyed = hosting
            if not needs:
                return
            self._hand_out(needs)

    def _seek_room(self, room: MachineRoom, full: str, vacated: set[str]) -> None:
        """Wait for a newcomer; if none is expected, let worker ``full`` go, whose machine is then ``vacated``."""
        if self.growth.expects_newcomer:
            if self.growth.await_newcomer():
                return
            raise self._no_room(room)
        # A successor came to the place that was vacated for it, or nobody can come: one less would change nothing.
        if room.held[full].keys() & vacated or not self.members.departures.allow_newcomers:
            raise self._no_room(room)
        vacated.update(room.held[full])
        # Its successor would otherwise be given its place, and so its machine.
        self.members.backend.close_place(self.members.workers[full])
        self.members.take_leave(full, "key_share")

    def _no_room(self, room: MachineRoom) -> RefusedError:
        virtual_workers = self.manifest.computation.mechanism.virtual_workers
        machines = {name[:25]: len(held) for of_worker in room.held.values() for name, held in of_worker.items()}
        return RefusedError(
            "key_share",
            f"each machine may get the keys of {room.most} of {virtual_workers} virtual workers of "
            f"an epoch, and {len(self.members.workers)} workers are on machines that leave no placement: "
            f"{', '.join(f'{name} has got {count}' for name, count in sorted(machines.items()))}.",
            "Add a machine that has had no worker of this run, or bring a lost one back, one worker to a machine, and "
            "resume it; a new run on few machines needs colluding_workers: 0.",
        )

    def _hand_out(self, needs: Hosting) -> None:
        members = self.members
        released = {member_id: self.release(member_id, missing) for member_id, missing in needs.items()}
        asked = {member_id: members.workers[member_id].accept_keys(keys) for member_id, keys in released.items()}

        def accepted(member_id: str, commitments: Envelope) -> None:
            self._seen[member_id] = released[member_id].log_length
            # It refuses a slice that differs from the one that was opened first, so the first commitment stays.
            members.control.orchestrator.record_data(commitments)
            body = parse(DataCommitments, commitments.body)
            self._commitments.update(zip(body.virtual_workers, body.commitments, strict=True))

        members.collect(asked, accepted)
        if not members.workers and members.departures.share_a_cause(len(asked)):
            raise members.too_few()

    def release(self, member_id: str, virtual_workers: tuple[int, ...]) -> KeyRelease:
        """Return keys for a worker, with the proof that the log continues what the worker has seen of it."""
        seen = self._seen.get(member_id, 0)
        return self.members.control.orchestrator.release(member_id, self._epoch, virtual_workers, seen)
