"""The book of committed steps and their parameters, behind the promise that one run has one result.

The book lives in the state of its orchestrator, and logs every commit in the evidence log.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from pydantic import Field

from raycloak.attestation.core.lineage import ModelPoint, SignedStep
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
        averaged_digest: of the averaged weights after the step; left out of the bytes where none are kept.
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
    averaged_digest: bytes = Field(default=b"", exclude_if=lambda averaged: not averaged)
    released: SignedStep | None = None

    @property
    def model(self) -> ModelPoint:
        """The model after the step."""
        return ModelPoint(parameters=self.released_digest, state=self.state_digest, averaged=self.averaged_digest)

    @property
    def plain(self) -> "StepCommit":
        """The commit without what the aggregators signed."""
        return self.model_copy(update={"released": None})


_COLUMNS: Final = tuple(name for name in StepCommit.model_fields if name not in ("averaged_digest", "released"))
# In a table of their own, which a state file without averages does without.
_FROM: Final = "FROM commits LEFT JOIN averages USING (query, step)"
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)}, COALESCE(averaged_digest, x''), session {_FROM}"


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
        """Return whether a training step was committed with these parameters, or with this average of them."""
        of = f"SELECT 1 {_FROM} WHERE query = 'gradient' AND ? IN (released_digest, averaged_digest)"
        return self._db.execute(of, (parameters,)).fetchone() is not None

    def record(self, commits: tuple[StepCommit, ...], session: SessionId) -> None:
        """Log steps that ``session`` finished, in a transaction of the caller's; skip those that it has logged.

        Guarantee: a step is committed with one released digest only, in whatever session of the run.

        Raises:
            ProtocolError: ``not_reproducible`` if a step was committed with other parameters; nothing is logged then.
        """
        for commit in commits:
            known, newest = self._known(commit.query, commit.step)
            if known is not None and known.model.digests != commit.model.digests:
                raise ProtocolError(
                    "not_reproducible",
                    f"{commit.query} step {commit.step} now gives {commit.model.exported.hex()}, but "
                    f"{known.model.exported.hex()} were committed.",
                    "Use the kind of machine and the library versions of the first execution, or start a new run.",
                )
            if newest != session.name:
                row = (*(getattr(commit, name) for name in _COLUMNS), session.name)
                self._db.execute("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                if commit.averaged_digest:
                    average = commit.query, commit.step, commit.averaged_digest
                    self._db.execute("INSERT OR REPLACE INTO averages VALUES (?, ?, ?)", average)
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
    *own, averaged = row
    return StepCommit(**dict(zip(_COLUMNS, own, strict=True)), averaged_digest=averaged)
