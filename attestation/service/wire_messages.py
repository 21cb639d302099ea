"""Converts between signed envelopes and the messages of `attestation/service/evidence.proto`. Signed bytes stay
unchanged."""

from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.service import evidence_pb2 as wire


def to_wire(envelope: Envelope) -> wire.SignedMessage:
    """Convert an envelope for the wire."""
    return wire.SignedMessage(body=envelope.body, signature=envelope.signature)


def from_wire(message: wire.SignedMessage) -> Envelope:
    """Convert an envelope that arrived. Nothing of it is verified."""
    return Envelope(body=message.body, signature=message.signature)


def release_to_wire(release: KeyRelease) -> wire.ReleaseKeysReply:
    """Convert a release for the wire."""
    return wire.ReleaseKeysReply(
        package=to_wire(release.package),
        proof=release.proof,
        slices=release_to_wire(release.slices) if release.slices else None,
        evaluation=release_to_wire(release.evaluation) if release.evaluation else None,
        extends=release.extends,
    )


def release_from_wire(reply: wire.ReleaseKeysReply) -> KeyRelease:
    """Convert a release that arrived. Nothing of it is verified."""
    beside = {
        "slices": _alone(reply.slices) if reply.HasField("slices") else None,
        "evaluation": _alone(reply.evaluation) if reply.HasField("evaluation") else None,
    }
    return _alone(reply).model_copy(update=beside)


def _alone(reply: wire.ReleaseKeysReply) -> KeyRelease:
    return KeyRelease(package=from_wire(reply.package), proof=reply.proof, extends=tuple(reply.extends))
