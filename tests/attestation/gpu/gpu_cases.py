"""The GPU cases of an index of recorded evidence, with arguments that a test may change."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.gpu.device import DeviceClaims
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import GpuReferences, verify_gpu
from raycloak.attestation.trust.roots import VerifierTerms, pinned_anchors
from raycloak.attestation.vectors.check import answers_of, references_of
from raycloak.attestation.vectors.index import read_index
from raycloak.metrics.errors import EvidenceError


@dataclass(frozen=True)
class GpuCase:
    """One case, with everything `verify_gpu` takes."""

    report: bytes
    chain: tuple[bytes, ...]
    nonce: bytes
    rims: GpuReferences
    ocsp: tuple[bytes, ...]
    rules: GpuRules
    now: int
    expected: str | None

    def verify(self, **changes: Any) -> DeviceClaims:
        arguments: dict[str, Any] = {
            "anchors": pinned_anchors(EvidenceClass.NVIDIA_GPU),
            "accepted": (EvidenceClass.NVIDIA_GPU,),
            "rules": self.rules,
            "nonce": self.nonce,
            "rims": self.rims,
            "ocsp": self.ocsp,
            "now": self.now,
        } | changes
        terms = VerifierTerms(*(arguments.pop(name) for name in ("anchors", "accepted", "now")))
        return verify_gpu(
            arguments.pop("report", self.report), arguments.pop("chain", self.chain), terms=terms, **arguments
        )

    def refusal(self, **changes: Any) -> str | None:
        try:
            self.verify(**changes)
        except EvidenceError as error:
            return error.code
        return None


def load_gpu_cases(folder: Path) -> dict[str, GpuCase]:
    return {
        case.fields.id: GpuCase(
            report=case.evidence(),
            chain=case.chain(),
            nonce=case.fields.nonce or b"",
            rims=references_of(case),
            ocsp=answers_of(case),
            rules=case.given("allow_unstated_mode", True).rules(GpuRules),
            now=case.fields.at,
            expected=case.fields.refusal,
        )
        for case in read_index(folder / "INDEX.json")
        if case.fields.family == "nvidia_gpu"
    }
