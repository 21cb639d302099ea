"""Revocations: an operator excludes members or machines from a run in progress, by a command in another process.

They are rows in the state file of the run's orchestrator, which reads them whenever it looks a member up. A revocation
cannot be taken back.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Literal

from raycloak.attestation.files.sqlite import Transactions
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.metrics.errors import ConfigError, EvidenceError

RevokedKind = Literal["member", "platform"]

# Bounds the wait for the lock of the orchestrator, which may be writing or stopped.
BUSY_DEADLINE_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS revocations (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, session TEXT NOT NULL,
    reason TEXT NOT NULL, revoked_at INTEGER NOT NULL, logged INTEGER NOT NULL DEFAULT 0
)
"""
# Another member may have the same name in the next session. A platform is one machine for ever.
_REVOKED = (
    "SELECT kind, name, reason FROM revocations "
    "WHERE kind = 'platform' OR session = (SELECT name FROM session) ORDER BY number DESC"
)


def revoke(state_file: Path, kind: RevokedKind, name: str, *, reason: str, now: int) -> None:
    """Take a member, or every member on a platform, off a run. The orchestrator may be running meanwhile.

    Guarantee: once this returns, the revocation is on disk. The run's orchestrator then admits no member that it
    names, releases nothing to it and signs no roster with it.

    Args:
        state_file: of the run's orchestrator.
        name: the member's id, or the platform's in hexadecimal digits.
        reason: for the evidence log.
        now: unix seconds.

    Raises:
        ConfigError: ``run_unknown``, ``member_unknown`` or ``platform_id``.
    """
    if kind == "platform":
        name = _platform(name)
    with closing(_open(state_file, "rw")) as db:
        # The command promises that the revocation is on disk when it returns.
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        db.execute(_SCHEMA)
        if kind == "member":
            # In the transaction of the row, so that the member is one when it is revoked.
            _require_member(db, name)
        row = (kind, name, reason, now)
        session = "(SELECT coalesce(max(name), '') FROM session)"
        columns = "kind, name, session, reason, revoked_at"
        db.execute(f"INSERT INTO revocations ({columns}) VALUES (?, ?, {session}, ?, ?)", row)
        db.execute("COMMIT")


def count_revocations(state_file: Path) -> int:
    """Count the revocations of a run so far, beside its orchestrator; 0 if its state cannot be read from here.

    Only promptness rests on this count: the orchestrator itself refuses revoked members.
    """
    try:
        with closing(_open(state_file, "ro")) as db:
            return int(db.execute("SELECT count(*) FROM revocations").fetchone()[0])
    except (ConfigError, sqlite3.Error):
        return 0


class Revocations:
    """A run's revocations, as its orchestrator sees them.

    Args:
        db: the orchestrator's state.
        transactions: every transaction of ``db``. Nobody can revoke inside one of them, so rows are read once in each.
    """

    def __init__(self, db: sqlite3.Connection, log: EvidenceLog, transactions: Transactions) -> None:
        self._db = db
        self._log = log
        self._transactions = transactions
        self._read: tuple[tuple[int, int], Mapping[tuple[str, str], str]] | None = None
        db.execute(_SCHEMA)

    def find(self, member_id: str, platform_id: bytes) -> EvidenceError | None:
        """Return the refusal of a revoked member, ``member_revoked`` or ``platform_revoked``; None if it may stay."""
        reasons, platform = self._reasons(), platform_id.hex()
        if (reason := reasons.get(("member", member_id))) is not None:
            return _refusal("member", member_id, reason)
        if (reason := reasons.get(("platform", platform))) is not None:
            return _refusal("platform", f"the platform {platform} of {member_id}", reason)
        return None

    def _reasons(self) -> Mapping[tuple[str, str], str]:
        """Return the first reason given, by kind and name."""
        mark = self._transactions.mark
        if mark is not None and self._read is not None and self._read[0] == mark:
            return self._read[1]
        reasons = {(kind, name): reason for kind, name, reason in self._db.execute(_REVOKED).fetchall()}
        self._read = None if mark is None else (mark, reasons)
        return reasons

    def record(self) -> None:
        """Log the revocations not logged yet, in the caller's transaction."""
        columns = "number, kind, name, reason, revoked_at"
        rows = self._db.execute(f"SELECT {columns} FROM revocations WHERE NOT logged ORDER BY number").fetchall()
        for number, kind, name, reason, revoked_at in rows:
            self._log.append("revoked", {"kind": kind, "name": name, "reason": reason, "revoked_at": revoked_at})
            self._db.execute("UPDATE revocations SET logged = 1 WHERE number = ?", (number,))


def _refusal(kind: RevokedKind, what: str, reason: str) -> EvidenceError:
    return EvidenceError(f"{kind}_revoked", f"{what} was revoked: {reason}", "Use another machine in its place.")


def _open(state_file: Path, mode: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(
            f"{state_file.resolve().as_uri()}?mode={mode}", uri=True, timeout=BUSY_DEADLINE_S, isolation_level=None
        )
    except sqlite3.Error:
        raise ConfigError(
            "run_unknown", f"there is no state of a run at {state_file}.", "Check RAYCLOAK_HOME."
        ) from None


def _platform(name: str) -> str:
    try:
        identity = bytes.fromhex(name)
    except ValueError:
        identity = b""
    if not identity:
        raise ConfigError(
            "platform_id",
            f"'{name}' is not a platform id, which consists of hexadecimal digits.",
            "Copy it from the evidence log.",
        )
    return identity.hex()


def _require_member(db: sqlite3.Connection, member_id: str) -> None:
    members = sorted(name for (name,) in db.execute("SELECT member_id FROM members"))
    if member_id not in members:
        known = f"it has {', '.join(members)}" if members else "it has none"
        raise ConfigError(
            "member_unknown",
            f"'{member_id}' is not a member of the run now; {known}.",
            "Name one of them, or the machine: --platform.",
        )
