"""Judges the SEV-SNP cases of an index."""

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from attestation.snp import SnpClaims, verify_snp
from attestation.snp_rules import SnpRules
from attestation.vector_compare import compare
from attestation.vector_index import Case


def appraise_snp(case: Case) -> SnpClaims:
    """What the case's report says; EvidenceError if it is refused."""
    rules = case.rules(SnpRules)
    claims = verify_snp(
        case.evidence(),
        case.chain(),
        anchors=case.anchors("sev_snp"),
        accepted=case.accepted,
        rules=rules,
        crls=tuple(_crl(case, name) for name in case.fields.crl or ()),
        now=case.now,
    )
    compare(case, claims, rules.measurements)
    return claims


def _crl(case: Case, name: str) -> bytes:
    """A revocation list in DER; the file's content where it is none, which the verifier refuses in its turn."""
    content = case.base64_file(name)
    try:
        return x509.load_pem_x509_crl(content).public_bytes(Encoding.DER)
    except ValueError:
        return content
