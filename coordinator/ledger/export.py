"""Copies of the chain as JSON lines, which can be checked without the ledger: an export, or an account's extract.

Each entry is a line with its hash and signature. Bodies are plain JSON. Their bytes are canonical, so nothing is lost.

An export is the whole ledger in one file. Its first line names the public key that signs the first entry. The last line
is the signed head, so that a file whose end was cut off is refused.

An extract is all that the ledger holds of one account, with the ledger's statement that this is all of it. The chain
covers every account of a site, and an auditor of one run needs one of them. An extract has that account's entries and
the rotations of the ledger's key in full, each with its own signature and place, and nothing of the entries between.
The ledger signs how many there are up to its head, and the digest of all of them, so none can be left out.

Guarantee: without the ledger's key nobody can make an extract that lacks an entry, or has one that the ledger does not.
Not guaranteed: that the owner of that key has not signed two histories. Only heads kept elsewhere show that.

Epsilon that was moved between accounts is part of both histories, so an extract has every account that its own one
exchanged epsilon with, directly or not.
"""

import json
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import JsonValue

from raycloak.attestation.core.canonical import canonical_json, digest, length_prefixed
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, parse, seal
from raycloak.attestation.files.whole import whole_file
from raycloak.coordinator.ledger.accounts import named
from raycloak.coordinator.ledger.audit import AuditedChain, audit
from raycloak.coordinator.ledger.entries import (
    CapTransferred,
    Event,
    Head,
    KeyRotated,
    LedgerEntry,
    LedgerHead,
    LedgerKeys,
    RunEvent,
    RunRegistered,
    broken,
    check_entry,
    first_key,
    head_line,
    read_head_line,
)
from raycloak.coordinator.ledger.known_data import Known
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.metrics.file_errors import file_error

_LARGEST = 2**63 - 1  # of a sequence, in every database


class ExportedLedger(Message):
    """The first line of an export."""

    DOMAIN: ClassVar[str] = "raycloak/ledger-export/v1"

    format: Literal["raycloak ledger export 1"] = "raycloak ledger export 1"
    public_key: bytes


class ExportedLedgerEntry(Message):
    """An entry as a line of an export."""

    DOMAIN: ClassVar[str] = "raycloak/ledger-export/entry/v1"

    sequence: int
    previous: bytes
    kind: str
    body: dict[str, JsonValue]
    hash: bytes
    signature: bytes

    @classmethod
    def of(cls, entry: LedgerEntry) -> "ExportedLedgerEntry":
        """Return the message that the line of an entry is."""
        return cls(**{**asdict(entry), "body": json.loads(entry.body)})

    @classmethod
    def read(cls, line: bytes, sequence: int, why: str) -> LedgerEntry:
        """Return the entry that a line is; BudgetError ``chain_broken`` at ``sequence`` if it is none."""
        try:
            read = parse(cls, line)
        except ProtocolError:
            raise broken(sequence, why) from None
        body = canonical_json(read.body)
        return LedgerEntry(read.sequence, read.previous, read.kind, body, read.hash, read.signature)


@dataclass(frozen=True, slots=True)
class CheckedExport:
    """An accepted export: the totals of its chain, and the hash of each entry in order."""

    audited: AuditedChain
    stated: LedgerHead
    hashes: tuple[bytes, ...]

    def hash_at(self, sequence: int) -> bytes | None:
        """Return the hash of the entry at ``sequence``; None if there is none."""
        return self.hashes[sequence - 1] if 0 < sequence <= len(self.hashes) else None


def write_export(path: Path, entries: Iterable[LedgerEntry], first: bytes, key: IdentityKey, stated_at: int) -> Head:
    """Write a chain to ``path``, mode 0600, and return the head it ends in. The file appears as a whole.

    Args:
        first, key: the ledger's first key, and the one that signs now.

    Raises:
        ConfigError: ``export_exists`` if the path exists, ``export_file`` if it cannot be written.
    """
    if path.exists():
        raise ConfigError("export_exists", f"{path} already exists.", "Choose another name, or remove it.")
    head = Head()
    try:
        with whole_file(path, 0o600) as file:
            file.write(ExportedLedger(public_key=first).encode() + b"\n")
            for entry in entries:
                file.write(ExportedLedgerEntry.of(entry).encode() + b"\n")
                head = Head(entry.sequence, entry.hash)
            file.write(head_line(head, key, stated_at) + b"\n")
    except OSError as error:
        raise file_error("export_file", "write", path, error) from None
    return head


def check_export(path: Path) -> CheckedExport:
    """Check an export as :func:`raycloak.coordinator.ledger.audit.audit` checks a ledger.

    Guarantee: returns only if every line is in its place of the chain that the file's public key and its successors
    signed, up to and including the head. The file cannot say whose keys these are: compare one with a key from
    elsewhere.

    Raises:
        BudgetError: ``chain_broken``, naming the first entry that is wrong.
        ConfigError: ``export_file`` if the file cannot be read or is not an export.
    """
    try:
        with path.open("rb") as file:
            lines = (line.removesuffix(b"\n") for line in file)
            try:
                start = parse(ExportedLedger, next(lines, b""))
            except ProtocolError:
                raise ConfigError(
                    "export_file", f"{path} is not an exported ledger.", "It is what `budget export` wrote."
                ) from None
            hashes: list[bytes] = []
            ending: list[bytes] = []
            audited = audit(_entries(lines, hashes, ending), start.public_key)
    except OSError as error:
        raise file_error("export_file", "read", path, error) from None
    head = audited.head
    if len(ending) != 1:
        raise broken(head.sequence + 1, "the file does not end in the signed head")
    try:
        stated = read_head_line(ending[0], audited.keys)
    except ProtocolError:
        raise broken(head.sequence, "the head is not signed by the ledger's key") from None
    if (stated.position, stated.ledger_key) != (head, audited.keys.current):
        raise broken(head.sequence + 1, f"the head is of entry {stated.sequence}, which is not the last one here")
    return CheckedExport(audited, stated, tuple(hashes))


def _entries(lines: Iterator[bytes], hashes: list[bytes], ending: list[bytes]) -> Iterator[LedgerEntry]:
    """Yield the entries. ``hashes`` collects their hashes, and ``ending`` the first other line and all after it."""
    for line in lines:
        # Keys are sorted, so the line of the head begins so and no entry's does.
        if line.startswith(b'{"head":'):
            ending += [line, *lines]
            return
        entry = ExportedLedgerEntry.read(line, len(hashes) + 1, "its line cannot be read")
        hashes.append(entry.hash)
        yield entry


class AccountStatement(Message):
    """The ledger's statement that so many entries are all that it has of an account and of its keys, up to its head.

    Attributes:
        account: the one that was asked for; ``accounts`` are all that are stated, in order of their names.
        sequence, hash: the head of the whole chain.
        count: number of the extract's entries; ``entries`` is the digest of their hashes, see :func:`entries_digest`.
        stated_at: Unix time in seconds, by the ledger's own clock.
    """

    DOMAIN: ClassVar[str] = "raycloak/ledger-account-statement/v1"

    ledger_key: bytes
    account: str
    accounts: tuple[str, ...]
    sequence: int
    hash: bytes
    count: int
    entries: bytes
    stated_at: int


class ExtractEnd(Message):
    """The last line of an extract: an encoded :class:`AccountStatement` and the ledger's signature over it."""

    DOMAIN: ClassVar[str] = "raycloak/ledger-account-extract/v1"

    format: Literal["raycloak account extract 1"] = "raycloak account extract 1"
    signature: bytes
    statement: bytes


@dataclass(frozen=True, slots=True)
class CheckedExtract:
    """An accepted extract: the totals of its accounts, the ledger's statement, and its entries by sequence."""

    audited: AuditedChain
    stated: AccountStatement
    entries: dict[int, LedgerEntry]


def entries_digest(hashes: Sequence[bytes]) -> bytes:
    """Return the digest of the hashes of an extract's entries, in the order of the chain."""
    return digest(length_prefixed("raycloak/ledger-account-entries/v1", *hashes))


def extract_lines(entries: Sequence[LedgerEntry], account: str, key: IdentityKey, stated_at: int) -> list[bytes]:
    """Return the extract of ``account`` from a whole chain, as lines without line feeds.

    Args:
        entries: the chain, which the caller has audited.
        key: the one that signs now.
    """
    accounts = _connected(account, (entry.event for entry in entries))
    own = entries_of(entries, accounts)
    head = Head(entries[-1].sequence, entries[-1].hash) if entries else Head()
    statement = AccountStatement(
        ledger_key=key.public,
        account=account,
        accounts=tuple(sorted(accounts)),
        sequence=head.sequence,
        hash=head.hash,
        count=len(own),
        entries=entries_digest([entry.hash for entry in own]),
        stated_at=stated_at,
    )
    sealed = seal(statement, key)
    end = ExtractEnd(statement=sealed.body, signature=sealed.signature)
    return [*(ExportedLedgerEntry.of(entry).encode() for entry in own), end.encode()]


def check_extract(lines: Sequence[bytes], ledger_key: bytes) -> CheckedExtract:
    """Check an extract as :func:`raycloak.coordinator.ledger.audit.audit` checks a chain.

    Guarantee: returns only if the ledger that has or had the key ``ledger_key`` signed every entry and the statement
    that these are all of its accounts. Every charge, cap and change then follows the rules of the ledger.

    Raises:
        BudgetError: ``chain_broken``, naming the first entry that is wrong.
    """
    *body, last = lines or [b""]
    entries = [
        ExportedLedgerEntry.read(line, number, f"line {number} of the extract cannot be read")
        for number, line in enumerate(body, 1)
    ]
    audited = AuditedChain(LedgerKeys.of((), first_key(entries, ledger_key)), known=Known(whole=False))
    before = Head()
    for entry in entries:
        if entry.sequence <= before.sequence:
            raise broken(entry.sequence, "it stands after a later one")
        if entry.sequence > _LARGEST:
            raise broken(entry.sequence, "no chain is as long")
        follows = before if entry.sequence == before.sequence + 1 else Head(entry.sequence - 1, entry.previous)
        before = check_entry(entry, audited.keys.current, follows)
        audited.add(entry)
    audited.head, keys = before, audited.keys
    try:
        end = parse(ExtractEnd, last)
        stated = open_envelope(AccountStatement, Envelope(body=end.statement, signature=end.signature), keys.current)
    except ProtocolError:
        raise broken(before.sequence + 1, "the extract does not end in a statement that the ledger signed") from None
    if stated.ledger_key != keys.current or ledger_key not in keys:
        raise broken(before.sequence, "the statement is of another ledger")
    beyond = stated.sequence < before.sequence
    if beyond or (stated.sequence == before.sequence and stated.hash != before.hash):
        raise broken(before.sequence, "it is not in the chain that the ledger states")
    if (stated.count, stated.entries) != (len(entries), entries_digest([entry.hash for entry in entries])):
        raise broken(
            before.sequence, f"the ledger states {stated.count} entries, which are not the {len(entries)} here"
        )
    if tuple(sorted(audited.accounts)) != stated.accounts or stated.account not in stated.accounts:
        raise broken(before.sequence, f"the statement is of the accounts {', '.join(stated.accounts)}")
    return CheckedExtract(audited, stated, {entry.sequence: entry for entry in entries})


def _connected(account: str, events: Iterable[Event]) -> frozenset[str]:
    """Return an account and all that epsilon was moved to or from, directly or not."""
    moves = [{event.source, event.target} for event in events if isinstance(event, CapTransferred)]
    found = {account}
    # Each pass adds an account at least, so there are no more passes than accounts.
    while more := {name for pair in moves if pair & found for name in pair} - found:
        found |= more
    return frozenset(found)


def entries_of(entries: Sequence[LedgerEntry], accounts: Set[str]) -> list[LedgerEntry]:
    """Return the entries of a chain that are about some of its accounts, runs that pay from them, or its keys."""
    events = [entry.event for entry in entries]
    runs = {event.run_id for event in events if isinstance(event, RunRegistered) and event.account in accounts}

    def belongs(event: Event) -> bool:
        if isinstance(event, RunEvent):
            return event.run_id in runs
        return isinstance(event, KeyRotated) or not accounts.isdisjoint(named(event))

    return [entry for entry, event in zip(entries, events, strict=True) if belongs(event)]
