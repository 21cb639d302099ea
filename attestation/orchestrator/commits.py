"""The book of committed steps and their parameters, behind the promise that one run has one result.

The book lives in the state of its orchestrator, and logs every commit in the evidence log.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from raycloak.attestation.core.lineage import SignedStep
from raycloak.attestation.core.messages import Message
from raycloak.attestation.core.roster import Query
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.orchestrator.state import SessionId
from raycloak.metrics.errors import ProtocolError


class StepCommit(Message):
    """A finished step, with what it released and the ledger entry that charged it.

    Attributes:
        released_digest: of the released parameters; for a measurement, SHA-256 of its values.
        query: the mechanism that this is a step of.
        ledger_sequence, ledger_hash: position and hash of the ledger's newest entry about the step, its binding.
        state_digest: of what the update rule keeps after the step; empty of a measurement, and without a lineage.
        released: what the aggregators signed; None without a lineage, and of a commit that the book returns.
    """

    DOMAIN: ClassVar[str] = "raycloak/step-commit/v1"

    step: int
    released_digest: bytes
    attempts: int
    ledger_sequence: int
    ledger_hash: bytes
    query: Query = "gradient"
    state_digest: bytes = b""
    released: SignedStep | None = None

    @property
    def plain(self) -> "StepCommit":
        """The commit without what the aggregators signed."""
        return self.model_copy(update={"released": None})


_COLUMNS: Final = tuple(name for name in StepCommit.model_fields if name != "released")
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)}, session FROM commits"


class CommitBook:
    """The committed steps of one run."""

    def __init__(self, db: sqlite3.Connection, log: EvidenceLog) -> None:
        self._db = db
        self._log = log

    def steps(self) -> tuple[StepCommit, ...]:
        """Return every step that any session of the run has committed, in order."""
        return tuple(_commit(row[:-1]) for row in self._db.execute(f"{_SELECT} ORDER BY query, step"))

    def of(self, step: int) -> StepCommit | None:
        """Return the commit of training step ``step`` in any session; None if it was not committed."""
        return self._known("gradient", step)[0]

    def gave(self, parameters: bytes) -> bool:
        """Return whether a training step was committed with these parameters."""
        of = "SELECT 1 FROM commits WHERE query = 'gradient' AND released_digest = ?"
        return self._db.execute(of, (parameters,)).fetchone() is not None

    def record(self, commits: tuple[StepCommit, ...], session: SessionId) -> None:
        """Log steps that ``session`` finished, in a transaction of the caller's; skip those that it has logged.

        Guarantee: a step is committed with one released digest only, in whatever session of the run.

        Raises:
            ProtocolError: ``not_reproducible`` if a step was committed with other parameters; nothing is logged then.
        """
        for commit in commits:
            known, newest = self._known(commit.query, commit.step)
            if known is not None and known.released_digest != commit.released_digest:
                raise ProtocolError(
                    "not_reproducible",
                    f"{commit.query} step {commit.step} now gives {commit.released_digest.hex()}, but "
                    f"{known.released_digest.hex()} were committed.",
                    "Use the kind of machine and the library versions of the first execution, or start a new run.",
                )
            if newest != session.name:
                row = (*(getattr(commit, name) for name in _COLUMNS), session.name)
                self._db.execute("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                self._db.execute("UPDATE session SET ratchet = ratchet + 1")
                # The tensors of each range stay out: they are as many as the model's, and its digest is of them.
                ranges = commit.released.ranges if commit.released else ()
                releases = [part.release.model_dump(mode="json") for part in ranges]
                body = commit.model_dump(mode="json", exclude={"released"}) | {"releases": releases}
                self._log.append("reproduced" if known else "committed", body)

    def _known(self, query: Query, step: int) -> tuple[StepCommit | None, str | None]:
        """Return a commit, and the newest session that made it; two None if there is none."""
        row = self._db.execute(f"{_SELECT} WHERE query = ? AND step = ?", (query, step)).fetchone()
        return (_commit(row[:-1]), row[-1]) if row else (None, None)


def _commit(row: Sequence[Any]) -> StepCommit:
    return StepCommit(**dict(zip(_COLUMNS, row, strict=True)))
