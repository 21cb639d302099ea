"""The append-only, hash-chained record of every decision about evidence, rosters and keys.

Guarantee: each entry's hash covers run, position, the previous hash, kind and the full body. Whoever holds a signed
head can tell whether any earlier entry was changed, removed, inserted or moved.
Not guaranteed: that the newest entries were not cut off, unless a later head is kept elsewhere.
"""

import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import JsonValue

from attestation.canonical import canonical_json, digest, length_prefixed
from attestation.keys import IdentityKey
from attestation.messages import Envelope, Message, open_envelope, parse, seal
from metrics.errors import EvidenceError, ProtocolError

M = TypeVar("M", bound=Message)

_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS evidence_log (
        run_id TEXT NOT NULL,
        sequence INTEGER NOT NULL,
        kind TEXT NOT NULL,
        body BLOB NOT NULL,
        previous BLOB NOT NULL,
        hash BLOB NOT NULL,
        PRIMARY KEY (run_id, sequence)
    ) WITHOUT ROWID
    """,
    """
    CREATE TRIGGER IF NOT EXISTS evidence_log_keeps_entries BEFORE UPDATE ON evidence_log
    BEGIN SELECT RAISE(ABORT, 'the evidence log is append-only'); END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS evidence_log_keeps_all BEFORE DELETE ON evidence_log
    BEGIN SELECT RAISE(ABORT, 'the evidence log is append-only'); END
    """,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision.

    Attributes:
        sequence: position from 0.
        body: canonical JSON.
        previous, hash: 32 bytes; the hash is SHA-256 over run, sequence, previous, kind and body.
    """

    sequence: int
    kind: str
    body: bytes
    previous: bytes
    hash: bytes

    @property
    def content(self) -> dict[str, Any]:
        """The body, parsed."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed


class LogHead(Message):
    """What the log's owner signs: so many entries, and the hash of the last one."""

    DOMAIN: ClassVar[str] = "raycloak/evidence-log/head/v1"

    run_id: str
    length: int
    hash: bytes


class ExportedEntry(Message):
    """An entry as a line of an exported log."""

    DOMAIN: ClassVar[str] = "raycloak/evidence-log/line/v1"

    sequence: int
    kind: str
    body: dict[str, JsonValue]
    previous: bytes
    hash: bytes


class ExportedHead(Message):
    """The last line of an exported log."""

    DOMAIN: ClassVar[str] = "raycloak/evidence-log/last-line/v1"

    head: bytes
    signature: bytes


class EvidenceLog:
    """The log of one run, in a SQLite database that its owner opens.

    Nothing here commits: an entry and what it records become durable in the owner's transaction, or neither does.

    Raises:
        EvidenceError: ``log_broken`` if the entries found in the database are not a chain.
    """

    def __init__(self, connection: sqlite3.Connection, run_id: str, key: IdentityKey) -> None:
        self._connection = connection
        self._run_id = run_id
        self._key = key
        for statement in _SCHEMA:
            connection.execute(statement)
        previous = _genesis(run_id)
        for sequence, entry in enumerate(self.entries()):
            _check_entry(entry, run_id, sequence, previous)
            previous = entry.hash

    def append(self, kind: str, body: Mapping[str, JsonValue]) -> Entry:
        """Add a decision; ``body`` must be JSON without NaN. It is durable when the caller's transaction commits."""
        length, previous = self._tip()
        encoded = canonical_json(dict(body))
        entry = Entry(length, kind, encoded, previous, _entry_hash(self._run_id, length, previous, kind, encoded))
        values = (self._run_id, length, kind, encoded, previous, entry.hash)
        self._connection.execute("INSERT INTO evidence_log VALUES (?, ?, ?, ?, ?, ?)", values)
        return entry

    def head(self) -> Envelope:
        """The signed :class:`LogHead` over all entries so far."""
        return seal(self.position(), self._key)

    def entries(self) -> Iterator[Entry]:
        """All entries in order."""
        query = "SELECT sequence, kind, body, previous, hash FROM evidence_log WHERE run_id = ? ORDER BY sequence"
        with closing(self._connection.execute(query, (self._run_id,))) as cursor:
            for row in cursor:
                yield Entry(*row)

    def lines(self, start: int, limit: int) -> tuple[bytes, ...]:
        """At most ``limit`` entries from position ``start``, each as a line of an exported log."""
        query = (
            "SELECT sequence, kind, body, previous, hash FROM evidence_log WHERE run_id = ? AND sequence >= ? "
            "ORDER BY sequence LIMIT ?"
        )
        rows = self._connection.execute(query, (self._run_id, min(start, 2**62), limit)).fetchall()
        return tuple(_line(Entry(*row)) for row in rows)

    def head_line(self) -> bytes:
        """The signed head, as the last line of an exported log."""
        head = self.head()
        return ExportedHead(head=head.body, signature=head.signature).encode()

    def newest(self, kind: str) -> Iterator[Entry]:
        """The entries of one kind, newest first."""
        query = (
            "SELECT sequence, kind, body, previous, hash FROM evidence_log WHERE run_id = ? AND kind = ? "
            "ORDER BY sequence DESC"
        )
        with closing(self._connection.execute(query, (self._run_id, kind))) as cursor:
            for row in cursor:
                yield Entry(*row)

    def position(self) -> LogHead:
        """The head, unsigned."""
        length, tip = self._tip()
        return LogHead(run_id=self._run_id, length=length, hash=tip)

    def hash_at(self, length: int) -> bytes | None:
        """The hash of the last of the first ``length`` entries; None if there are fewer, or ``length`` is 0."""
        query = "SELECT hash FROM evidence_log WHERE run_id = ? AND sequence = ?"
        row = self._connection.execute(query, (self._run_id, length - 1)).fetchone()
        return bytes(row[0]) if row else None

    def export(self, path: Path) -> None:
        """Write the log to ``path`` as JSON lines, the signed head as the last one. The file appears as a whole."""
        head = self.head_line()
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with draft.open("xb") as file:
                for entry in self.entries():
                    file.write(_line(entry) + b"\n")
                file.write(head + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def _tip(self) -> tuple[int, bytes]:
        """Number of entries, and the hash the next one builds on; read anew, so a rollback leaves no trace here."""
        query = "SELECT sequence, hash FROM evidence_log WHERE run_id = ? ORDER BY sequence DESC LIMIT 1"
        with closing(self._connection.execute(query, (self._run_id,))) as cursor:
            row = cursor.fetchone()
        return (row[0] + 1, row[1]) if row else (0, _genesis(self._run_id))


def verify_exported_log(path: Path, public_key: bytes) -> int:
    """Check an exported log against the public key of its owner; returns the number of entries.

    Guarantee, Raises: as :func:`read_exported_log`.
    """
    return len(read_exported_log(path, public_key))


def read_exported_log(path: Path, public_key: bytes) -> tuple[Entry, ...]:
    """The entries of an exported log, checked against the public key of its owner.

    Guarantee: returns only if every line is an entry in its place of the chain that ``public_key`` signed as a whole.

    Raises:
        EvidenceError: ``log_broken``; the message names the first entry that is not in its place, or the head.
    """
    try:
        *lines, last = path.read_bytes().splitlines()
    except (OSError, ValueError):
        _broken(f"{path} cannot be read or is empty")
    head_line = _parse_line(ExportedHead, last, "the signed head")
    claimed = _parse_line(LogHead, head_line.head, "the signed head")
    entries = tuple(_read_line(line, sequence) for sequence, line in enumerate(lines))
    previous = _genesis(claimed.run_id)
    for sequence, entry in enumerate(entries):
        _check_entry(entry, claimed.run_id, sequence, previous)
        previous = entry.hash
    try:
        head = open_envelope(LogHead, Envelope(head_line.head, head_line.signature), public_key)
    except ProtocolError:
        _broken("the head is not signed by the log's owner")
    if (head.length, head.hash) != (len(lines), previous):
        _broken(f"the head is signed over {head.length} entries, which are not the {len(lines)} in the file")
    return entries


def _genesis(run_id: str) -> bytes:
    return digest(length_prefixed("raycloak/evidence-log/genesis/v1", run_id))


def _entry_hash(run_id: str, sequence: int, previous: bytes, kind: str, body: bytes) -> bytes:
    return digest(length_prefixed("raycloak/evidence-log/entry/v1", run_id, sequence, previous, kind, body))


def _check_entry(entry: Entry, run_id: str, sequence: int, previous: bytes) -> None:
    expected = _entry_hash(run_id, sequence, previous, entry.kind, entry.body)
    if (entry.sequence, entry.previous, entry.hash) != (sequence, previous, expected):
        _broken(f"entry {sequence} is not the one that was logged there")


def _line(entry: Entry) -> bytes:
    return ExportedEntry(
        sequence=entry.sequence, kind=entry.kind, body=entry.content, previous=entry.previous, hash=entry.hash
    ).encode()


def _read_line(line: bytes, sequence: int) -> Entry:
    parsed = _parse_line(ExportedEntry, line, f"entry {sequence}")
    return Entry(parsed.sequence, parsed.kind, canonical_json(parsed.body), parsed.previous, parsed.hash)


def _parse_line(cls: type[M], line: bytes, what: str) -> M:
    try:
        return parse(cls, line)
    except ProtocolError:
        _broken(f"{what} cannot be read")


def _broken(message: str) -> NoReturn:
    remedy = "Compare with a head kept elsewhere; decisions from there on cannot be relied on."
    raise EvidenceError("log_broken", f"The evidence log is broken: {message}.", remedy) from None
