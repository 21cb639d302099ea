"""The evidence log's public data: entries, signed heads, and proofs that an entry is under a head.

Guarantee: a head verifies only with both schemes of its owner. A proven entry is in its place in the log that the head
was signed over. The reader has two checks left: that a later head extends an earlier one (:func:`check_extends`, which
needs both), and that nobody else was shown another log.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import JsonValue

from raycloak.attestation.core.canonical import canonical_json, length_prefixed
from raycloak.attestation.core.hybrid_signature import HybridSignature, HybridSigner, SignerPublic
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.log.merkle import leaf_hash, proves_consistency, proves_inclusion
from raycloak.metrics.errors import EvidenceError, ProtocolError

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision.

    Attributes:
        sequence: position from 0.
        body: canonical JSON.
        hash: of its leaf, 32 bytes; see :func:`entry_hash`.
    """

    sequence: int
    kind: str
    body: bytes
    hash: bytes

    @property
    def content(self) -> dict[str, Any]:
        """The body, parsed."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    def check(self, run_id: str, sequence: int) -> None:
        """Raise EvidenceError ``log_broken`` unless this is entry ``sequence`` of ``run_id`` and its hash is right."""
        expected = entry_hash(run_id, sequence, self.kind, self.body)
        if (self.sequence, self.hash) != (sequence, expected):
            broken(f"entry {sequence} is not the one that was logged there")


def entry_hash(run_id: str, sequence: int, kind: str, body: bytes) -> bytes:
    """Return the leaf hash of an entry: RFC 9162's over ``LP(run, sequence, kind, body)``."""
    return leaf_hash(length_prefixed("raycloak/evidence-log/entry/v2", run_id, sequence, kind, body))


class LogHead(Message):
    """The statement that the log's owner signs: a number of entries, and the root of the Merkle tree over them."""

    DOMAIN: ClassVar[str] = "raycloak/evidence-log/head/v2"

    run_id: str
    length: int
    root: bytes

    def sign(self, signer: HybridSigner) -> "SignedHead":
        """Sign this head with both schemes, of which ML-DSA-65 takes about 1 ms."""
        body = self.encode()
        return SignedHead(head=body, signature=signer.sign(length_prefixed(self.DOMAIN, body)))


class SignedHead(Message):
    """A head and its signatures; the last line of an exported log.

    Attributes:
        format: the log's format. Format 1 was a hash chain under an Ed25519 signature.
    """

    DOMAIN: ClassVar[str] = "raycloak/evidence-log/signed-head/v2"

    format: Literal[2] = 2
    head: bytes
    signature: HybridSignature

    def open(self, owner: SignerPublic) -> LogHead:
        """Verify both signatures and return the head; EvidenceError ``log_broken`` unless both are ``owner``'s."""
        signed = length_prefixed(LogHead.DOMAIN, self.head)
        if invalid := self.signature.invalid_parts(signed, owner):
            broken(f"the head is not signed by the log's owner ({', '.join(invalid)})")
        return parse_line(LogHead, self.head, "the signed head")


class ExportedLogEntry(Message):
    """An entry as a line of an exported log."""

    DOMAIN: ClassVar[str] = "raycloak/evidence-log/line/v2"

    sequence: int
    kind: str
    body: dict[str, JsonValue]
    hash: bytes

    @classmethod
    def of(cls, entry: Entry) -> "ExportedLogEntry":
        return cls(sequence=entry.sequence, kind=entry.kind, body=entry.content, hash=entry.hash)

    @property
    def entry(self) -> Entry:
        # The body was canonical when it was hashed, so its bytes come back.
        return Entry(self.sequence, self.kind, canonical_json(self.body), self.hash)


class EntryProof(Message):
    """An entry, the head it is under, and the path from one to the other (RFC 9162 section 2.1.3)."""

    DOMAIN: ClassVar[str] = "raycloak/evidence-log/entry-proof/v2"

    entry: ExportedLogEntry
    path: tuple[bytes, ...]
    head: SignedHead

    def check(self, owner: SignerPublic, run_id: str) -> tuple[Entry, LogHead]:
        """Verify the proof; return the entry and its head.

        Raises:
            EvidenceError: ``log_broken`` if the head is not ``owner``'s over ``run_id``, or has no such entry.
        """
        head, entry = self.head.open(owner), self.entry.entry
        if head.run_id != run_id:
            broken(f"the head is of run {head.run_id}, not {run_id}")
        # First, because the hash of an entry has no other places.
        if not 0 <= entry.sequence < head.length:
            broken(f"the head over {head.length} entries has no entry {entry.sequence}")
        entry.check(run_id, entry.sequence)
        if not proves_inclusion(entry.hash, entry.sequence, head.length, self.path, head.root):
            broken(f"entry {entry.sequence} is not under the head over {head.length} entries")
        return entry, head


def check_extends(old: LogHead, new: LogHead, proof: Sequence[bytes]) -> None:
    """Require that ``proof`` (RFC 9162 section 2.1.4) shows the log of ``new`` to begin with that of ``old``.

    Raises:
        EvidenceError: ``log_broken``.
    """
    if old.run_id != new.run_id or not proves_consistency(old.length, new.length, old.root, new.root, proof):
        broken(f"its {new.length} entries do not begin with the {old.length} of the older head")


def parse_line(cls: type[M], line: bytes, what: str) -> M:
    """Parse the message in ``line``; EvidenceError ``log_broken`` if there is none."""
    try:
        return parse(cls, line)
    except ProtocolError:
        broken(f"{what} cannot be read")


def broken(message: str) -> NoReturn:
    """Refuse a log; EvidenceError ``log_broken``."""
    remedy = "Compare with a head kept elsewhere; decisions from there on cannot be relied on."
    raise EvidenceError("log_broken", f"The evidence log is broken: {message}.", remedy) from None
