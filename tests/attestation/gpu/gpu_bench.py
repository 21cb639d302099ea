"""A simulated vendor of GPUs, one of its devices, and what a verifier holds."""

from dataclasses import dataclass
from typing import Any, Self

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.gpu.device import DeviceClaims
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import GpuReferences, verify_gpu
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import EvidenceError
from tests.simulators.gpu import GpuVariant, SimulatedGpu, SimulatedGpuVendor

NOW = 1_800_000_000
NONCE = bytes(range(32))


@dataclass
class GpuBench:
    """A vendor, one of its devices, and what a verifier holds."""

    vendor: SimulatedGpuVendor
    gpu: SimulatedGpu
    rims: GpuReferences
    ocsp: tuple[bytes, ...]

    @classmethod
    def create(cls) -> Self:
        vendor = SimulatedGpuVendor.create()
        gpu = vendor.gpu()
        return cls(vendor, gpu, vendor.references(), vendor.ocsp(gpu, NOW))

    def verify(self, variant: GpuVariant | None = None, **changes: Any) -> DeviceClaims:
        gpu: SimulatedGpu = changes.pop("gpu", self.gpu)
        arguments: dict[str, Any] = {
            "report": gpu.report(NONCE, variant or GpuVariant()),
            "chain": gpu.chain,
            "anchors": self.vendor.anchors,
            "accepted": (EvidenceClass.SIMULATED,),
            "rules": GpuRules(),
            "nonce": NONCE,
            "rims": self.rims,
            "ocsp": self.ocsp,
            "now": NOW,
        } | changes
        terms = VerifierTerms(*(arguments.pop(name) for name in ("anchors", "accepted", "now")))
        return verify_gpu(terms=terms, **arguments)

    def code(self, variant: GpuVariant | None = None, **changes: Any) -> str | None:
        try:
            self.verify(variant, **changes)
        except EvidenceError as error:
            return error.code
        return None
