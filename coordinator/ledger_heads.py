"""A ledger's head as a signed line that can be kept elsewhere: in a witness, or at the end of an exported chain.

The holder of such a line can show later that the ledger once had this entry. A ledger that was put back to a time
before it, or continued differently, cannot produce it.
"""

from typing import ClassVar

from attestation.keys import IdentityKey
from attestation.messages import Envelope, Message, open_envelope, parse, seal
from coordinator.ledger_entries import Head
from metrics.errors import BudgetError


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
    return open_envelope(LedgerHead, Envelope(parsed.head, parsed.signature), public_key)


def rolled_back(source: str, pinned: Head, found: bytes | None) -> BudgetError:
    """Build the refusal of a ledger behind or beside a head kept elsewhere. ``found`` is its own hash there."""
    return BudgetError(
        "ledger_rolled_back",
        f"{source} holds the ledger's entry {pinned.sequence} with hash {pinned.hash.hex()}; the ledger has "
        f"{found.hex() if found else 'no such entry'}.",
        "Put the ledger's newest state back; an older one forgets what was spent.",
    )
