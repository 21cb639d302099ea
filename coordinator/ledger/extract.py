"""An account's extract: all that the ledger holds of one account, and the ledger's statement that this is all of it.

The chain covers every account of a site. An auditor of one run needs one of them. An extract has that account's entries
in full, each with its own signature and place, and nothing of the entries between them. The ledger signs how many there
are up to its head, and the digest of all of them, so none can be left out.

Guarantee: without the ledger's key nobody can make an extract that lacks an entry, or has one that the ledger does not.
Not guaranteed: that the owner of that key has not signed two histories. Only heads kept elsewhere show that.

Epsilon that was moved between accounts is part of both histories, so an extract has every account that its own one
exchanged epsilon with, directly or not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from raycloak.attestation.core.canonical import canonical_json, digest, length_prefixed
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, parse, seal
from raycloak.coordinator.ledger.accounts import named
from raycloak.coordinator.ledger.audit import AuditedChain
from raycloak.coordinator.ledger.entries import (
    CapTransferred,
    Event,
    Head,
    LedgerEntry,
    RunEvent,
    RunRegistered,
    broken,
    check_chain,
)
from raycloak.coordinator.ledger.export import ExportedLedgerEntry, exported_entry
from raycloak.coordinator.ledger.known_data import Learning
from raycloak.metrics.errors import ProtocolError

_LARGEST = 2**63 - 1  # of a sequence, in every database


class AccountStatement(Message):
    """The ledger's statement that so many entries are all that it has of an account, up to its head.

    Attributes:
        account: the one that was asked for; ``accounts`` are all that are stated, in order of their names.
        sequence, hash: the head of the whole chain.
        count: number of the accounts' entries; ``entries`` is the digest of their hashes, see :func:`entries_digest`.
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
        key: the ledger's.
    """
    events = [(entry, entry.event) for entry in entries]
    accounts = _connected(account, [event for _, event in events])
    runs = {event.run_id for _, event in events if isinstance(event, RunRegistered) and event.account in accounts}
    own = [entry for entry, event in events if _concerns(event, accounts, runs)]
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
    return [*(exported_entry(entry).encode() for entry in own), end.encode()]


def check_extract(lines: Sequence[bytes], ledger_key: bytes) -> CheckedExtract:
    """Check an extract as :func:`raycloak.coordinator.ledger.audit.audit` checks a chain.

    Guarantee: returns only if ``ledger_key`` signed every entry and the statement that these are all of its accounts.
    Every charge, cap and change then follows the rules of the ledger.

    Raises:
        BudgetError: ``chain_broken``, naming the first entry that is wrong.
    """
    *body, last = lines or [b""]
    entries = [_entry(line, number) for number, line in enumerate(body, 1)]
    audited = AuditedChain(ledger_key, learning=Learning(whole=False))
    before = Head()
    for entry in entries:
        if entry.sequence <= before.sequence:
            raise broken(entry.sequence, "it stands after a later one")
        if entry.sequence > _LARGEST:
            raise broken(entry.sequence, "no chain is as long")
        follows = before if entry.sequence == before.sequence + 1 else Head(entry.sequence - 1, entry.previous)
        before = check_chain([entry], ledger_key, follows)
        audited.add(entry)
    audited.head = before
    stated = _statement(last, ledger_key, before)
    if (stated.count, stated.entries) != (len(entries), entries_digest([entry.hash for entry in entries])):
        raise broken(
            before.sequence, f"the ledger states {stated.count} entries, which are not the {len(entries)} here"
        )
    if tuple(sorted(audited.accounts)) != stated.accounts or stated.account not in stated.accounts:
        raise broken(before.sequence, f"the statement is of the accounts {', '.join(stated.accounts)}")
    return CheckedExtract(audited, stated, {entry.sequence: entry for entry in entries})


def _statement(line: bytes, ledger_key: bytes, last: Head) -> AccountStatement:
    try:
        end = parse(ExtractEnd, line)
        stated = open_envelope(AccountStatement, Envelope(body=end.statement, signature=end.signature), ledger_key)
    except ProtocolError:
        raise broken(last.sequence + 1, "the extract does not end in a statement that the ledger signed") from None
    if stated.ledger_key != ledger_key:
        raise broken(last.sequence, "the statement is of another ledger")
    beyond = stated.sequence < last.sequence
    if beyond or (stated.sequence == last.sequence and stated.hash != last.hash):
        raise broken(last.sequence, "it is not in the chain that the ledger states")
    return stated


def _entry(line: bytes, number: int) -> LedgerEntry:
    try:
        parsed = parse(ExportedLedgerEntry, line)
    except ProtocolError:
        raise broken(number, f"line {number} of the extract cannot be read") from None
    body = canonical_json(parsed.body)
    return LedgerEntry(parsed.sequence, parsed.previous, parsed.kind, body, parsed.hash, parsed.signature)


def _connected(account: str, events: Iterable[Event]) -> frozenset[str]:
    """Return an account and all that epsilon was moved to or from, directly or not."""
    moves = [{event.source, event.target} for event in events if isinstance(event, CapTransferred)]
    found = {account}
    # Each pass adds an account at least, so there are no more passes than accounts.
    while more := {name for pair in moves if pair & found for name in pair} - found:
        found |= more
    return frozenset(found)


def _concerns(event: Event, accounts: frozenset[str], runs: set[str]) -> bool:
    if isinstance(event, RunRegistered | RunEvent):
        return event.run_id in runs
    return bool(accounts & set(named(event)))
