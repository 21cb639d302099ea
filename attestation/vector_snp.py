"""Judges the SEV-SNP cases of an index."""

from attestation.certificates import crl_der
from attestation.snp import SnpClaims, verify_snp
from attestation.snp_rules import SnpRules
from attestation.vector_compare import compare
from attestation.vector_index import Case


def appraise_snp(case: Case) -> SnpClaims:
    """Verify the case's report and return its claims; EvidenceError if it is refused."""
    rules = case.rules(SnpRules)
    claims = verify_snp(
        case.evidence(),
        case.chain(),
        anchors=case.anchors("sev_snp"),
        accepted=case.accepted,
        rules=rules,
        crls=tuple(crl_der(case.base64_file(name)) for name in case.fields.crl or ()),
        now=case.now,
    )
    compare(case, claims, rules.measurements)
    return claims
