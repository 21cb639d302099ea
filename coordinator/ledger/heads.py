"""A ledger's head: a signed line that can be kept elsewhere, and the links that lead up to it.

A witness keeps such lines, and an exported chain ends in one. Its holder can show later that the ledger once had this
entry. A ledger that was put back to an earlier time, or continued differently, cannot produce it.

The newest entry's signature covers its hash and so, link by link, every entry before it. Checking the links is cheap
enough for every start of a run. The full check, `raycloak.coordinator.ledger.audit.audit`, takes twenty times as long.
"""

import json
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, parse, seal
from raycloak.coordinator.ledger.entries import (
    AccountOpened,
    DataBound,
    DataKnown,
    Head,
    LedgerEntry,
    RunPrepaid,
    RunRegistered,
    StepCharged,
    broken,
    check_chain,
    check_link,
)
from raycloak.coordinator.ledger.known_data import Learning, StatesData
from raycloak.metrics.errors import BudgetError

_STATING_DATA = {kind.DOMAIN for kind in (AccountOpened, DataKnown, RunRegistered, RunPrepaid)}

# Only for types: an auditor's machine has no database library.
if TYPE_CHECKING:
    from raycloak.coordinator.ledger.store import Rows


def check_links(rows: "Rows", public_key: bytes) -> None:
    """Refuse a ledger with a changed, dropped or moved entry, or with tables that count other charges.

    Guarantee: returns only if ``public_key`` signed the content of each entry, in this order. The tables then count the
    same charges as the chain, and name the same data of runs and accounts. Takes 50 us per entry on two busy cores. A
    ledger whose end was cut off, or that was put back as a whole, passes: only a head kept elsewhere shows that.

    Raises:
        BudgetError: ``chain_broken``, naming the entry.
    """
    head, newest = Head(), None
    charges: Counter[tuple[str, str]] = Counter()
    bound: dict[str, int] = {}
    learning = Learning()
    for entry in rows.entries():
        head = check_link(entry, head)
        newest = entry
        if entry.kind == StepCharged.DOMAIN:
            charges[_charged(entry)] += 1
        elif entry.kind == DataBound.DOMAIN:
            bound[json.loads(entry.body)["run_id"]] = entry.sequence
        elif entry.kind in _STATING_DATA:
            event = entry.event
            assert isinstance(event, StatesData), "its kind says so"
            learning.add(entry.sequence, event)
    # The newest signature covers every entry before it, link by link.
    if newest is not None:
        check_chain([newest], public_key, Head(newest.sequence - 1, newest.previous))
    if rows.known() != learning.entries:
        raise broken(head.sequence, "the table of known data disagrees with the chain")
    for row in rows.runs():
        if bound.pop(row.run_id, None) != row.data:
            raise broken(row.sequence, f"the table of runs disagrees with the chain about the data of run {row.run_id}")
        for query, count in row.charged.items():
            if charges.pop((row.run_id, query), 0) != count:
                raise broken(row.sequence, f"the table of charges disagrees with the chain about run {row.run_id}")
    if bound:
        raise broken(head.sequence, f"the table of runs lacks run {next(iter(bound))}")
    if charges:
        lacking = " of run ".join(reversed(next(iter(charges))))
        raise broken(head.sequence, f"the table of charges lacks the {lacking}")


def _charged(entry: LedgerEntry) -> tuple[str, str]:
    """Return run and query. The entry's hash has already shown that the body is the signed one."""
    body = json.loads(entry.body)
    return body["run_id"], body["query"]


class LedgerHead(Message):
    """The ledger's signed statement that its chain has this entry.

    Attributes:
        ledger_key: raw Ed25519 key of the ledger.
        sequence, hash: position and hash of the entry; sequence 0 is the empty chain.
        stated_at: Unix time in seconds, by the ledger's own clock.
    """

    DOMAIN: ClassVar[str] = "raycloak/ledger-head/v1"

    ledger_key: bytes
    sequence: int
    hash: bytes
    stated_at: int

    @property
    def position(self) -> Head:
        """The position and hash alone."""
        return Head(self.sequence, self.hash)


class HeadLine(Message):
    """A :class:`LedgerHead` in its canonical form, and the ledger's signature over it."""

    DOMAIN: ClassVar[str] = "raycloak/ledger-head-line/v1"

    head: bytes
    signature: bytes


def head_line(head: Head, key: IdentityKey, stated_at: int) -> bytes:
    """Return the signed head as one line of canonical JSON, without its line feed."""
    stated = LedgerHead(ledger_key=key.public, sequence=head.sequence, hash=head.hash, stated_at=stated_at)
    envelope = seal(stated, key)
    return HeadLine(head=envelope.body, signature=envelope.signature).encode()


def read_head_line(line: bytes, public_key: bytes) -> LedgerHead:
    """Read the head in a line, after checking that ``public_key`` signed it.

    Raises:
        ProtocolError: ``malformed`` or ``signature``.
    """
    parsed = parse(HeadLine, line)
    return open_envelope(LedgerHead, Envelope(body=parsed.head, signature=parsed.signature), public_key)


def rolled_back(source: str, pinned: Head, found: bytes | None) -> BudgetError:
    """Build the refusal of a ledger behind or beside a head kept elsewhere. ``found`` is its own hash there."""
    return BudgetError(
        "ledger_rolled_back",
        f"{source} holds the ledger's entry {pinned.sequence} with hash {pinned.hash.hex()}; the ledger has "
        f"{found.hex() if found else 'no such entry'}.",
        "Put the ledger's newest state back; an older one forgets what was spent.",
    )
