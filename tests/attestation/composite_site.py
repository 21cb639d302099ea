"""An SEV-SNP guest with two confidential GPUs, all simulated, and what a verifier holds of them."""

from dataclasses import dataclass, field
from typing import Any

from raycloak.attestation.appraisal.appraisal import Appraisal
from raycloak.attestation.core.evidence import CollateralBundle, EvidenceClass, Presentation
from raycloak.attestation.core.messages import seal
from raycloak.attestation.core.report_data import expected_report_data
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import gpu_nonce
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.trust.roots import Anchor
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MEASUREMENT, NOW, Member, Session
from tests.simulators.gpu import SimulatedGpu, SimulatedGpuVendor
from tests.simulators.snp import GENUINE_REPORT, ReportVariant, SimulatedAmd, SimulatedMachine
from tests.simulators.snp_pki import AuthorityKeys

NONCE = b"n" * 32


@dataclass
class Site:
    """An SEV-SNP machine with two GPUs, and what a verifier holds of it."""

    session: Session
    machine: SimulatedMachine
    gpus: tuple[SimulatedGpu, ...]
    policy: Policy
    collateral: CollateralBundle
    member: Member = field(init=False)

    def __post_init__(self) -> None:
        self.member = self.session.member()

    def gpu_evidence(self, *gpus: SimulatedGpu, nonce: bytes | None = None) -> tuple[bytes, ...]:
        over = nonce or gpu_nonce(NONCE, self.member.hpke.public)
        return tuple(gpu.evidence(over) for gpu in gpus or self.gpus)

    def presentation(self, variant: ReportVariant = GENUINE_REPORT, **changes: Any) -> Presentation:
        fields = self.member.fields(**({"gpu_evidence": self.gpu_evidence()} | changes))
        presented = Presentation(**fields, quote=b"", quote_family="sev_snp", certificates=self.machine.certificates)
        quote = self.machine.report(expected_report_data(presented), MEASUREMENT, variant)
        return presented.model_copy(update={"quote": quote})

    def appraise(self, presentation: Presentation, **changes: Any) -> Appraisal:
        envelope = seal(presentation, self.member.identity)
        return self.session.appraise(envelope, **({"policy": self.policy, "collateral": self.collateral} | changes))

    def refusal(self, presentation: Presentation, **changes: Any) -> str | None:
        try:
            self.appraise(presentation, **changes)
        except EvidenceError as error:
            return error.code
        return None


def composite_site(session: Session, amd_keys: AuthorityKeys) -> Site:
    """Return a new site; its policy is strict but for accepting simulated evidence."""
    amd, nvidia = SimulatedAmd("Genoa", amd_keys), SimulatedGpuVendor.create()
    gpus = (nvidia.gpu(), nvidia.gpu())
    references = nvidia.references()
    root = Anchor(evidence_class=EvidenceClass.SIMULATED, family="sev_snp", root_der=amd.root_der)
    policy = Policy(
        accepted_classes=(EvidenceClass.SIMULATED,),
        anchors=(*session.policy.anchors, root, *nvidia.anchors),
        gpus_per_worker=2,
        tdx=session.policy.tdx,
        sev_snp=SnpRules(measurements=(MEASUREMENT,)),
        nvidia_gpu=GpuRules(),
    )
    collateral = CollateralBundle(
        tdx=session.collateral.tdx,
        snp_vcek_crls=(amd.crl(NOW),),
        gpu_rims=tuple(each for each in (references.driver, references.vbios) if each),
        gpu_ocsp=tuple(answer for gpu in gpus for answer in nvidia.ocsp(gpu, NOW)),
    )
    return Site(session, amd.machine(), gpus, policy, collateral)
