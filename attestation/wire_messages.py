"""Between signed envelopes and the messages of `attestation/evidence.proto`, whose bytes stay as they were signed."""

from dataclasses import replace

from attestation import evidence_pb2 as wire
from attestation.key_release import KeyRelease
from attestation.messages import Envelope


def to_wire(envelope: Envelope) -> wire.SignedMessage:
    """The envelope as it travels."""
    return wire.SignedMessage(body=envelope.body, signature=envelope.signature)


def from_wire(message: wire.SignedMessage) -> Envelope:
    """The envelope that arrived; nothing of it was verified."""
    return Envelope(message.body, message.signature)


def release_to_wire(release: KeyRelease) -> wire.ReleaseKeysReply:
    """The release as it travels."""
    return wire.ReleaseKeysReply(
        package=to_wire(release.package),
        proof=release.proof,
        slices=release_to_wire(release.slices) if release.slices else None,
        evaluation=release_to_wire(release.evaluation) if release.evaluation else None,
        extends=release.extends,
    )


def release_from_wire(reply: wire.ReleaseKeysReply) -> KeyRelease:
    """The release that arrived; nothing of it was verified."""
    return replace(
        _alone(reply),
        slices=_alone(reply.slices) if reply.HasField("slices") else None,
        evaluation=_alone(reply.evaluation) if reply.HasField("evaluation") else None,
    )


def _alone(reply: wire.ReleaseKeysReply) -> KeyRelease:
    return KeyRelease(from_wire(reply.package), reply.proof, extends=tuple(reply.extends))
