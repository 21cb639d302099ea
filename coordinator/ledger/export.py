"""Exports a ledger as one file of JSON lines, which can be checked without the ledger.

The first line names the ledger's public key. Each further line is an entry with its hash and signature. The last line
is the signed head, so that a file whose end was cut off is refused. Bodies are plain JSON. Their bytes are canonical,
so nothing is lost.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import JsonValue

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.files.whole import whole_file
from raycloak.coordinator.ledger.audit import AuditedChain, audit
from raycloak.coordinator.ledger.entries import Head, LedgerEntry, broken
from raycloak.coordinator.ledger.heads import LedgerHead, head_line, read_head_line
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.metrics.file_errors import file_error

M = TypeVar("M", bound=Message)


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


@dataclass(frozen=True, slots=True)
class CheckedExport:
    """An accepted export: the totals of its chain, and the hash of each entry in order."""

    public_key: bytes
    audited: AuditedChain
    stated: LedgerHead
    hashes: tuple[bytes, ...]

    def hash_at(self, sequence: int) -> bytes | None:
        """Return the hash of the entry at ``sequence``; None if there is none."""
        return self.hashes[sequence - 1] if 0 < sequence <= len(self.hashes) else None


def write_export(path: Path, entries: Iterable[LedgerEntry], key: IdentityKey, stated_at: int) -> Head:
    """Write a chain to ``path``, mode 0600, and return the head it ends in. The file appears as a whole.

    Raises:
        ConfigError: ``export_exists`` if the path exists, ``export_file`` if it cannot be written.
    """
    if path.exists():
        raise ConfigError("export_exists", f"{path} already exists.", "Choose another name, or remove it.")
    head = Head()
    try:
        with whole_file(path, 0o600) as file:
            file.write(ExportedLedger(public_key=key.public).encode() + b"\n")
            for entry in entries:
                file.write(exported_entry(entry).encode() + b"\n")
                head = Head(entry.sequence, entry.hash)
            file.write(head_line(head, key, stated_at) + b"\n")
    except OSError as error:
        raise file_error("export_file", "write", path, error) from None
    return head


def check_export(path: Path) -> CheckedExport:
    """Check an export as :func:`raycloak.coordinator.ledger.audit.audit` checks a ledger.

    Guarantee: returns only if every line is in its place of the chain that the file's public key signed, up to and
    including the head. The file cannot say whose key that is: compare it with one from elsewhere.

    Raises:
        BudgetError: ``chain_broken``, naming the first entry that is wrong.
        ConfigError: ``export_file`` if the file cannot be read or is not an export.
    """
    try:
        with path.open("rb") as file:
            lines = (line.removesuffix(b"\n") for line in file)
            start = _parse_line(ExportedLedger, next(lines, b""), path)
            hashes: list[bytes] = []
            ending: list[bytes] = []
            audited = audit(_entries(lines, hashes, ending), start.public_key)
    except OSError as error:
        raise file_error("export_file", "read", path, error) from None
    stated = _stated_head(ending, start.public_key, audited.head)
    return CheckedExport(start.public_key, audited, stated, tuple(hashes))


def _entries(lines: Iterator[bytes], hashes: list[bytes], ending: list[bytes]) -> Iterator[LedgerEntry]:
    """Yield the entries. ``hashes`` collects their hashes, and ``ending`` the first other line and all after it."""
    for line in lines:
        # Keys are sorted, so the line of the head begins so and no entry's does.
        if line.startswith(b'{"head":'):
            ending += [line, *lines]
            return
        try:
            parsed = parse(ExportedLedgerEntry, line)
        except ProtocolError:
            raise broken(len(hashes) + 1, "its line cannot be read") from None
        hashes.append(parsed.hash)
        body = canonical_json(parsed.body)
        yield LedgerEntry(parsed.sequence, parsed.previous, parsed.kind, body, parsed.hash, parsed.signature)


def _stated_head(ending: list[bytes], public_key: bytes, head: Head) -> LedgerHead:
    if len(ending) != 1:
        raise broken(head.sequence + 1, "the file does not end in the signed head")
    try:
        stated = read_head_line(ending[0], public_key)
    except ProtocolError:
        raise broken(head.sequence, "the head is not signed by the ledger's key") from None
    if (stated.position, stated.ledger_key) != (head, public_key):
        raise broken(head.sequence + 1, f"the head is of entry {stated.sequence}, which is not the last one here")
    return stated


def exported_entry(entry: LedgerEntry) -> ExportedLedgerEntry:
    """Return an entry as the message that its line is."""
    return ExportedLedgerEntry(
        sequence=entry.sequence,
        previous=entry.previous,
        kind=entry.kind,
        body=json.loads(entry.body),
        hash=entry.hash,
        signature=entry.signature,
    )


def _parse_line(cls: type[M], line: bytes, path: Path) -> M:
    try:
        return parse(cls, line)
    except ProtocolError:
        raise ConfigError(
            "export_file", f"{path} is not an exported ledger.", "It is what `budget export` wrote."
        ) from None
