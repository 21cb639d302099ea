"""Judge the cases of an index of evidence, each by the verifier of its family: TDX, SEV-SNP, GPU or switch.

Guarantee: a case's verdict depends on that case and its files alone, not on the cases before it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from raycloak.attestation.core.evidence import Collateral, EvidenceClass, Refusal, refuse
from raycloak.attestation.gpu.device import DeviceClaims
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.switches import verify_switch
from raycloak.attestation.gpu.verify import GpuReferences, verify_gpu
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.snp.verify import verify_snp
from raycloak.attestation.tdx.rules import TdxRules
from raycloak.attestation.tdx.verify import verify_tdx
from raycloak.attestation.trust.certificates import crl_der
from raycloak.attestation.trust.guest import GuestClaims, check_measurement, check_registers
from raycloak.attestation.vectors.index import VectorCase
from raycloak.metrics.errors import ConfigError, EvidenceError


def compare(case: VectorCase, claims: GuestClaims, rules: TdxRules | SnpRules) -> None:
    """Refuse a measurement or register that the case's rules do not know, and unexpected report data.

    Raises:
        EvidenceError: ``measurement_unknown`` or ``key_not_bound``.
    """
    if rules.measurements is not None:
        check_measurement(claims, rules.measurements)
    check_registers(claims, rules.registers)
    if case.fields.report_data is not None and claims.report_data != case.fields.report_data:
        refuse(Refusal.KEY_NOT_BOUND, "the report data is not the expected one")


def appraise_tdx(case: VectorCase) -> GuestClaims:
    """Verify the case's quote and return its claims; EvidenceError if it is refused."""
    rules = case.without("tcb_statuses", "Revoked").rules(TdxRules)
    claims = verify_tdx(case.evidence(), _collateral(case), rules, case.terms("tdx"))
    compare(case, claims, rules)
    return claims


def _collateral(case: VectorCase) -> tuple[Collateral, ...]:
    """Read the collateral; none if it cannot be read, which the verifier refuses in its turn."""
    if case.fields.collateral is None:
        return ()
    content = case.file(case.fields.collateral)
    try:
        return (Collateral.from_json(content.decode()),)
    except (EvidenceError, UnicodeDecodeError):
        return ()


def appraise_snp(case: VectorCase) -> GuestClaims:
    """Verify the case's report and return its claims; EvidenceError if it is refused."""
    # An index that says nothing of key kinds was recorded for both.
    rules = case.given("key_kinds", ["VCEK", "VLEK"]).rules(SnpRules)
    # Nor does it say what kind of key a list is for, so each counts for both.
    crls = tuple(crl_der(case.base64_file(name)) for name in case.fields.crl or ())
    claims = verify_snp(case.evidence(), case.chain(), {"VCEK": crls, "VLEK": crls}, rules, case.terms("sev_snp"))
    compare(case, claims, rules)
    return claims


def appraise_gpu(case: VectorCase) -> DeviceClaims:
    """Verify the case's report and return its claims; EvidenceError if it is refused."""
    return verify_gpu(
        case.evidence(),
        case.chain(),
        # An index that says nothing of reports without a mode was recorded when they were accepted.
        case.given("allow_unstated_mode", True).rules(GpuRules),
        case.terms("nvidia_gpu", "nvidia_rim"),
        nonce=case.fields.nonce or b"",
        rims=references_of(case),
        ocsp=answers_of(case),
    )


def appraise_switch(case: VectorCase) -> DeviceClaims:
    """Verify the case's report and return its claims; EvidenceError if it is refused."""
    return verify_switch(
        case.evidence(),
        case.chain(),
        case.rules(GpuRules),
        case.terms("nvidia_gpu", "nvidia_rim"),
        nonce=case.fields.nonce or b"",
        rim=references_of(case).vbios,
        ocsp=answers_of(case),
    )


def references_of(case: VectorCase) -> GpuReferences:
    """Read the manifests that the case names."""
    named = case.fields.rim
    if named is None:
        return GpuReferences()
    driver, vbios = (None if name is None else case.file(name) for name in (named.driver, named.vbios))
    return GpuReferences(driver, vbios)


def answers_of(case: VectorCase) -> tuple[bytes, ...]:
    """Read the OCSP answers that the case names, in base64 or DER."""
    return tuple(case.base64_file(name) for name in case.fields.ocsp or ())


Claims = GuestClaims | DeviceClaims

# One line per family: a function that returns the evidence's claims, or raises EvidenceError.
FAMILIES: Final[Mapping[str, Callable[[VectorCase], Claims]]] = {
    "sev_snp": appraise_snp,
    "nvidia_gpu": appraise_gpu,
    "nvidia_switch": appraise_switch,
    "tdx": appraise_tdx,
}
LAST_STEP: Final = "result"


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """The verdict on a case.

    Attributes:
        accepted: None if the case could not be appraised.
        evidence_class: class of accepted evidence.
        refusal: code of the first stage that failed; None if none did.
        step: name of that stage, or of the last.
        detail: one sentence for a person; empty for accepted evidence.
        uncovered: measurements of an accepted GPU or switch, from 1, that are in no reference manifest: not compared.
        milliseconds: time from reading the case's files to its verdict.
    """

    case: VectorCase
    accepted: bool | None
    evidence_class: EvidenceClass | None
    refusal: str | None
    step: str
    detail: str
    uncovered: tuple[int, ...] = ()
    milliseconds: float = 0.0

    @property
    def as_expected(self) -> bool | None:
        """Return whether this is the verdict the index expects; None if it expects none."""
        fields = self.case.fields
        if fields.expect is None:
            return None
        return self.accepted is (fields.expect == "accept") and self.refusal == fields.refusal


def check(case: VectorCase) -> CaseVerdict:
    """Appraise one case."""
    started = time.perf_counter()
    appraise = FAMILIES.get(case.fields.family)
    if appraise is None:
        unknown = f"there is no verifier for evidence of family '{case.fields.family}'"
        return CaseVerdict(case, None, None, None, "", case.flaw or unknown)
    try:
        claims = appraise(case)
        uncovered = () if isinstance(claims, GuestClaims) else claims.uncovered
        verdict = CaseVerdict(case, True, claims.evidence_class, None, LAST_STEP, "", uncovered)
    except EvidenceError as error:
        verdict = CaseVerdict(case, False, None, error.code, Refusal[error.code.upper()].stage, error.message)
    except ConfigError as error:
        return CaseVerdict(case, None, None, None, "", error.message)
    return replace(verdict, milliseconds=(time.perf_counter() - started) * 1000)
