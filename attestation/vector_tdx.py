"""Judges the TDX cases of an index."""

from attestation.evidence import Collateral
from attestation.tdx import TdxClaims, check_registers, verify_tdx
from attestation.tdx_rules import TdxRules
from attestation.vector_compare import compare
from attestation.vector_index import Case
from metrics.errors import EvidenceError


def appraise_tdx(case: Case) -> TdxClaims:
    """Verify the case's quote and return its claims; EvidenceError if it is refused."""
    rules = case.without("tcb_statuses", "Revoked").rules(TdxRules)
    claims = verify_tdx(
        case.evidence(),
        _collateral(case),
        anchors=case.anchors("tdx"),
        accepted=case.accepted,
        rules=rules,
        now=case.now,
    )
    check_registers(claims, rules)
    compare(case, claims, rules.measurements)
    return claims


def _collateral(case: Case) -> tuple[Collateral, ...]:
    """Read the collateral; none if it cannot be read, which the verifier refuses in its turn."""
    if case.fields.collateral is None:
        return ()
    content = case.file(case.fields.collateral)
    try:
        return (Collateral.from_json(content.decode()),)
    except (EvidenceError, UnicodeDecodeError):
        return ()
