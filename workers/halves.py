"""What a worker does about keys in two halves: it fetches the data owner's half itself, and combines."""

from collections.abc import Mapping

from attestation.attester import Attester
from attestation.key_halves import check_contract, combine_halves
from attestation.key_release import VirtualWorkerKeys
from attestation.log_watch import LogWatch
from attestation.policy import Policy
from metrics.errors import EvidenceError
from workers.manifest import Manifest, key_context


def check_key_service(manifest: Manifest) -> None:
    """Require that the key service of ``manifest`` can serve its run, if it names one.

    Raises:
        EvidenceError: ``key_service_mismatch``, as `attestation.key_halves.check_contract`.
    """
    if manifest.key_service is not None:
        check_contract(
            manifest.key_service,
            run_id=manifest.run_id,
            orchestrator_key=manifest.orchestrator_key,
            policy_digest=manifest.policy_digest,
            virtual_workers=manifest.computation.mechanism.virtual_workers,
            epochs=len(manifest.key_commitments),
        )


class SecondHalves:
    """A worker's side of the key service that the manifest may name.

    Args:
        attester: what it presents to that service.
    """

    def __init__(self, attester: Attester) -> None:
        self._attester = attester
        self._address = ""
        self._watch = LogWatch()

    def check(self, manifest: Manifest, address: str | None) -> None:
        """Require that the key service of ``manifest`` can serve the run; remember where it is.

        Raises:
            EvidenceError: ``key_service_mismatch``; also if one of manifest and address lacks.
        """
        contract = manifest.key_service
        if (contract is None) != (address is None):
            stated = "no key service in the manifest" if contract is None else "no address of the key service"
            raise EvidenceError("key_service_mismatch", f"there is {stated}")
        check_key_service(manifest)
        self._address = address or ""

    def complete(
        self, manifest: Manifest, policy: Policy, epoch: int, released: Mapping[int, VirtualWorkerKeys]
    ) -> Mapping[int, VirtualWorkerKeys]:
        """The keys, from what the orchestrator released; those are whole where the manifest names no key service.

        Guarantee: with a key service, returns only once it gave the half of each key that its contract commits to.

        Raises:
            EvidenceError: as `attestation.second_half.fetch_halves`.
        """
        if manifest.key_service is None:
            return released
        from attestation.second_half import fetch_halves  # gRPC takes a while to load; few runs need it

        owned = fetch_halves(
            manifest.key_service,
            self._address,
            self._attester,
            policy=policy,
            epoch=epoch,
            virtual_workers=sorted(released),
            watch=self._watch,
        )
        context = key_context(manifest.computation, manifest.known_answer)
        return {
            v: combine_halves(half, owned[v], run_id=manifest.run_id, key_context=context, v=v, epoch=epoch)
            for v, half in released.items()
        }
