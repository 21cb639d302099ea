"""A simulated AMD, one of its machines, and what a verifier holds."""

from dataclasses import dataclass, replace
from typing import Any

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.snp.rules import Generation, SnpRules
from raycloak.attestation.snp.verify import verify_snp
from raycloak.attestation.trust.guest import GuestClaims
from raycloak.attestation.trust.roots import Anchor, VerifierTerms
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MEASUREMENT, NOW
from tests.simulators.snp import SNP_SVN, ReportVariant, SimulatedAmd, SimulatedMachine
from tests.simulators.snp_pki import AuthorityKeys

REPORT_DATA = bytes(range(64))
GENERATIONS: tuple[Generation, ...] = ("Milan", "Genoa", "Turin")
ADMIT_ALL = SnpRules(
    allowed_generations=GENERATIONS,
    min_snp_svn=dict.fromkeys(GENERATIONS, SNP_SVN),
    key_kinds=("VCEK", "VLEK"),
    measurements=(MEASUREMENT,),
)


def anchor(amd: SimulatedAmd) -> Anchor:
    return Anchor(evidence_class=EvidenceClass.SIMULATED, family="sev_snp", root_der=amd.root_der)


@dataclass(frozen=True)
class SnpBench:
    """A vendor and one of its machines, with what a verifier holds."""

    amd: SimulatedAmd
    machine: SimulatedMachine
    crl: bytes

    def verify(self, report: bytes, **changes: Any) -> GuestClaims:
        arguments = {
            "certificates": self.machine.certificates,
            "anchors": (anchor(self.amd),),
            "accepted": (EvidenceClass.SIMULATED,),
            "rules": ADMIT_ALL,
            "crls": (self.crl,),
            "now": NOW,
            "floors": {},
        }
        arguments |= changes
        if not isinstance(arguments["crls"], dict):
            # Lists for the kind of key that signs here.
            arguments["crls"] = {self.machine.kind: arguments["crls"]}
        terms = VerifierTerms(*(arguments[name] for name in ("anchors", "accepted", "now", "floors")))
        return verify_snp(report, arguments["certificates"], arguments["crls"], arguments["rules"], terms)

    def refusal(self, report: bytes, **changes: Any) -> str | None:
        try:
            self.verify(report, **changes)
        except EvidenceError as error:
            return error.code
        return None

    def report(self, **variant: Any) -> bytes:
        return self.machine.report(REPORT_DATA, MEASUREMENT, ReportVariant(**variant))

    def with_machine(self, *arguments: Any, **options: Any) -> "SnpBench":
        return replace(self, machine=self.amd.machine(*arguments, **options))


def bench_of(generation: Generation, keys: AuthorityKeys) -> SnpBench:
    amd = SimulatedAmd(generation, keys)
    return SnpBench(amd, amd.machine(), amd.crl(NOW))
