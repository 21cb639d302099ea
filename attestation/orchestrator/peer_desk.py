"""The calls of the evidence service for a peer at the other end of a channel: plain calls, one at a time.

The desk adds the one decision that only a service can take: that the peer of this channel is the member it speaks for
(`attestation/trust/channel.py`). It knows nothing of gRPC.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NoReturn

from cryptography import x509
from pydantic import JsonValue

from raycloak.attestation.appraisal.appraisal import Appraisal, open_presentation
from raycloak.attestation.appraisal.eat import claims_set
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import Bytes32, Challenge, EvidenceClass, Presentation, Refusal, Role, refuse
from raycloak.attestation.core.keys import signature_is_valid
from raycloak.attestation.core.messages import Envelope, Message, parse
from raycloak.attestation.core.roster import Roster
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.orchestrator.admissions import AdmittedMember
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.attestation.orchestrator.hosting import Hosting, StaticHosting, TableHosting
from raycloak.attestation.orchestrator.key_desk import Grant, refusals_logged
from raycloak.attestation.orchestrator.orchestrator import RunSession
from raycloak.attestation.orchestrator.run_terms import OBSERVER, OBSERVER_PREFIX
from raycloak.attestation.policy.key_policy import KeyKind
from raycloak.attestation.trust.channel import ChannelBinding, certificate_digest, is_channel_of, read_leaf, server_end
from raycloak.metrics.errors import EvidenceError, ProtocolError

# The orchestrator answers one call at a time, so one reader must not hold it for a whole log.
MAX_LOG_ENTRIES = 1000
_ROLES: frozenset[str] = frozenset({"worker", "aggregator", OBSERVER})


class AttestationResult(Message):
    """The result of an appraisal, for the member it is about.

    Attributes:
        evidence_class: ``simulated`` proves nothing about a machine.
        expires_at: unix seconds after which fresh evidence is needed.
        steps: (step, verdict) in the order of the appraisal.
        claims: under the names of RFC 9711, with one submodule per GPU; see `raycloak.attestation.appraisal.eat`.
    """

    DOMAIN: ClassVar[str] = "raycloak/attestation-result/v1"

    run_id: str
    member_id: str
    role: Role
    evidence_class: EvidenceClass
    evidence_digest: Bytes32
    policy_digest: Bytes32
    expires_at: int
    steps: tuple[tuple[str, str], ...]
    claims: dict[str, JsonValue]

    @classmethod
    def of(cls, run_id: str, appraisal: Appraisal) -> "AttestationResult":
        """Return the result of ``appraisal``."""
        same = ("member_id", "role", "evidence_class", "evidence_digest", "policy_digest", "expires_at", "steps")
        told = {name: getattr(appraisal, name) for name in same}
        return cls(run_id=run_id, claims=claims_set(appraisal), **told)


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer at the other end of a channel.

    Attributes:
        address: host, without the port.
        certificate: of its TLS key.
    """

    address: str
    certificate: x509.Certificate

    @classmethod
    def of(cls, address: str, leaf_pem: bytes) -> "Peer":
        """Read the peer's certificate; EvidenceError ``peer_not_bound`` if there is none."""
        return cls(address, read_leaf(leaf_pem))


class PeerDesk:
    """The calls of the evidence service of one session.

    Args:
        hosting: by default that of the session. A member gets over the service only the keys that the run gave it,
            and the newest roster that was opened.
        attests: roles that are attested over the service.
        again_only: whether a member gets only keys again, of the epoch that its evidence has served before.
        open_log: whether everybody who knows the manifest may read the log, and not only members.
        keys_alone: whether keys are all that is given, as by a key service. It takes no data commitments, and forgets a
            member once it has its keys. So each release rests on evidence that was made for it, and evidence that
            still lasts holds up nobody who takes the member's place, on its machine or under its name.

    Attributes:
        end: the service's end of its channels.
        transaction: makes everything inside it durable together when it ends.
    """

    def __init__(
        self,
        session: RunSession,
        hosting: Hosting | StaticHosting | None = None,
        *,
        attests: tuple[Role, ...] = ("worker", "aggregator", OBSERVER),
        again_only: bool = False,
        open_log: bool = True,
        keys_alone: bool = False,
    ) -> None:
        self.end = server_end(session.run.identity)
        table = TableHosting(hosting, session) if isinstance(hosting, StaticHosting) else hosting
        self.hosting: Hosting = table or session.hosting
        self.transaction = session.run.books.state.transaction
        self._session = session
        self._admissions = session.admission
        self._log = session.run.books.log
        self._refusals = session.run.books.refusals
        self._attests = attests
        self._again_only = again_only
        self._open_log = open_log
        self._keys_alone = keys_alone

    def challenge(self, peer: Peer, member_id: str, role: str, identity_key: bytes) -> Challenge:
        """Issue a nonce that only ``identity_key`` can use, if it certified the peer's end of the channel.

        While a member's evidence is valid, its name is challenged over its own channels alone. The names of observers,
        and no others, begin with ``observer-``, so no observer can block another member's name.

        Raises:
            EvidenceError: ``peer_not_bound``, or ``release_denied`` for a role that is not attested here.
            ProtocolError: ``malformed``.
        """
        is_name = 1 <= len(member_id) <= 200 and member_id.startswith(OBSERVER_PREFIX) == (role == OBSERVER)
        if role not in _ROLES or not is_name:
            raise ProtocolError("malformed", "a challenge is for a role of the protocol and a name that fits it")
        known = next((each for each in self._attests if each == role), None)
        if known is None:
            raise EvidenceError("release_denied", f"this service attests no {role}")
        if not is_channel_of(peer.certificate, identity_key):
            refuse(Refusal.PEER_NOT_BOUND, "the announced identity key did not certify this channel")
        if self._is_taken(member_id, identity_key):
            refuse(Refusal.PEER_NOT_BOUND, f"'{member_id}' is a member with another identity key")
        return self._admissions.challenge(member_id, known, identity_key)

    def attest(self, peer: Peer, envelope: Envelope, channel_signature: bytes) -> AttestationResult:
        """Appraise and admit, as `Admissions.admit`, over the peer's own channel.

        Guarantee: evidence is refused unless it comes over a channel that its identity key certified and signed. Its
        nonce stays unused then, so a relay cannot spend it.

        Raises:
            EvidenceError: ``peer_not_bound``, or as ``admit``.
        """
        try:
            presentation = open_presentation(envelope)
        except EvidenceError as refusal:
            # In nobody's name.
            self._log_refusal("", refusal.code)
            raise
        binding = ChannelBinding(
            presentation=digest(envelope.body),
            server_certificate=self.end.certificate,
            client_certificate=certificate_digest(peer.certificate),
        )
        certified = is_channel_of(peer.certificate, presentation.identity_key)
        signed = signature_is_valid(presentation.identity_key, binding.signed_bytes(), channel_signature)
        if not (certified and signed):
            self._refuse(presentation, "came over a channel that its identity key does not vouch for")
        if self._is_taken(presentation.member_id, presentation.identity_key):
            self._refuse(presentation, "does not belong to the member of this name")
        known = self._admissions.find(presentation.member_id)
        is_member = known is not None and known.presentation.identity_key == presentation.identity_key
        with self._refusals.asked_by("member" if is_member else "stranger"):
            return AttestationResult.of(self._session.run.run_id, self._admissions.admit(envelope))

    def grant_keys(
        self, peer: Peer, member_id: str, epoch: int, virtual_workers: tuple[int, ...], seen: int = 0
    ) -> Grant:
        """Grant the keys of the virtual workers that the peer names, or of all that it hosts.

        :meth:`proved` turns the grant into an answer.

        Args:
            seen: as in `KeyDesk.release`.

        Raises:
            EvidenceError: ``peer_not_bound``, or ``release_denied`` if it names one that it does not host, or as
                `KeyDesk.release`.
        """
        logged = partial(refusals_logged, self._refusals, self.transaction, member_id, KeyKind.VIRTUAL_WORKER)
        with self._refusals.asked_by("stranger"), logged():
            member = self._member(peer, member_id)
        with self._refusals.asked_by("member"):
            with logged():
                if self._again_only and member.row.epoch != epoch:
                    refuse(Refusal.RELEASE_DENIED, f"the run has not given '{member_id}' keys of epoch {epoch}")
                wanted = self._wanted(member_id, virtual_workers)
            grant = self._session.keys.grant(member_id, epoch, wanted, seen)
        if self._keys_alone:
            self._admissions.expel(member_id, "has its keys")
        return grant

    def proved(self, grant: Grant) -> KeyRelease:
        """Return the release of a grant; grants that are proved with nothing logged in between share one head."""
        return grant.proved(self._log)

    def roster(self, peer: Peer, member_id: str, data: Envelope | None) -> tuple[Envelope, tuple[Envelope, ...]]:
        """Record ``data``, and return the newest roster and the presentations of its members.

        Raises:
            EvidenceError: ``peer_not_bound``, ``release_denied``, or as `record_data`.
            ProtocolError: ``no_roster`` before the first, or if the peer is neither in it nor an observer.
        """
        role = self._member(peer, member_id).appraisal.role
        if data is not None:
            committed = parse(DataCommitments, data.body)
            if committed.member_id != member_id:
                refuse(Refusal.PEER_NOT_BOUND, f"'{member_id}' sent data commitments of another member")
            if not set(committed.virtual_workers) <= set(self.hosting.hosted(member_id)):
                refuse(Refusal.RELEASE_DENIED, f"'{member_id}' sent data commitments of slices that it does not host")
            if self._keys_alone:
                refuse(Refusal.RELEASE_DENIED, "a key service takes no data commitments")
            self._session.record_data(data)
        envelope = self.hosting.newest_roster()
        members = parse(Roster, envelope.body).members if envelope else ()
        if envelope is None or (role != OBSERVER and member_id not in {member.member_id for member in members}):
            raise ProtocolError("no_roster", f"there is no roster with '{member_id}' in it yet.", "Ask again later.")
        admitted = (self._admissions.find(member.member_id) for member in members)
        return envelope, tuple(each.row.presentation for each in admitted if each is not None)

    def log_lines(self, peer: Peer, member_id: str, start: int, limit: int) -> tuple[tuple[bytes, ...], bytes]:
        """Return at most ``limit`` entries from position ``start``, and the signed head, as lines of an exported log.

        Raises:
            EvidenceError: ``peer_not_bound`` or ``release_denied`` if the log is for members and the peer is none.
        """
        if not self._open_log:
            self._member(peer, member_id)
        return self._log.lines(start, min(limit, MAX_LOG_ENTRIES)), self._log.head().encode()

    def inclusion(self, sequence: int, size: int) -> tuple[int, tuple[bytes, ...]]:
        """Prove that entry ``sequence`` is among the first ``size`` (0: all); return that size, and the hashes.

        Raises:
            ProtocolError: ``log_range`` if it is not.
        """
        return self._proved(self._log.inclusion, sequence, size)

    def consistency(self, old_size: int, size: int) -> tuple[int, tuple[bytes, ...]]:
        """Prove that the first ``size`` entries (0: all) begin with the first ``old_size``, as `inclusion`."""
        return self._proved(self._log.prove_extends, old_size, size)

    def _proved(
        self, prove: Callable[[int, int], tuple[bytes, ...]], of: int, size: int
    ) -> tuple[int, tuple[bytes, ...]]:
        size = size or len(self._log)
        try:
            return size, prove(of, size)
        except ValueError as error:
            raise ProtocolError("log_range", f"{error}") from None

    def _member(self, peer: Peer, member_id: str) -> AdmittedMember:
        admitted = self._admissions.find(member_id)
        if admitted is None:
            raise EvidenceError("release_denied", f"'{member_id}' is not an admitted member")
        if not is_channel_of(peer.certificate, admitted.presentation.identity_key):
            refuse(Refusal.PEER_NOT_BOUND, f"this channel is not one of '{member_id}'")
        if admitted.appraisal.expires_at <= self._session.run.now():
            raise EvidenceError("release_denied", f"the evidence of '{member_id}' expired", "Present fresh evidence.")
        return admitted

    def _wanted(self, member_id: str, virtual_workers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the virtual workers it names, or all it hosts; EvidenceError ``release_denied`` if it hosts others."""
        hosted = tuple(sorted(self.hosting.hosted(member_id)))
        wanted = tuple(sorted(set(virtual_workers))) or hosted
        if not wanted or not set(wanted) <= set(hosted):
            refuse(Refusal.RELEASE_DENIED, f"'{member_id}' hosts {list(hosted)} and asked for {list(wanted)}")
        return wanted

    def _is_taken(self, member_id: str, identity_key: bytes) -> bool:
        """Return whether a member with valid evidence and another identity key has this name."""
        admitted = self._admissions.find(member_id)
        if admitted is None or admitted.presentation.identity_key == identity_key:
            return False
        return admitted.appraisal.expires_at > self._session.run.now()

    def _refuse(self, presentation: Presentation, why: str) -> NoReturn:
        name, code = presentation.member_id, Refusal.PEER_NOT_BOUND
        self._log_refusal(name, code.value)
        refuse(code, f"the evidence of '{name}' {why}")

    def _log_refusal(self, name: str, code: str) -> None:
        with self.transaction(), self._refusals.asked_by("stranger"):
            self._refusals.append("refused", name, code)
