"""Keys in two halves: a worker fetches the data owner's half itself, and combines it with the orchestrator's."""

from collections.abc import Mapping

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.keys.halves import check_contract, combine_halves
from raycloak.attestation.keys.release import VirtualWorkerKeys
from raycloak.attestation.log.watch import LogWatch
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.messages import Admission
from raycloak.workers.terms.manifest import Manifest


def check_key_service(manifest: Manifest) -> None:
    """Require that the key service of ``manifest`` can serve its run, if it names one.

    Raises:
        EvidenceError: ``key_service_mismatch``, as `raycloak.attestation.keys.halves.check_contract`.
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


def check_key_address(manifest: Manifest, address: str | None) -> None:
    """Require an address exactly where ``manifest`` names a key service, and a service that can serve the run.

    Raises:
        EvidenceError: ``key_service_mismatch``.
    """
    contract = manifest.key_service
    if (contract is None) != (address is None):
        stated = "no key service in the manifest" if contract is None else "no address of the key service"
        raise EvidenceError("key_service_mismatch", f"there is {stated}")
    check_key_service(manifest)


class SecondHalves:
    """A worker's side of the key service that the manifest may name.

    Args:
        attester: presents this worker to that service.
    """

    def __init__(self, attester: Attester) -> None:
        self._attester = attester
        # The service keeps an evidence log of its own, which must not lose entries between two epochs.
        self._watch = LogWatch()

    def complete(
        self, admission: Admission, epoch: int, released: Mapping[int, VirtualWorkerKeys]
    ) -> Mapping[int, VirtualWorkerKeys]:
        """Return the whole keys; ``released`` are whole already where the manifest names no key service.

        Guarantee: with a key service, returns only once it gave the half of each key that its contract commits to.

        Args:
            admission: its manifest and address were checked by :func:`check_key_address`.

        Raises:
            EvidenceError: as `raycloak.attestation.service.key_service.fetch_halves`.
        """
        manifest = admission.manifest
        if manifest.key_service is None:
            return released
        assert admission.key_service is not None, "an address was checked to come with a contract"
        from raycloak.attestation.service.key_service import (
            fetch_halves,  # gRPC takes a while to load; few runs need it
        )

        owned = fetch_halves(
            manifest.key_service,
            admission.key_service,
            self._attester,
            policy=admission.policy,
            epoch=epoch,
            virtual_workers=sorted(released),
            watch=self._watch,
            code=manifest.code,
        )
        context = manifest.key_context
        return {
            v: combine_halves(half, owned[v], run_id=manifest.run_id, key_context=context, v=v, epoch=epoch)
            for v, half in released.items()
        }
