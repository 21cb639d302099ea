"""The book of the slices of a run, in the state of its orchestrator.

It refuses changed examples early, and names the virtual worker. The guarantee that a receipt is worth nothing for other
examples rests on the ledger, which holds the root of all commitments, and on the workers' own checks.
"""

import sqlite3
from collections.abc import Mapping
from typing import ClassVar

from raycloak.attestation.core.evidence import Bytes32
from raycloak.attestation.core.messages import Message
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.metrics.errors import EvidenceError, ProtocolError


class DataCommitments(Message):
    """A worker's keyed commitments to the slices it opened, by virtual worker."""

    DOMAIN: ClassVar[str] = "raycloak/data-commitments/v1"

    run_id: str
    member_id: str
    virtual_workers: tuple[int, ...]
    commitments: tuple[Bytes32, ...]


class SliceBook:
    """The slices of one run. Methods that write expect a transaction of the caller's."""

    def __init__(self, db: sqlite3.Connection, log: EvidenceLog) -> None:
        self._db = db
        self._log = log

    def record(self, body: DataCommitments, virtual_workers: int) -> None:
        """Record the slices that a member has opened; the first commitment to each binds the run.

        Args:
            virtual_workers: of the run, which has one slice for each.

        Raises:
            EvidenceError: ``data_changed``, with both commitments; nothing is recorded then.
            ProtocolError: ``malformed``.
        """
        if len(body.commitments) != len(body.virtual_workers):
            raise ProtocolError("malformed", f"{body.member_id} does not commit to one slice per virtual worker")
        if not all(0 <= v < virtual_workers for v in body.virtual_workers):
            raise ProtocolError("malformed", f"{body.member_id} commits to slices that the run does not have")
        for v, commitment in zip(body.virtual_workers, body.commitments, strict=True):
            known = self._db.execute("SELECT commitment FROM data WHERE v = ?", (v,)).fetchone()
            if known is None:
                self._db.execute("INSERT INTO data VALUES (?, ?)", (v, commitment))
                self._log.append("data", {"virtual_worker": v, "commitment": commitment.hex()})
            elif known[0] != commitment:
                raise EvidenceError(
                    "data_changed",
                    f"the examples of virtual worker {v} are not the ones that this run began with: "
                    f"the commitment to them was {known[0].hex()}, now {commitment.hex()}",
                    "Start a new run: it draws fresh noise and is charged in full.",
                )
            self._db.execute("INSERT OR IGNORE INTO opened VALUES (?, ?)", (body.member_id, v))

    def require_opened(self, hosting: Mapping[str, tuple[int, ...]]) -> None:
        """Require that every host has committed to the slices it is to compute on.

        Guarantee: no roster lets a member compute on other examples than the run began with.

        Raises:
            EvidenceError: ``data_unknown``.
        """
        opened = set(self._db.execute("SELECT member_id, v FROM opened"))
        for member_id, virtual_workers in hosting.items():
            if missing := [v for v in virtual_workers if (member_id, v) not in opened]:
                raise EvidenceError("data_unknown", f"{member_id} has not said what the examples of {missing} are")
