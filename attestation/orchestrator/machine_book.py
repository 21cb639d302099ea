"""The book of a run's machines: how many virtual workers' keys of one epoch each of them has received.

The appraised evidence says what a machine is: the platform, and each GPU. A process, its name and its keys count for
nothing here, since anyone who controls a machine can start another process on it.
"""

import sqlite3
from collections.abc import Iterable, Mapping

from raycloak.attestation.appraisal.appraisal import Appraisal
from raycloak.metrics.errors import EvidenceError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS machine_keys (
    machine TEXT NOT NULL, epoch INTEGER NOT NULL, v INTEGER NOT NULL, PRIMARY KEY (machine, epoch, v)
) WITHOUT ROWID
"""


def machines_of(appraisal: Appraisal) -> tuple[str, ...]:
    """Return the names of a member's machine: its platform's, and one for each GPU."""
    return (
        f"platform {appraisal.platform_id.hex()}",
        *(f"GPU {gpu.platform_id.hex()}" for gpu in appraisal.gpus),
    )


class MachineBook:
    """The keys that went to each machine, in the orchestrator's database. Nothing is ever taken out of it."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute(_SCHEMA)

    def give(self, member: Appraisal, epoch: int, virtual_workers: tuple[int, ...], most: int | None) -> None:
        """Note that keys of ``virtual_workers`` in ``epoch`` go to a member's machine, in the caller's transaction.

        Guarantee: with ``most``, no platform and no GPU ever gets keys of more virtual workers of one epoch. This holds
        for any members, across restarts, sessions and resumes of the run. A key that it received before counts once.
        Not guaranteed: that one machine has one identity for ever. That is for the vendor of the evidence to say.

        Raises:
            EvidenceError: ``release_denied``. The caller's transaction must not be committed then.
        """
        if most is not None and not member.names_machine:
            raise EvidenceError(
                "release_denied",
                f"the evidence of {member.member_id} names no machine, since its provider masks the chip's id; keys "
                "are counted by machine",
                "Use machines whose chip id is not masked, or set colluding_workers to 0 in a new run.",
            )
        for machine in machines_of(member):
            self._db.executemany(
                "INSERT OR IGNORE INTO machine_keys VALUES (?, ?, ?)", ((machine, epoch, v) for v in virtual_workers)
            )
            # Counted after they were noted: the caller's rollback takes the notes back.
            held = len(self._held(machine, epoch))
            if most is not None and held > most:
                raise EvidenceError(
                    "release_denied",
                    f"with keys of {list(virtual_workers)} for {member.member_id}, {machine} would have got the keys "
                    f"of {held} virtual workers of epoch {epoch}; the noise allows for {most} on one machine",
                    "Host them on another machine; another process on the same one changes nothing.",
                )

    def require_known(self, charged: bool, virtual_workers: int, most: int | None) -> None:
        """Refuse a book that is empty although the run was ``charged``, in the caller's transaction.

        Guarantee: with ``most``, no key is released beside another state folder than that of the run's former releases.
        Without it, every key counts as held by one machine from then on, because nobody knows which machines got them.

        Raises:
            EvidenceError: ``machine_book_missing``.
        """
        if not charged or self.most():
            return
        if most is not None:
            raise EvidenceError(
                "machine_book_missing",
                "the ledger has charged this run, but the state folder does not know which machines got its keys",
                "Run it beside the state folder that it began with, or start a new run with another secret.",
            )
        everything = (("unknown", 0, v) for v in range(virtual_workers))
        self._db.executemany("INSERT INTO machine_keys VALUES (?, ?, ?)", everything)

    def held(self, members: Iterable[Appraisal], epoch: int) -> dict[str, Mapping[str, tuple[int, ...]]]:
        """Return by member, and by name of its machine, the virtual workers whose keys of ``epoch`` went there."""
        return {
            member.member_id: {machine: self._held(machine, epoch) for machine in machines_of(member)}
            for member in members
        }

    def most(self) -> int:
        """Return the most virtual workers whose keys of one epoch one machine received, in any session of the run."""
        counts = "SELECT count(*) AS held FROM machine_keys GROUP BY machine, epoch"
        (most,) = self._db.execute(f"SELECT coalesce(max(held), 0) FROM ({counts})").fetchone()
        return int(most)

    def _held(self, machine: str, epoch: int) -> tuple[int, ...]:
        rows = self._db.execute(
            "SELECT v FROM machine_keys WHERE machine = ? AND epoch = ? ORDER BY v", (machine, epoch)
        )
        return tuple(v for (v,) in rows)
