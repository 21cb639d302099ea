"""The data owner's key service, and a worker's way to it: second halves of keys, over a separate channel.

The service is an orchestrator with its own secret, storage, signing key and evidence log. It decides on nothing but
keys. The run's orchestrator decides who hosts what. A second half gives no noise, sampling or tags without the
orchestrator's half. Alone, it opens what the owner's own clients sent. So any worker whose evidence the owner's policy
accepts may have any half, as often as the quotas say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.evidence import Challenge, Role
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import ExpectedRelease, VirtualWorkerKeys, open_keys
from raycloak.attestation.log.watch import LogWatch
from raycloak.attestation.orchestrator.key_desk import Grant
from raycloak.attestation.orchestrator.orchestrator import RunSession
from raycloak.attestation.orchestrator.peer_desk import PeerDesk
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.service.client import EvidenceClient
from raycloak.metrics.errors import EvidenceError


@dataclass(frozen=True, slots=True)
class KeyService:
    """The decisions of an orchestrator that only gives keys.

    Guarantee: each release rests on evidence that was made for it. A member is forgotten once it has its keys. So
    evidence that still lasts holds up nobody who takes the member's place, on its machine or under its name.
    """

    session: RunSession

    def challenge(self, member_id: str, role: Role, identity_key: bytes = b"") -> Challenge:
        """Challenge as `Admissions.challenge`; EvidenceError ``release_denied`` for any role but a worker's."""
        if role != "worker":
            raise EvidenceError("release_denied", f"a key service attests workers, and '{member_id}' is none")
        return self.session.admission.challenge(member_id, role, identity_key)

    def grant(self, member_id: str, epoch: int, virtual_workers: tuple[int, ...], seen: int = 0) -> Grant:
        """Grant as `KeyDesk.grant`, once per attestation."""
        grant = self.session.keys.grant(member_id, epoch, virtual_workers, seen)
        self.session.admission.expel(member_id, "has its keys")
        return grant

    def record_data(self, envelope: Envelope) -> None:
        """Refuse: EvidenceError ``release_denied``. Data commitments concern the run, not a key service."""
        raise EvidenceError("release_denied", "a key service takes no data commitments")


def key_service_desk(session: RunSession, virtual_workers: int) -> PeerDesk:
    """Return the desk of a key service of ``virtual_workers``; it has no rosters."""
    desk, service = session.peer_desk(), KeyService(session)
    return replace(
        desk,
        decisions=replace(
            desk.decisions, challenge=service.challenge, grant=service.grant, record_data=service.record_data
        ),
        hosted=lambda member_id: range(virtual_workers),
        newest_roster=lambda: None,
    )


def fetch_halves(
    contract: ServiceContract,
    address: str,
    attester: Attester,
    *,
    policy: Policy,
    epoch: int,
    virtual_workers: Sequence[int],
    watch: LogWatch,
) -> Mapping[int, VirtualWorkerKeys]:
    """Fetch the owner's halves of ``virtual_workers`` in ``epoch``, for fresh evidence of ``attester``.

    Guarantee: fails closed. The halves are those that ``contract`` commits to, signed and logged by its service.

    Args:
        address: ``host:port`` of the service.
        attester: keys that are shown to no other service.
        watch: the part of the service's log that was seen before.

    Raises:
        EvidenceError: the service's refusal, ``release_denied`` if it does not answer, ``key_package_mismatch`` if
            it answers with other keys than it was asked for, or as `raycloak.attestation.keys.release.open_keys`.
    """
    terms = contract.digest()
    with EvidenceClient(
        address, manifest_digest=terms, orchestrator_key=contract.orchestrator_key, attester=attester
    ) as client:
        client.attest(attester.present(client.challenge(), terms, contract.known_answer))
        release = client.release_keys(epoch, virtual_workers, watch.length)
    of = ExpectedRelease(contract.orchestrator, contract.run_id, attester.member_id, terms, policy, watch)
    of_epoch, halves = open_keys(release, of, hpke_key=attester.hpke, key_commitments=contract.key_commitments)
    if (of_epoch, set(halves)) != (epoch, set(virtual_workers)):
        raise EvidenceError("key_package_mismatch", "the key service gave keys of another epoch or virtual worker")
    return halves
