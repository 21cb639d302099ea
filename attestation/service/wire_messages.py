"""Converts between signed envelopes and the messages of `attestation/service/evidence.proto`. Signed bytes stay
unchanged."""

from typing import Final

from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.service import evidence_pb2 as wire

# The releases that come with one of a run's keys.
_BESIDE: Final = ("slices", "evaluation")


def to_wire(envelope: Envelope) -> wire.SignedMessage:
    """Convert an envelope for the wire."""
    return wire.SignedMessage(body=envelope.body, signature=envelope.signature)


def from_wire(message: wire.SignedMessage) -> Envelope:
    """Convert an envelope that arrived. Nothing of it is verified."""
    return Envelope(body=message.body, signature=message.signature)


def release_to_wire(release: KeyRelease) -> wire.ReleaseKeysReply:
    """Convert a release for the wire."""
    beside = {name: release_to_wire(found) for name in _BESIDE if (found := getattr(release, name)) is not None}
    package = to_wire(release.package)
    return wire.ReleaseKeysReply(package=package, proof=release.proof, extends=release.extends, **beside)


def release_from_wire(reply: wire.ReleaseKeysReply) -> KeyRelease:
    """Convert a release that arrived. Nothing of it is verified."""
    beside = {name: release_from_wire(getattr(reply, name)) for name in _BESIDE if reply.HasField(name)}
    return KeyRelease(package=from_wire(reply.package), proof=reply.proof, extends=tuple(reply.extends), **beside)
