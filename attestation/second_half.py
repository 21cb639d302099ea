"""The worker's side of a key service: it fetches second halves of keys over a channel of its own."""

from collections.abc import Mapping, Sequence

from attestation.attester import Attester
from attestation.client import EvidenceClient
from attestation.key_release import ReleaseTerms, VirtualWorkerKeys, open_keys
from attestation.log_watch import LogWatch
from attestation.policy import Policy
from attestation.service_contract import ServiceContract
from metrics.errors import EvidenceError


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
            it answers with other keys than it was asked for, or as `attestation.key_release.open_keys`.
    """
    terms = contract.digest()
    with EvidenceClient(
        address, manifest_digest=terms, orchestrator_key=contract.orchestrator_key, attester=attester
    ) as client:
        client.attest(attester.present(client.challenge(), terms, contract.known_answer))
        release = client.release_keys(epoch, virtual_workers, watch.length)
    of = ReleaseTerms(contract.orchestrator, contract.run_id, attester.member_id, terms, policy, watch)
    of_epoch, halves = open_keys(release, of, hpke_key=attester.hpke, key_commitments=contract.key_commitments)
    if (of_epoch, set(halves)) != (epoch, set(virtual_workers)):
        raise EvidenceError("key_package_mismatch", "the key service gave keys of another epoch or virtual worker")
    return halves
