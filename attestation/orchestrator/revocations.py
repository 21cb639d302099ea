"""Revocations: an operator excludes members, machines or GPUs from a run in progress, by a command in another process.

They are rows in the state file of the run's orchestrator, which reads them whenever it looks a member up. A revocation
cannot be taken back.
"""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, Literal

from raycloak.attestation.appraisal.appraisal import Appraisal
from raycloak.attestation.files.sqlite import Transactions
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.metrics.errors import ConfigError, EvidenceError

RevokedKind = Literal["member", "platform", "gpu"]
# Bytes of the ids that evidence gives: a TDX platform; a masked SEV-SNP guest, its chip; a GPU's key (SHA-384).
ID_BYTES: Final[Mapping[RevokedKind, tuple[int, ...]]] = {"platform": (16, 32, 64), "gpu": (48,)}

_WORDS: Final[Mapping[RevokedKind, str]] = {"member": "member", "platform": "platform", "gpu": "GPU"}
# Bounds the wait for the lock of the orchestrator, which may be writing or stopped.
BUSY_DEADLINE_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS revocations (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, session TEXT NOT NULL,
    reason TEXT NOT NULL, revoked_at INTEGER NOT NULL, logged INTEGER NOT NULL DEFAULT 0
)
"""
# Another member may have the same name in the next session. Platforms and GPUs are what they are for ever.
_REVOKED = (
    "SELECT kind, name, reason FROM revocations "
    "WHERE kind != 'member' OR session = (SELECT name FROM session) ORDER BY number DESC"
)


def revoke(state_file: Path, kind: RevokedKind, name: str, *, reason: str, now: int) -> tuple[str, ...]:
    """Take a member, or every member with a platform or GPU, off a run. The orchestrator may be running meanwhile.

    Guarantee: once this returns, the revocation is on disk. The run's orchestrator then admits no member that it
    names, releases nothing to it and signs no roster with it.

    Args:
        state_file: of the run's orchestrator.
        name: the member's id, or that of the platform or GPU in hexadecimal digits.
        reason: for the evidence log.
        now: unix seconds.

    Returns:
        The members that it names: all that were ever admitted with that platform or GPU.

    Raises:
        ConfigError: ``run_unknown``, ``member_unknown``, ``platform_id`` or ``gpu_id``; ``revokes_nobody`` if no member
            of the run was ever admitted with that id. Nothing is revoked then.
    """
    if kind != "member":
        name = _identity(kind, name)
    with closing(_open(state_file, "rw")) as db:
        # The command promises that the revocation is on disk when it returns.
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        db.execute(_SCHEMA)
        # In the transaction of the row, so that the member is one when it is revoked.
        hit = _named_member(db, name) if kind == "member" else _admitted_with(db, kind, name)
        row = (kind, name, reason, now)
        session = "(SELECT coalesce(max(name), '') FROM session)"
        columns = "kind, name, session, reason, revoked_at"
        db.execute(f"INSERT INTO revocations ({columns}) VALUES (?, ?, {session}, ?, ?)", row)
        db.execute("COMMIT")
    return hit


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

    def find(self, member: Appraisal) -> EvidenceError | None:
        """Return the refusal of a revoked member: ``member_revoked``, ``platform_revoked`` or ``gpu_revoked``.

        None if it may stay.
        """
        reasons = self._reasons()
        for kind, name in revocable_names(member):
            if (reason := reasons.get((kind, name))) is not None:
                what = member.member_id if kind == "member" else f"the {_WORDS[kind]} {name} of {member.member_id}"
                return EvidenceError(f"{kind}_revoked", f"{what} was revoked: {reason}", "Use another in its place.")
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


def revocable_names(member: Appraisal) -> tuple[tuple[RevokedKind, str], ...]:
    """Return every name by which a revocation can reach the member."""
    return (
        ("member", member.member_id),
        ("platform", member.platform_id.hex()),
        *(("gpu", gpu.platform_id.hex()) for gpu in member.gpus),
    )


def _open(state_file: Path, mode: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(
            f"{state_file.resolve().as_uri()}?mode={mode}", uri=True, timeout=BUSY_DEADLINE_S, isolation_level=None
        )
    except sqlite3.Error:
        raise ConfigError(
            "run_unknown", f"there is no state of a run at {state_file}.", "Check RAYCLOAK_HOME."
        ) from None


def _identity(kind: RevokedKind, name: str) -> str:
    """Return the id in the form of the evidence log; one of another length can name nobody."""
    try:
        identity = bytes.fromhex(name)
    except ValueError:
        identity = b""
    if len(identity) not in ID_BYTES[kind]:
        sizes = " or ".join(str(2 * size) for size in ID_BYTES[kind])
        raise ConfigError(
            f"{kind}_id",
            f"'{name}' is not the id of a {_WORDS[kind]}, which has {sizes} hexadecimal digits.",
            "Copy it from an entry 'admitted' of the evidence log.",
        )
    return identity.hex()


def _named_member(db: sqlite3.Connection, member_id: str) -> tuple[str, ...]:
    members = sorted(name for (name,) in db.execute("SELECT member_id FROM members"))
    if member_id not in members:
        known = f"it has {', '.join(members)}" if members else "it has none"
        raise ConfigError(
            "member_unknown",
            f"'{member_id}' is not a member of the run now; {known}.",
            "Name one of them, or the machine: --platform.",
        )
    return (member_id,)


def _admitted_with(db: sqlite3.Connection, kind: RevokedKind, name: str) -> tuple[str, ...]:
    """Return the members that were ever admitted with that platform or GPU, by the evidence log."""
    # The log's bodies are canonical JSON. The digits narrow the search, and the field decides.
    query = "SELECT body FROM log_entries WHERE kind = 'admitted' AND instr(body, CAST(? AS BLOB))"
    entries = [json.loads(body) for (body,) in db.execute(query, (name,))]
    members = {e["member_id"] for e in entries if name in (e["gpus"] if kind == "gpu" else [e["platform_id"]])}
    if not members:
        raise ConfigError(
            "revokes_nobody",
            f"no member of this run was ever admitted with the {_WORDS[kind]} {name}.",
            "Compare it with the entries 'admitted' of the evidence log. Machines that the run has not met are kept "
            "out by the policy.",
        )
    return tuple(sorted(members))
