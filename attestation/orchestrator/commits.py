"""The book of committed steps and their parameters, behind the promise that one run has one result.

The book lives in the state of its orchestrator, and logs every commit in the evidence log.
"""

from typing import ClassVar

from pydantic import JsonValue

from raycloak.attestation.core.messages import Message
from raycloak.attestation.core.roster import Query
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.orchestrator.state import CommitRow, OrchestratorState, SessionId
from raycloak.metrics.errors import ProtocolError


class StepCommit(Message):
    """A finished step, with what it released and the ledger entry that charged it.

    Attributes:
        released_digest: of the released parameters; for a measurement, SHA-256 of its values.
        query: the mechanism that this is a step of.
        ledger_sequence, ledger_hash: position and hash of the ledger's newest entry about the step, its binding.
    """

    DOMAIN: ClassVar[str] = "raycloak/step-commit/v1"

    step: int
    released_digest: bytes
    attempts: int
    ledger_sequence: int
    ledger_hash: bytes
    query: Query = "gradient"


def _commit(row: CommitRow) -> StepCommit:
    step, released_digest, attempts, ledger_sequence, ledger_hash, query = row
    return StepCommit(
        step=step,
        released_digest=released_digest,
        attempts=attempts,
        ledger_sequence=ledger_sequence,
        ledger_hash=ledger_hash,
        query=query,
    )


class CommitBook:
    """The committed steps of one run."""

    def __init__(self, state: OrchestratorState, log: EvidenceLog) -> None:
        self._state = state
        self._log = log

    def steps(self) -> tuple[StepCommit, ...]:
        """Return every step that any session of the run has committed, in order."""
        return tuple(_commit(row) for row in self._state.commits())

    def of(self, step: int) -> StepCommit | None:
        """Return the commit of training step ``step`` in any session; None if it was not committed."""
        known = self._state.commit_of("gradient", step)
        return _commit(known[0]) if known else None

    def record(self, commits: tuple[StepCommit, ...], session: SessionId) -> None:
        """Log steps that ``session`` finished, in a transaction of the caller's; skip those that it has logged.

        Guarantee: a step is committed with one released digest only, in whatever session of the run.

        Raises:
            ProtocolError: ``not_reproducible`` if a step was committed with other parameters; nothing is logged then.
        """
        for commit in commits:
            known = self._state.commit_of(commit.query, commit.step)
            if known is not None and _commit(known[0]).released_digest != commit.released_digest:
                raise _not_reproducible(commit, _commit(known[0]))
            if known is None or known[1] != session.name:
                self._state.keep_commit(_row_of(commit), session)
                self._log.append("reproduced" if known else "committed", _body_of(commit))


def _row_of(commit: StepCommit) -> CommitRow:
    paid = commit.ledger_sequence, commit.ledger_hash
    return commit.step, commit.released_digest, commit.attempts, *paid, commit.query


def _body_of(commit: StepCommit) -> dict[str, JsonValue]:
    return {
        "query": commit.query,
        "step": commit.step,
        "released_digest": commit.released_digest.hex(),
        "attempts": commit.attempts,
        "ledger_sequence": commit.ledger_sequence,
        "ledger_hash": commit.ledger_hash.hex(),
    }


def _not_reproducible(commit: StepCommit, known: StepCommit) -> ProtocolError:
    return ProtocolError(
        "not_reproducible",
        f"{commit.query} step {commit.step} now gives {commit.released_digest.hex()}, but "
        f"{known.released_digest.hex()} were committed.",
        "Use the kind of machine and the library versions of the first execution, or start a new run.",
    )
