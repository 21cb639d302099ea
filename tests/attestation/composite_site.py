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
from tests.simulators.switch import SwitchedMachine, switch_references, switched_machine

NONCE = b"n" * 32


@dataclass
class Site:
    """An SEV-SNP machine with two GPUs, and what a verifier holds of it."""

    session: Session
    machine: SimulatedMachine
    gpus: tuple[SimulatedGpu, ...]
    policy: Policy
    collateral: CollateralBundle
    machine_of_switches: SwitchedMachine
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

    def switched(self, machine: SwitchedMachine | None = None, **changes: Any) -> Presentation:
        """Return a presentation with the GPUs and switches of a machine in protected-PCIe mode."""
        over, shown = gpu_nonce(NONCE, self.member.hpke.public), machine or self.machine_of_switches
        fields = {"gpu_evidence": shown.collect(over), "switch_evidence": shown.collect_switches(over)}
        return self.presentation(**(fields | changes))

    @property
    def clear_links(self) -> Policy:
        """The policy that accepts protected-PCIe mode."""
        return self.policy.model_copy(update={"nvidia_gpu": GpuRules(allow_ppcie=True)})

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
    gpus, switched = (nvidia.gpu(), nvidia.gpu()), switched_machine(nvidia)
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
        gpu_rims=tuple(each for each in (references.driver, references.vbios, switch_references(nvidia)) if each),
        gpu_ocsp=tuple(
            answer for each in (*gpus, *switched.gpus, *switched.switches) for answer in nvidia.ocsp(each, NOW)
        ),
    )
    return Site(session, amd.machine(), gpus, policy, collateral, switched)
