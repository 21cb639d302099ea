"""Machine room: a hosting that gives no machine more keys of an epoch than the noise allows for.

A pure search. A virtual worker costs a machine nothing if the machine has got its key of this epoch before, from
whatever worker; so a newcomer on a machine takes up what its predecessor there had.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Hosting = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """The keys of one epoch that machines have got, and the most that each may get.

    Attributes:
        most: virtual workers whose keys one machine may get.
        held: by worker and by name of its machine, the virtual workers whose keys went there. A worker has several
            names if it has GPUs; workers on one machine share a name.
    """

    most: int
    held: Mapping[str, Mapping[str, tuple[int, ...]]]

    def exceeded(self, hosting: Hosting) -> str | None:
        """Return a worker whose machine ``hosting`` would give too many keys; None if there is none."""
        given: dict[str, set[int]] = {}
        for worker, virtual_workers in hosting.items():
            for machine, held in self.held[worker].items():
                given.setdefault(machine, set(held)).update(virtual_workers)
        crowded = {machine for machine, keys in given.items() if len(keys) > self.most}
        return next((worker for worker in sorted(hosting) if crowded & self.held[worker].keys()), None)

    def rehost(
        self, current: Hosting, workers: Sequence[str], virtual_workers: int
    ) -> dict[str, tuple[int, ...]] | None:
        """Spread ``virtual_workers`` over ``workers``, starting from ``current``; None if no machine may have more.

        Guarantee: every virtual worker has exactly one host, and no machine gets keys of more than ``most``. If
        machines are told apart by one name each, a hosting is found wherever there is one. No worker hosts more than
        an even share, unless only that keeps the bound. The result depends on nothing but the arguments.
        """
        even = -(-virtual_workers // len(workers))
        for load in dict.fromkeys((even, max(even, self.most))):
            search = _Search(self, {v: i for i, hosted in current.items() for v in hosted}, sorted(workers), load)
            if all(search.place(v, set()) for v in range(virtual_workers)):
                return search.hosting()
        return None


@dataclass(slots=True)
class _Search:
    """A hosting in the making: an augmenting path for each virtual worker that finds no room at once."""

    room: MachineRoom
    before: Mapping[int, str]
    workers: Sequence[str]
    most_load: int
    _host: dict[int, str] = field(default_factory=dict)
    _load: Counter[str] = field(default_factory=Counter)
    _new: Counter[str] = field(default_factory=Counter)

    def place(self, v: int, displaced: set[int]) -> bool:
        """Place ``v``, moving others where need be, but none of ``displaced``; False if that cannot be done."""
        for worker in sorted(self.workers, key=lambda worker: self._preference(v, worker)):
            if self._fits(v, worker):
                self._put(v, worker)
                return True
        for other, worker in sorted(self._host.items()):
            if other in displaced:
                continue
            self._take(other)
            if self._fits(v, worker):
                displaced.add(other)
                self._put(v, worker)
                if self.place(other, displaced):
                    return True
                self._take(v)
            # Put back: without it there was no room either.
            self._put(other, worker)
        return False

    def hosting(self) -> dict[str, tuple[int, ...]]:
        """Return the hosting so far."""
        return {worker: tuple(sorted(v for v, i in self._host.items() if i == worker)) for worker in self.workers}

    def _preference(self, v: int, worker: str) -> tuple[bool, bool, int, str]:
        """Order workers for ``v``: where it is, then where it costs no key, then the least loaded."""
        return self.before.get(v) != worker, bool(self._costs(v, worker)), self._load[worker], worker

    def _costs(self, v: int, worker: str) -> list[str]:
        """Return the machines of ``worker`` that have not got the key of ``v``."""
        return [machine for machine, held in self.room.held[worker].items() if v not in held]

    def _fits(self, v: int, worker: str) -> bool:
        held = self.room.held[worker]
        return self._load[worker] < self.most_load and all(
            len(held[machine]) + self._new[machine] < self.room.most for machine in self._costs(v, worker)
        )

    def _put(self, v: int, worker: str) -> None:
        self._host[v] = worker
        self._load[worker] += 1
        self._new.update(self._costs(v, worker))

    def _take(self, v: int) -> None:
        worker = self._host.pop(v)
        self._load[worker] -= 1
        self._new.subtract(self._costs(v, worker))
