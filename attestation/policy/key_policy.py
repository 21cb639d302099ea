"""The terms of release for each kind of key: to whom, and how often. A key's policy digest stands for them.

The policy of each kind follows from the run's evidence policy. So a key is bound to the rules under which its receiver
was appraised, and a package of one kind cannot pass for another.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import ClassVar, Final, Self

from raycloak.attestation.core.evidence import Role
from raycloak.attestation.core.messages import Message
from raycloak.attestation.policy.policy import KeyQuotas, Policy
from raycloak.metrics.errors import EvidenceError


class KeyKind(StrEnum):
    """The purpose of a released key."""

    VIRTUAL_WORKER = "virtual_worker"
    """Sampling, noise and tags of one virtual worker in one epoch."""
    DATASET = "dataset"
    """One slice of a sealed dataset."""
    EVALUATION = "evaluation"
    """One slice of a sealed evaluation split."""
    CHECKPOINT = "checkpoint"
    """A sealed package of the run. The run opens its own for its driver, which has no evidence."""


class KeyPolicy(Message):
    """The terms of release of one kind of key.

    Attributes:
        role: the role that a receiver must be admitted in; None where the run itself is the receiver.
        evidence_policy: digest of the evidence policy that the receiver must have been appraised by.
        keys_per_machine: most virtual workers whose keys of one epoch may ever go to one machine; None for any number.
    """

    DOMAIN: ClassVar[str] = "raycloak/key-policy/v1"

    kind: KeyKind
    role: Role | None
    evidence_policy: bytes
    quotas: KeyQuotas
    keys_per_machine: int | None = None

    @classmethod
    def of(cls, kind: KeyKind, policy: Policy, keys_per_machine: int | None = None) -> Self:
        """Return the terms of ``kind`` in a run under ``policy``; only virtual workers' keys are counted by machine."""
        role: Role | None = None if kind is KeyKind.CHECKPOINT else "worker"
        return cls(
            kind=kind,
            role=role,
            evidence_policy=policy.digest(),
            quotas=policy.key_quotas,
            keys_per_machine=keys_per_machine if kind is KeyKind.VIRTUAL_WORKER else None,
        )


_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS draws (
        kind TEXT NOT NULL, epoch INTEGER NOT NULL, key_id TEXT NOT NULL, session TEXT NOT NULL,
        member_id TEXT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (kind, epoch, key_id, session, member_id)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS draw_totals (
        kind TEXT NOT NULL, epoch INTEGER NOT NULL, key_id TEXT NOT NULL, count INTEGER NOT NULL,
        PRIMARY KEY (kind, epoch, key_id)
    ) WITHOUT ROWID
    """,
)
"""``draw_totals`` has sums over ``draws``, so that a draw reads two rows however many members drew before."""


_AT_ONCE: Final = 500
"""Keys that are counted in one statement, because SQLite bounds a statement's parameters."""


class DrawBook:
    """The number of draws of each key, in the orchestrator's database. Counts survive a restart."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        for statement in _SCHEMA:
            connection.execute(statement)

    def draw(self, terms: KeyPolicy, epoch: int, key_ids: Iterable[str], session: str, member_id: str) -> None:
        """Count one more draw of each key, in the caller's transaction.

        Guarantee: within one session no member draws a key more often than ``terms.quotas.per_member``. Within one run
        all members together draw it at most ``per_run`` times, also across restarts.

        Raises:
            EvidenceError: ``release_denied``. The caller's transaction must not be committed then.
        """
        wanted, kind = tuple(key_ids), terms.kind.value
        for first in range(0, len(wanted), _AT_ONCE):
            keys = wanted[first : first + _AT_ONCE]
            # Counted before the quotas are compared: the caller's rollback takes the counts back.
            own = self._count("draws", [(kind, epoch, key_id, session, member_id) for key_id in keys])
            total = self._count("draw_totals", [(kind, epoch, key_id) for key_id in keys])
            for key_id in keys:
                for who, count, quota in (
                    (member_id, own[key_id], terms.quotas.per_member),
                    ("the run", total[key_id], terms.quotas.per_run),
                ):
                    if count > quota:
                        raise EvidenceError(
                            "release_denied",
                            f"{who} has drawn {kind} key {key_id} of epoch {epoch} {count - 1} times, its quota",
                            "Find out why it is asked for so often; key_quotas in the policy of a new run raises it.",
                        )

    def _count(self, table: str, places: Sequence[tuple[str | int, ...]]) -> dict[str, int]:
        """Count one more in ``table`` at each of ``places``, its primary keys; return the new counts by key id."""
        row = f"({'?, ' * len(places[0])}1)"
        statement = (
            f"INSERT INTO {table} VALUES {', '.join([row] * len(places))} "
            "ON CONFLICT DO UPDATE SET count = count + 1 RETURNING key_id, count"
        )
        return dict(self._connection.execute(statement, [each for place in places for each in place]).fetchall())
