"""The append-only record of every decision about evidence, rosters and keys: a Merkle log after RFC 9162.

Refusals beyond a budget are not logged but counted in it: see `raycloak.attestation.orchestrator.refusal_log`.

Guarantee: each entry's leaf covers run, position, kind and the full body, and a head covers all leaves in order.
The holder of a signed head can tell whether any earlier entry was changed, removed, inserted or moved. A proof of a few
hashes shows that an entry is under a head, or that a later head extends an earlier one.
Not guaranteed: that the newest entries were not cut off, unless a later head is kept elsewhere.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.hybrid_signature import HybridSigner, SignerPublic
from raycloak.attestation.files.sqlite import Transactions
from raycloak.attestation.files.whole import whole_file
from raycloak.attestation.log import merkle
from raycloak.attestation.log.entries import (
    Entry,
    EntryProof,
    ExportedLogEntry,
    LogHead,
    SignedHead,
    broken,
    entry_hash,
    parse_line,
)

_KEPT_SUBTREES = 4096  # all are dropped at once when so many are in memory
_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS log_entries (
        run_id TEXT NOT NULL,
        sequence INTEGER NOT NULL,
        kind TEXT NOT NULL,
        body BLOB NOT NULL,
        hash BLOB NOT NULL,
        PRIMARY KEY (run_id, sequence)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS log_subtrees (
        run_id TEXT NOT NULL,
        level INTEGER NOT NULL,
        place INTEGER NOT NULL,
        hash BLOB NOT NULL,
        PRIMARY KEY (run_id, level, place)
    ) WITHOUT ROWID
    """,
    *(
        f"""
        CREATE TRIGGER IF NOT EXISTS {table}_{action.lower()} BEFORE {action} ON {table}
        BEGIN SELECT RAISE(ABORT, 'the evidence log is append-only'); END
        """
        for table in ("log_entries", "log_subtrees")
        for action in ("UPDATE", "DELETE")
    ),
)


class EvidenceLog:
    """The log of one run, in a SQLite database that its owner opens.

    Nothing here commits. An entry and the decision it records become durable in the owner's transaction, or neither
    does. The hashes of complete subtrees are stored beside the entries. An append, a head or a proof over n entries
    therefore reads O(log n) hashes.

    Args:
        transactions: every transaction of ``connection``, to tell how long a read value holds. None reads it again each
            time.

    Raises:
        EvidenceError: ``log_broken`` if the entries found in the database do not match its tree.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        run_id: str,
        signer: HybridSigner,
        transactions: Transactions | None = None,
    ) -> None:
        self._connection = connection
        self._run_id = run_id
        self._signer = signer
        self._transactions = transactions
        self._newest: tuple[LogHead, SignedHead] | None = None
        # What was read and appended, for as long as it holds. A length and a head hold until the next transaction,
        # before which another process may have appended. A subtree holds for ever, unless its append is undone.
        self._mark: tuple[int, int] | None = None
        self._length: int | None = None
        self._head: LogHead | None = None
        self._subtrees: dict[tuple[int, int], bytes] = {}
        for statement in _SCHEMA:
            connection.execute(statement)
        # At opening, so that nothing is appended to a log that was changed.
        self._check()

    def append(self, kind: str, body: Mapping[str, JsonValue]) -> Entry:
        """Add a decision. ``body`` must be JSON without NaN. It is durable when the caller's transaction commits."""
        length = len(self)
        encoded = canonical_json(dict(body))
        entry = Entry(length, kind, encoded, entry_hash(self._run_id, length, kind, encoded))
        values = (self._run_id, length, kind, encoded, entry.hash)
        self._connection.execute("INSERT INTO log_entries VALUES (?, ?, ?, ?, ?)", values)
        subtrees = merkle.completed(length, entry.hash, self._subtree)
        # The entries' own hashes are level 0, so only higher levels need rows.
        rows = [(self._run_id, level, length >> level, subtree) for level, subtree in enumerate(subtrees) if level]
        if rows:
            self._connection.executemany("INSERT INTO log_subtrees VALUES (?, ?, ?, ?)", rows)
        if self._transactions is not None:
            self._length, self._head = length + 1, None
            self._remember({(level, length >> level): subtree for level, subtree in enumerate(subtrees)})
        return entry

    def __len__(self) -> int:
        """Return the number of entries. It is read again after a rollback."""
        self._forget()
        if self._length is None:
            last = self._one("SELECT max(sequence) FROM log_entries WHERE run_id = ?", self._run_id)
            self._length = 0 if last is None else int(last) + 1
        return self._length

    def head(self) -> SignedHead:
        """Return the signed :class:`LogHead` over all entries so far. It is signed once until the next append."""
        return self._signed(self.position())

    def entries(self) -> Iterator[Entry]:
        """Yield all entries in order."""
        return self._entries("ORDER BY sequence")

    def lines(self, start: int, limit: int) -> tuple[bytes, ...]:
        """Return at most ``limit`` entries from position ``start``, each as a line of an exported log."""
        # A caller's number may be larger than SQLite's integers.
        found = self._entries("AND sequence >= ? ORDER BY sequence LIMIT ?", min(start, 2**62), limit)
        return tuple(ExportedLogEntry.of(entry).encode() for entry in found)

    def newest(self, kind: str) -> Iterator[Entry]:
        """Yield the entries of one kind, newest first."""
        return self._entries("AND kind = ? ORDER BY sequence DESC", kind)

    def position(self) -> LogHead:
        """Return the head, unsigned."""
        length = len(self)
        if self._head is None:
            self._head = LogHead(run_id=self._run_id, length=length, root=merkle.root(length, self._subtree))
        return self._head

    def root_at(self, length: int) -> bytes | None:
        """Return the root over the first ``length`` entries; None if there are fewer, or ``length`` is not positive."""
        return merkle.root(length, self._subtree) if 0 < length <= len(self) else None

    def prove(self, entry: Entry) -> EntryProof:
        """Prove that ``entry`` is under :meth:`head`; ValueError if it is not in the log."""
        head = self.position()
        path = merkle.inclusion_proof(entry.sequence, head.length, self._subtree)
        return EntryProof(entry=ExportedLogEntry.of(entry), path=path, head=self._signed(head))

    def inclusion(self, sequence: int, length: int) -> tuple[bytes, ...]:
        """Prove that entry ``sequence`` is one of the first ``length``; ValueError if it is not."""
        self._require(length)
        return merkle.inclusion_proof(sequence, length, self._subtree)

    def prove_extends(self, old_length: int, length: int) -> tuple[bytes, ...]:
        """Prove that the first ``length`` entries begin with the first ``old_length``; ValueError if they do not."""
        self._require(length)
        return merkle.consistency_proof(old_length, length, self._subtree)

    def _require(self, length: int) -> None:
        if length > len(self):
            raise ValueError(f"the log has {len(self)} entries, not {length}")

    def export(self, path: Path) -> None:
        """Write the log to ``path`` as JSON lines, the signed head last. The file appears as a whole."""
        head = self.head().encode()
        with whole_file(path) as file:
            for entry in self.entries():
                file.write(ExportedLogEntry.of(entry).encode() + b"\n")
            file.write(head + b"\n")

    def _signed(self, head: LogHead) -> SignedHead:
        # ML-DSA-65 takes a millisecond, so one signature serves until something is appended.
        if self._newest is None or self._newest[0] != head:
            self._newest = head, head.sign(self._signer)
        return self._newest[1]

    def _entries(self, rest: str, *values: str | int) -> Iterator[Entry]:
        query = f"SELECT sequence, kind, body, hash FROM log_entries WHERE run_id = ? {rest}"
        with closing(self._connection.execute(query, (self._run_id, *values))) as cursor:
            for row in cursor:
                yield Entry(*row)

    def _subtree(self, level: int, index: int) -> bytes:
        self._forget()
        if (known := self._subtrees.get((level, index))) is not None:
            return known
        if level == 0:
            subtree = self._one("SELECT hash FROM log_entries WHERE run_id = ? AND sequence = ?", self._run_id, index)
        else:
            query = "SELECT hash FROM log_subtrees WHERE run_id = ? AND level = ? AND place = ?"
            subtree = self._one(query, self._run_id, level, index)
        if subtree is None:
            broken(f"its tree has no subtree {index} of level {level}")
        # Outside a transaction the row is on disk. Inside, somebody has to tell if it is undone.
        if self._transactions is not None or not self._connection.in_transaction:
            self._remember({(level, index): bytes(subtree)})
        return bytes(subtree)

    def _remember(self, subtrees: Mapping[tuple[int, int], bytes]) -> None:
        if len(self._subtrees) >= _KEPT_SUBTREES:
            self._subtrees.clear()
        self._subtrees.update(subtrees)

    def _forget(self) -> None:
        """Forget what another process may have changed since it was read, and what was undone."""
        now = None if self._transactions is None else (self._transactions.begun, self._transactions.undone)
        if now is None or now != self._mark:
            if now and self._mark and now[1] != self._mark[1]:
                self._subtrees.clear()
            self._mark, self._length, self._head = now, None, None

    def _check(self) -> None:
        """Require that the stored tree matches the entries."""
        tree = merkle.MerkleTree()
        for sequence, entry in enumerate(self.entries()):
            entry.check(self._run_id, sequence)
            tree.append(entry.hash)
        expected = {(level, i): each for level, row in enumerate(tree.levels) if level for i, each in enumerate(row)}
        query = "SELECT level, place, hash FROM log_subtrees WHERE run_id = ?"
        with closing(self._connection.execute(query, (self._run_id,))) as cursor:
            stored = {(level, place): bytes(subtree) for level, place, subtree in cursor}
        if stored != expected:
            broken(f"the stored tree does not match its {len(tree)} entries")

    def _one(self, query: str, *values: str | int) -> Any:
        """Return the first column of the first row; None if there is no row."""
        with closing(self._connection.execute(query, values)) as cursor:
            row = cursor.fetchone()
            return row[0] if row else None


class ExportedLog:
    """A verified log from a file, as :func:`read_exported_log` returns it.

    Attributes:
        entries: all entries, in order.
        signed: the signed head, as the file has it.
        head: the same head, opened.
    """

    __slots__ = ("entries", "head", "signed", "tree")

    def __init__(self, entries: tuple[Entry, ...], signed: SignedHead, head: LogHead) -> None:
        self.entries, self.signed, self.head = entries, signed, head
        self.tree = merkle.MerkleTree()
        for entry in entries:
            self.tree.append(entry.hash)

    def prove(self, sequence: int) -> EntryProof:
        """Prove that entry ``sequence`` is under the head of the file; ValueError if there is no such entry."""
        path = merkle.inclusion_proof(sequence, len(self.entries), self.tree.subtree)
        return EntryProof(entry=ExportedLogEntry.of(self.entries[sequence]), path=path, head=self.signed)

    def root_at(self, length: int) -> bytes | None:
        """Return the root over the first ``length`` entries; None if there are fewer, or ``length`` is not positive."""
        return merkle.root(length, self.tree.subtree) if 0 < length <= len(self.entries) else None

    def prove_extends(self, old_length: int) -> tuple[bytes, ...]:
        """Prove that this log begins with the first ``old_length`` of its entries; ValueError if it has fewer."""
        return merkle.consistency_proof(old_length, len(self.entries), self.tree.subtree)


def read_exported_log(path: Path, owner: SignerPublic) -> ExportedLog:
    """Read an exported log and check it against its owner's public keys.

    Guarantee: returns only if every line is an entry in its place of the log that ``owner`` signed as a whole, with
    both schemes.

    Raises:
        EvidenceError: ``log_broken``; the message names the first entry that is out of place, or the head.
    """
    return check_exported_log(_lines(path), owner)


def check_exported_log(exported: Sequence[bytes], owner: SignerPublic) -> ExportedLog:
    """Check the lines of an exported log as :func:`read_exported_log` does."""
    *lines, last = exported or broken("it is empty")
    signed = parse_line(SignedHead, last, "the signed head")
    # Not verified yet: entries are checked first, so that the message names the first wrong one.
    claimed = parse_line(LogHead, signed.head, "the signed head")
    entries = []
    for sequence, line in enumerate(lines):
        entry = parse_line(ExportedLogEntry, line, f"entry {sequence}").entry
        entry.check(claimed.run_id, sequence)
        entries.append(entry)
    log = ExportedLog(tuple(entries), signed, signed.open(owner))
    if (log.head.length, log.head.root) != (len(entries), log.tree.root()):
        broken(f"the head is signed over {log.head.length} entries, which are not the {len(entries)} in the file")
    return log


def read_exported_head(path: Path) -> SignedHead:
    """Return the signed head in the last line of ``path``, unverified. The file may hold a whole log or just a head.

    Raises:
        EvidenceError: ``log_broken``.
    """
    return parse_line(SignedHead, _lines(path)[-1], "the signed head")


def _lines(path: Path) -> list[bytes]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        lines = []
    return lines or broken(f"{path} cannot be read or is empty")
