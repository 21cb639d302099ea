"""A worker's way to the data owner's key service: second halves of keys, over a separate channel.

The service is an orchestrator with its own secret, storage, signing key and evidence log. It decides on nothing but
keys. The run's orchestrator decides who hosts what. A second half gives no noise, sampling or tags without the
orchestrator's half. Alone, it opens what the owner's own clients sent. So any worker whose evidence the owner's policy
accepts may have any half, as often as the quotas say.
"""

from collections.abc import Mapping, Sequence

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import ExpectedRelease, VirtualWorkerKeys, open_keys
from raycloak.attestation.log.watch import LogWatch
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.service.client import EvidenceClient
from raycloak.metrics.errors import EvidenceError


def fetch_halves(
    contract: ServiceContract,
    address: str,
    attester: Attester,
    *,
    policy: Policy,
    epoch: int,
    virtual_workers: Sequence[int],
    watch: LogWatch,
    code: bytes = b"",
) -> Mapping[int, VirtualWorkerKeys]:
    """Fetch the owner's halves of ``virtual_workers`` in ``epoch``, for fresh evidence of ``attester``.

    Guarantee: fails closed. The halves are those that ``contract`` commits to, signed and logged by its service.

    Args:
        address: ``host:port`` of the service.
        attester: keys that are shown to no other service.
        watch: the part of the service's log that was seen before.
        code: digest of the run's bundle of code, which the owner's policy may have to list; empty for none.

    Raises:
        EvidenceError: the service's refusal, ``release_denied`` if it does not answer, ``key_package_mismatch`` if
            it answers with other keys than it was asked for, or as `raycloak.attestation.keys.release.open_keys`.
    """
    terms = contract.digest()
    with EvidenceClient(
        address, manifest_digest=terms, orchestrator_key=contract.orchestrator_key, attester=attester
    ) as client:
        client.attest(attester.present(client.challenge(), terms, contract.known_answer, code))
        release = client.release_keys(epoch, virtual_workers, watch.length)
    of = ExpectedRelease(contract.orchestrator, contract.run_id, attester.member_id, terms, policy, watch)
    of_epoch, halves = open_keys(release, of, hpke_key=attester.hpke, key_commitments=contract.key_commitments)
    if (of_epoch, set(halves)) != (epoch, set(virtual_workers)):
        raise EvidenceError("key_package_mismatch", "the key service gave keys of another epoch or virtual worker")
    return halves
