"""Documents that the evidence log names only by a digest, kept so that an auditor can judge them again.

The log says who was admitted under which policy, and which roster was signed. The documents are the evidence, the
vendors' collateral, the policy and the members behind those entries. A document counts only under the digest that an
entry states.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, TypeVar

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.messages import Envelope, Message, parse
from raycloak.attestation.core.roster import RosterMembers
from raycloak.attestation.log.entries import broken, parse_line
from raycloak.attestation.policy.policy import Policy

M = TypeVar("M", bound=Message)

DOCUMENTS_FILE = "documents.jsonl"
"""The name of the exported file, beside the exported log."""

DocumentKind = Literal["presentation", "collateral", "policy", "members"]
Kept = CollateralBundle | Policy | RosterMembers
_DOMAINS = {"collateral": CollateralBundle.DOMAIN, "policy": Policy.DOMAIN, "members": RosterMembers.DOMAIN}


class Document(Message):
    """One document, as a line of the exported file.

    Attributes:
        body: canonical bytes of the message of that kind, as text.
        signature: of a presentation's own identity key; empty for the other kinds, which an entry covers as a whole.
    """

    DOMAIN: ClassVar[str] = "raycloak/evidence-log/document/v1"

    kind: DocumentKind
    body: str
    signature: bytes = b""

    @property
    def name(self) -> bytes:
        """The digest by which entries of the log name it."""
        body = self.body.encode()
        if self.kind == "presentation":
            return digest(body)
        return digest(length_prefixed(_DOMAINS[self.kind], body))

    @property
    def envelope(self) -> Envelope:
        """A presentation as its member sent it."""
        return Envelope(body=self.body.encode(), signature=self.signature)

    @classmethod
    def presentation(cls, envelope: Envelope) -> "Document":
        """Keep the evidence that a member presented."""
        return cls(kind="presentation", body=envelope.body.decode(), signature=envelope.signature)

    @classmethod
    def of(cls, message: Kept) -> "Document":
        """Keep collateral, a policy or the members of a roster."""
        kind: DocumentKind = "members"
        if not isinstance(message, RosterMembers):
            kind = "policy" if isinstance(message, Policy) else "collateral"
        return cls(kind=kind, body=message.encode().decode())

    def open(self, cls: type[M]) -> M:
        """Parse the body; ProtocolError ``malformed`` if it is no such message."""
        return parse(cls, self.body.encode())


def read_documents(lines: Iterable[bytes]) -> Mapping[bytes, Document]:
    """Return the documents in ``lines`` by the digest that names them.

    Raises:
        EvidenceError: ``log_broken`` if a line is no document, or one is there twice.
    """
    found: dict[bytes, Document] = {}
    for number, line in enumerate(lines, 1):
        document = parse_line(Document, line, f"document {number}")
        if found.setdefault(document.name, document) is not document:
            broken(f"document {number} is there twice")
        if document.signature and document.kind != "presentation":
            broken(f"document {number} has a signature that its kind has not")
    return found
