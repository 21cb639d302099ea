"""Between signed envelopes and the messages of `attestation/evidence.proto`, whose bytes stay as they were signed."""

from attestation import evidence_pb2 as wire
from attestation.messages import Envelope


def to_wire(envelope: Envelope) -> wire.SignedMessage:
    """The envelope as it travels."""
    return wire.SignedMessage(body=envelope.body, signature=envelope.signature)


def from_wire(message: wire.SignedMessage) -> Envelope:
    """The envelope that arrived; nothing of it was verified."""
    return Envelope(message.body, message.signature)
