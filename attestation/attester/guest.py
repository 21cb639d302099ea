"""The evidence of the guest that a process runs in: on a real machine, every actor asks the kernel of its own."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.attester.attester import CpuEvidence
from raycloak.attestation.attester.gpu_collection import GpuCollector, visible_devices
from raycloak.attestation.attester.tsm import TsmReports
from raycloak.metrics.errors import EvidenceError

ENDORSEMENT_VARIABLE = "RAYCLOAK_ENDORSEMENT"
"""Names a file with the certificate of an SEV-SNP machine's endorsement key, for hosts that hand out none."""


class GuestEvidence:
    """The `raycloak.attestation.attester.attester.EvidenceSource` of an actor in a guest with a trusted execution
    environment.

    It examines its surroundings only when asked.
    """

    def collect(self, report_data: bytes) -> CpuEvidence:
        """Return evidence of the actor's guest; errors as in `raycloak.attestation.attester.tsm.TsmReports.collect`."""
        endorsement = os.environ.get(ENDORSEMENT_VARIABLE)
        return TsmReports(endorsement=Path(endorsement) if endorsement else None).collect(report_data)


@dataclass(frozen=True, slots=True)
class GuestGpus:
    """The `raycloak.attestation.attester.attester.GpuSource` of a worker in such a guest: the GPUs that its scheduler
    gave it.

    Args:
        count: number of GPUs that the policy asks for.
        used: returns the UUIDs of the GPUs that the worker may compute on.
    """

    count: int
    used: Callable[[], Sequence[str]]

    def collect(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return one encoded `GpuEvidence` per GPU; errors as in
        `raycloak.attestation.attester.gpu_collection.GpuCollector.collect`."""
        devices = visible_devices(os.environ)
        if devices is not None and len(devices) != self.count:
            raise EvidenceError(
                "gpu_unavailable",
                f"the policy asks each worker for {self.count} GPUs, and this one was given {len(devices)}.",
                f"Set use_gpu, and GPU: {self.count} in placement.resources_per_worker.",
            )
        return GpuCollector(devices, used=self.used()).collect(nonce)

    def collect_switches(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return one encoded `SwitchEvidence` per switch between them; errors as in
        `raycloak.attestation.attester.gpu_collection.GpuCollector.collect_switches`."""
        return GpuCollector().collect_switches(nonce)
