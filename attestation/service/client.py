"""A member's side of the evidence service, for workers outside the Ray cluster.

Guarantee: the client talks only to a service whose TLS key is certified by the orchestrator that the manifest names.
Any other server is refused in the handshake, before a byte of evidence leaves. This does not make the content of
answers trustworthy. The caller checks signatures and commitments as it would in a cluster
(`raycloak.attestation.keys.release.open_keys`, `raycloak.attestation.core.roster.open_roster`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import Challenge, Role
from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.log.entries import EntryProof, ExportedLogEntry, SignedHead
from raycloak.attestation.orchestrator.peer_desk import AttestationResult
from raycloak.attestation.service import evidence_pb2 as wire
from raycloak.attestation.service.evidence_pb2_grpc import EvidenceStub
from raycloak.attestation.service.grpc_status import SERVICE_NAME, refusal_in
from raycloak.attestation.service.wire_messages import from_wire, release_from_wire, to_wire
from raycloak.attestation.trust.channel import ChannelBinding, ChannelEnd, client_channel, client_end
from raycloak.metrics.errors import EvidenceError, ProtocolError

DEADLINE_S: Final = 10.0  # the default of `ServiceLimits.deadline_s`: the service ends a call by then
# A roster comes with all members' presentations, which gRPC's default of 4 MiB does not hold.
MAX_MESSAGE_BYTES: Final = 16 * 2**20


class EvidenceClient:
    """One channel to the service of a run.

    Args:
        address: ``host:port``.
        manifest_digest, orchestrator_key: of the run, obtained with its manifest and not from the service.
        attester: the member's keys.
        deadline_s: bounds each call, the handshake included.
        end: a `client_end` of the attester's key, made before the channel. Each channel needs its own.

    Every call raises the service's refusal. Without an answer, or without one from the manifest's orchestrator, it
    raises EvidenceError ``release_denied``.
    """

    def __init__(
        self,
        address: str,
        *,
        manifest_digest: bytes,
        orchestrator_key: bytes,
        attester: Attester,
        deadline_s: float = DEADLINE_S,
        end: ChannelEnd | None = None,
    ) -> None:
        self._address = address
        self._manifest_digest = manifest_digest
        self._attester = attester
        self._deadline_s = deadline_s
        self._end = end or client_end(attester.identity, manifest_digest)
        self._server_certificate = b""
        self.channel = client_channel(address, self._end, orchestrator_key, MAX_MESSAGE_BYTES)
        self._stub: Any = EvidenceStub(self.channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()

    def challenge(self, role: Role = "worker") -> Challenge:
        """Ask for a fresh challenge for this member; ProtocolError ``challenge_mismatch`` if it is for another."""
        request = wire.ChallengeRequest(
            member_id=self._attester.member_id, role=role, identity_key=self._attester.identity.public
        )
        reply = self._call(self._stub.Challenge, request)
        challenge = parse(Challenge, reply.challenge)
        stated = (challenge.member_id, challenge.role, challenge.manifest_digest)
        if stated != (self._attester.member_id, role, self._manifest_digest):
            raise ProtocolError("challenge_mismatch", f"{self._attester.member_id} was sent a challenge not its own")
        self._server_certificate = reply.server_certificate
        return challenge

    def attest(self, presentation: Envelope) -> AttestationResult:
        """Hand in the answer to this client's challenge, bound to this channel."""
        binding = ChannelBinding(
            presentation=digest(presentation.body),
            server_certificate=self._server_certificate,
            client_certificate=self._end.certificate,
        )
        signature = self._attester.identity.sign(binding.signed_bytes())
        request = wire.AttestRequest(presentation=to_wire(presentation), channel_signature=signature)
        return parse(AttestationResult, self._call(self._stub.Attest, request).result)

    def release_keys(self, epoch: int, virtual_workers: Sequence[int] = (), seen: int = 0) -> KeyRelease:
        """Ask for the keys of the hosted virtual workers, or of some, with the proof that the log has the release.

        Args:
            seen: entries under the newest head that this member has; see `raycloak.attestation.log.watch.LogWatch`.
        """
        request = wire.ReleaseKeysRequest(
            member_id=self._attester.member_id, epoch=epoch, virtual_workers=virtual_workers, seen=seen
        )
        return release_from_wire(self._call(self._stub.ReleaseKeys, request))

    def roster(self, data_commitments: Envelope | None = None) -> tuple[Envelope, tuple[Envelope, ...]]:
        """Fetch the newest roster with this member in it, and the presentations of all its members.

        Args:
            data_commitments: this member's statement about its slices; needed once, before a roster can list it.

        Raises:
            ProtocolError: ``no_roster`` while there is none.
        """
        request = wire.RosterRequest(member_id=self._attester.member_id)
        if data_commitments is not None:
            request.data_commitments.CopyFrom(to_wire(data_commitments))
        reply = self._call(self._stub.Roster, request)
        return from_wire(reply.roster), tuple(from_wire(each) for each in reply.presentations)

    def log(self, start: int = 0, limit: int = 1000) -> tuple[tuple[bytes, ...], bytes]:
        """Fetch log entries from position ``start``, and the log's signed head, as lines of an exported log."""
        reply = self._log(start=start, limit=limit)
        return tuple(reply.entries), reply.head

    def prove_entry(self, sequence: int, size: int = 0) -> tuple[EntryProof, int]:
        """Fetch a log entry, and the proof that it is one of the first ``size`` entries, 0 for all.

        Returns: the proof, whose head is the newest, and the size of the tree that its path is for. If that is not
            the head's own size, `raycloak.attestation.log.merkle.proves_inclusion` checks it against a root of that
            size.

        Raises:
            ProtocolError: ``log_range`` if there is no such entry.
        """
        reply = self._log(start=sequence, limit=1, entry=wire.EntryInTree(sequence=sequence, size=size))
        if len(reply.entries) != 1:
            raise ProtocolError("malformed", f"entry {sequence} did not come with its proof")
        entry, head = parse(ExportedLogEntry, reply.entries[0]), parse(SignedHead, reply.head)
        return EntryProof(entry=entry, path=tuple(reply.inclusion.hashes), head=head), reply.inclusion.size

    def prove_growth(self, old_size: int, size: int = 0) -> tuple[tuple[bytes, ...], SignedHead]:
        """Prove that the first ``size`` entries, 0 for all, begin with the first ``old_size``; with the newest head.

        Raises:
            ProtocolError: ``log_range`` if the log has fewer entries.
        """
        reply = self._log(growth=wire.TreeGrowth(old_size=old_size, size=size))
        return tuple(reply.consistency.hashes), parse(SignedHead, reply.head)

    def _log(self, **fields: Any) -> Any:
        return self._call(self._stub.Log, wire.LogRequest(member_id=self._attester.member_id, **fields))

    def is_serving(self) -> bool:
        """Return whether the service reports that it is serving."""
        check = health_pb2_grpc.HealthStub(self.channel).Check
        answer = self._call(check, health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _call(self, method: Callable[..., Any], request: ProtoMessage) -> Any:
        try:
            return method(request, timeout=self._deadline_s)
        except grpc.RpcError as error:
            # Some of gRPC's errors carry no status and no metadata.
            status = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
            refusal = refusal_in(getattr(error, "trailing_metadata", tuple)() or ())
            # How gRPC drops calls when more come than a service looks at.
            if refusal is None and status is grpc.StatusCode.CANCELLED:
                dropped = f"the evidence service at {self._address} dropped a call."
                raise EvidenceError("busy", dropped, "Ask again later.") from None
            raise refusal or EvidenceError(
                "release_denied",
                f"the evidence service at {self._address} gave no answer ({status.name}).",
                "Check address and manifest; without an answer of its orchestrator this worker gets no keys.",
            ) from None
