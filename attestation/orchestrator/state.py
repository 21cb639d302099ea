"""The durable state of one run, from which the next incarnation of its orchestrator resumes.

The module hides the SQLite file and its tables. One run has one file. The evidence log and the nonces are in it too, so
that a decision, its record and the nonce it used up are one transaction. State that outlives the run is in the file of
`raycloak.attestation.orchestrator.collateral_memory`.

Guarantee: once a transaction has ended, its writes survive a crash of process and machine (WAL with full sync). If it
has not ended, none of them exist.
Not guaranteed: that an older copy of the file is noticed; compare the log's head with one kept elsewhere.
"""

import sqlite3
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import Query
from raycloak.attestation.files.sqlite import BUSY_DEADLINE_S, Transactions, enter_wal
from raycloak.attestation.files.whole import whole_file
from raycloak.attestation.orchestrator.collateral_memory import FACTS_FILE, FactBook
from raycloak.attestation.orchestrator.documents import Document

_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (
    only INTEGER PRIMARY KEY CHECK (only = 0), name TEXT NOT NULL, manifest BLOB NOT NULL,
    ratchet INTEGER NOT NULL, destroys INTEGER
);
CREATE TABLE IF NOT EXISTS members (
    member_id TEXT PRIMARY KEY, body BLOB NOT NULL, signature BLOB NOT NULL,
    expires_at INTEGER NOT NULL, joined INTEGER NOT NULL, epoch INTEGER, superseded INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS attempts (
    query TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL, PRIMARY KEY (query, step)
);
CREATE TABLE IF NOT EXISTS opened (member_id TEXT NOT NULL, v INTEGER NOT NULL, PRIMARY KEY (member_id, v));
CREATE TABLE IF NOT EXISTS documents (place INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, line BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS data (v INTEGER PRIMARY KEY, commitment BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS commits (
    step INTEGER NOT NULL, released_digest BLOB NOT NULL, attempts INTEGER NOT NULL,
    ledger_sequence INTEGER NOT NULL, ledger_hash BLOB NOT NULL, query TEXT NOT NULL, state_digest BLOB NOT NULL,
    session TEXT NOT NULL,
    PRIMARY KEY (query, step)
);
CREATE TABLE IF NOT EXISTS averages (
    query TEXT NOT NULL, step INTEGER NOT NULL, averaged_digest BLOB NOT NULL, PRIMARY KEY (query, step)
);
"""


@dataclass(frozen=True, slots=True)
class SessionId:
    """One execution of a run: the text that its driver chose, and its manifest's digest. Empty before one begins."""

    name: str = ""
    manifest: bytes = b""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """An admitted member: the presentation that admitted it, and the use of its evidence.

    Attributes:
        expires_at: unix seconds, as the appraisal at its admission said.
        joined: ratchet index at its first admission.
        epoch: the epoch whose keys it was given; None before any.
        superseded: whether it was challenged again since, and so has to present fresh evidence.
    """

    member_id: str
    presentation: Envelope
    expires_at: int
    joined: int
    epoch: int | None = None
    superseded: bool = False


def state_file(directory: Path, run_id: str) -> Path:
    """Return the file of a run in an orchestrator's folder."""
    return directory / f"{run_id}.sqlite"


class OrchestratorState:
    """The file of one run, mode 0600; created if absent.

    Methods that write expect an open :meth:`transaction`.

    Attributes:
        transactions: of ``db``.
        facts: shared by all runs of the folder; a separate file, and no part of a transaction here.
    """

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)  # before SQLite, which would create it readable by others
        self.db = sqlite3.connect(path, timeout=BUSY_DEADLINE_S, isolation_level=None, check_same_thread=False)
        enter_wal(self.db)
        # Stated, because a build of SQLite may have a weaker default.
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.executescript(_SCHEMA)
        self.transactions = Transactions(self.db)
        self.facts = FactBook(path.parent / FACTS_FILE)

    def close(self) -> None:
        """Close the file; the state cannot be used afterwards."""
        self.facts.close()
        self.db.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Open a transaction, or a part of the one that is open, as `Transactions.transaction`."""
        return self.transactions.transaction()

    # --- the session

    def start_session(self, session: SessionId) -> None:
        """Begin a session without members, which replaces the one before."""
        for table in ("session", "members", "opened"):
            self.db.execute(f"DELETE FROM {table}")
        self.db.execute("INSERT INTO session VALUES (0, ?, ?, 0, NULL)", (session.name, session.manifest))

    def is_current(self, session: SessionId) -> bool:
        """Return whether this is the newest session that was started."""
        return self._column(session, "1") is not None

    @property
    def ratchet(self) -> int:
        """Return the number of steps that the newest session has committed, of all queries together."""
        row = self.db.execute("SELECT ratchet FROM session").fetchone()
        return row[0] if row else 0

    def destroys(self, session: SessionId) -> bool | None:
        """Return whether a finished session destroys its secret; None if it is not finished."""
        recorded = self._column(session, "destroys")
        return None if recorded is None else bool(recorded)

    def finish_session(self, session: SessionId, destroys: bool) -> None:
        """Record that a session is finished."""
        # A run that fails early is finished before it has started a session.
        if not self.is_current(session):
            self.start_session(session)
        self.db.execute("UPDATE session SET destroys = ?", (destroys,))

    def _column(self, session: SessionId, name: str) -> int | None:
        query = f"SELECT {name} FROM session WHERE name = ? AND manifest = ?"
        row = self.db.execute(query, (session.name, session.manifest)).fetchone()
        return row[0] if row else None

    # --- members

    def members(self) -> list[MemberRow]:
        """Return all members of the session, in no order."""
        rows = self.db.execute("SELECT * FROM members").fetchall()
        return [MemberRow(name, Envelope(body=body, signature=signed), *rest) for name, body, signed, *rest in rows]

    def keep_member(self, row: MemberRow) -> None:
        """Add a member, or replace its row."""
        shown = (row.member_id, row.presentation.body, row.presentation.signature)
        values = (*shown, row.expires_at, row.joined, row.epoch, row.superseded)
        self.db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def mark_member(self, row: MemberRow) -> None:
        """Change ``epoch`` and ``superseded`` of a member."""
        values = (row.epoch, row.superseded, row.member_id)
        self.db.execute("UPDATE members SET epoch = ?, superseded = ? WHERE member_id = ?", values)

    def drop_member(self, member_id: str) -> None:
        """Forget a member."""
        self.db.execute("DELETE FROM members WHERE member_id = ?", (member_id,))
        self.db.execute("DELETE FROM opened WHERE member_id = ?", (member_id,))

    # --- steps

    def next_attempt(self, query: Query, step: int) -> int:
        """Issue the next attempt of a step of ``query``: the first that was never issued."""
        # Kept over all sessions, because the masks of an attempt must not be used twice.
        issue = "INSERT INTO attempts VALUES (?, ?, 0) ON CONFLICT DO UPDATE SET attempt = attempt + 1"
        return int(self.db.execute(f"{issue} RETURNING attempt", (query, step)).fetchall()[0][0])

    # --- documents

    def keep_document(self, document: Document) -> None:
        """Keep what an entry of the log names by its digest; a repeat changes nothing."""
        row = document.name, document.encode()
        self.db.execute("INSERT OR IGNORE INTO documents (name, line) VALUES (?, ?)", row)

    def export_documents(self, path: Path) -> None:
        """Write all documents to ``path`` as JSON lines, in the order in which they were kept."""
        with whole_file(path) as file:
            for (line,) in self.db.execute("SELECT line FROM documents ORDER BY place"):
                file.write(line + b"\n")
