"""The SEV-SNP verifier on recorded evidence with changes; `test_check.py` judges it as it was recorded."""

import base64
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.utils import CryptographyDeprecationWarning

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.snp.verify import verify_snp
from raycloak.attestation.trust.certificates import read_presented, serial_number
from raycloak.attestation.trust.guest import GuestClaims
from raycloak.attestation.trust.roots import VerifierTerms, pinned_anchors
from raycloak.attestation.vectors.index import VectorCase, read_index
from raycloak.metrics.errors import EvidenceError

ROOT = Path(__file__).resolve().parents[3]
VECTORS = ROOT.parent / "shared" / "vectors"


def verify(case: VectorCase, report: bytes, **changes: Any) -> GuestClaims:
    arguments = {"certificates": case.chain(), "rules": case.rules(SnpRules), "crls": {}}
    terms = {name: changes.pop(name) for name in VerifierTerms._fields if name in changes}
    return verify_snp(report, terms=case.terms("sev_snp")._replace(**terms), **(arguments | changes))


@cache
def accepted_reports() -> dict[str, Any]:
    """Return one accepted case for each recorded report."""
    index = VECTORS / "INDEX.json"
    cases = read_index(index) if index.is_file() else ()
    seen: dict[str, Any] = {}
    for case in cases:
        if case.fields.family == "sev_snp" and case.fields.expect == "accept":
            seen.setdefault(case.fields.evidence, pytest.param(case, id=case.fields.id))
    return seen


def genuine() -> list[Any]:
    absent = pytest.mark.skip(reason="no recorded hardware evidence beside the repository (../shared/vectors)")
    return list(accepted_reports().values()) or [pytest.param(None, marks=absent, id="absent")]


@pytest.mark.parametrize("case", genuine()[:1])
def test_an_endorsement_certificate_needs_neither_its_ca_nor_a_binary_encoding(case: VectorCase) -> None:
    report, vek = case.evidence(), case.chain()[0]
    pair = (ROOT / "attestation/trust/anchors/ask_ark_milan_vcek.pem").read_bytes()
    pem = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(vek) + b"-----END CERTIFICATE-----\n"
    expected = verify(case, report)
    for presented in ([pem], [vek, pair], [pem + pair], [vek, *[pair] * 3]):
        assert verify(case, report, certificates=presented) == expected


@pytest.mark.parametrize("case", genuine()[:1])
def test_genuine_evidence_counts_only_where_its_class_and_root_are_accepted(case: VectorCase) -> None:
    amd = pinned_anchors(EvidenceClass.AMD_SEV_SNP)
    changes = (
        {"accepted": (EvidenceClass.INTEL_TDX, EvidenceClass.SIMULATED)},
        {"anchors": pinned_anchors(EvidenceClass.INTEL_TDX)},
        {"anchors": tuple(anchor for anchor in amd if b"Milan" not in anchor.root_der)},
    )
    for change in changes:
        with pytest.raises(EvidenceError) as refused:
            verify(case, case.evidence(), **change)
        assert refused.value.code == "root_unknown"


@pytest.mark.parametrize("case", genuine()[:1])
def test_the_defaults_of_the_rules_are_stricter_than_a_recorded_milan_host(case: VectorCase) -> None:
    """Milan is denied, and even where it is not, the list of revoked certificates is missing."""
    strict = SnpRules()
    for rules, code in (
        (strict, "collateral_stale"),
        (strict.model_copy(update={"require_crl": False}), "firmware_floor"),
    ):
        with pytest.raises(EvidenceError) as refused:
            verify(case, case.evidence(), rules=rules)
        assert refused.value.code == code


@pytest.mark.parametrize("case", genuine()[:1])
def test_a_genuine_certificate_with_serial_number_zero_still_loads(case: VectorCase) -> None:
    """The library announces that it will refuse these one day; all certificates of AMD's chips have number 0."""
    vek = case.chain()[0]
    with pytest.warns(CryptographyDeprecationWarning, match="serial number"):
        x509.load_der_x509_certificate(vek)
    assert serial_number(read_presented(vek)[0]) == 0
