"""The SEV-SNP verifier on recorded hardware evidence: every case of the index, and changes to genuine reports."""

import base64
import json
import os
import random
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.utils import CryptographyDeprecationWarning

from attestation.certificates import read_presented, serial_number
from attestation.evidence import EvidenceClass
from attestation.roots import pinned_anchors
from attestation.snp import SnpClaims, verify_snp
from attestation.snp_rules import SnpRules
from metrics.errors import EvidenceError

VECTORS = Path(__file__).resolve().parents[3] / "shared" / "vectors"
HARDWARE = (EvidenceClass.AMD_SEV_SNP,)


@cache
def index() -> dict[str, Any]:
    path = VECTORS / "INDEX.json"
    return json.loads(path.read_text()) if path.is_file() else {"cases": []}


def cases() -> list[Any]:
    recorded = [pytest.param(case, id=case["id"]) for case in index()["cases"] if case["family"] == "sev_snp"]
    absent = pytest.mark.skip(reason="no recorded hardware evidence beside the repository (../shared/vectors)")
    return recorded or [pytest.param({}, marks=absent, id="absent")]


def report_of(case: dict[str, Any]) -> bytes:
    raw = (VECTORS / case["evidence"]).read_bytes()
    return base64.b64decode(raw) if case["encoding"] == "base64" else raw


def rules_of(case: dict[str, Any]) -> SnpRules:
    return SnpRules.model_validate_json(json.dumps(index()["default_policy"]["sev_snp"] | case["policy"]))


def verify(case: dict[str, Any], report: bytes, **changes: Any) -> SnpClaims:
    certificates = changes.pop("certificates", None) or [(VECTORS / each).read_bytes() for each in case["chain"]]
    arguments = {
        "anchors": pinned_anchors(EvidenceClass.AMD_SEV_SNP),
        "accepted": HARDWARE,
        "rules": rules_of(case),
        "crls": (),
        "now": int(datetime.fromisoformat(case["at"]).timestamp()),
    }
    return verify_snp(report, certificates, **(arguments | changes))


def verdict(case: dict[str, Any]) -> str | None:
    """The refusal, with the two comparisons that are the caller's."""
    rules = rules_of(case)
    try:
        claims = verify(case, report_of(case))
    except EvidenceError as error:
        return error.code
    if rules.measurements is not None and claims.measurement not in rules.measurements:
        return "measurement_unknown"
    if case["report_data"] is not None and claims.report_data.hex() != case["report_data"]:
        return "key_not_bound"
    return None


@pytest.mark.parametrize("case", cases())
def test_every_recorded_case_has_its_verdict(case: dict[str, Any]) -> None:
    assert verdict(case) == case["refusal"]


def genuine() -> list[Any]:
    """One accepted case for each recorded report."""
    seen: dict[str, Any] = {}
    for case in index()["cases"]:
        if case["family"] == "sev_snp" and case["expect"] == "accept":
            seen.setdefault(case["evidence"], pytest.param(case, id=case["id"]))
    return list(seen.values()) or cases()


def flips(case: dict[str, Any], size: int) -> list[tuple[int, int]]:
    """Positions and non-zero masks, drawn with a fixed seed: some of each, or every byte in a long run."""
    draw = random.Random(case["id"])
    positions = range(size) if os.environ.get("RAYCLOAK_LONG_SWEEP") else sorted(draw.sample(range(size), 60))
    return [(position, draw.randrange(1, 256)) for position in positions]


def changed(data: bytes, position: int, mask: int) -> bytes:
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


@pytest.mark.parametrize("case", genuine())
def test_no_changed_byte_of_a_genuine_report_passes(case: dict[str, Any]) -> None:
    report = report_of(case)
    for position, mask in flips(case, len(report)):
        with pytest.raises(EvidenceError):
            verify(case, changed(report, position, mask))


@pytest.mark.parametrize("case", genuine()[:1])
def test_a_genuine_certificate_with_a_changed_byte_is_refused(case: dict[str, Any]) -> None:
    report, vek = report_of(case), (VECTORS / case["chain"][0]).read_bytes()
    for position, mask in flips(case, len(vek)):
        with pytest.raises(EvidenceError) as refused:
            verify(case, report, certificates=[changed(vek, position, mask)])
        assert refused.value.code == "chain_broken"


@pytest.mark.parametrize("case", genuine()[:1])
def test_an_endorsement_certificate_needs_neither_its_ca_nor_a_binary_encoding(case: dict[str, Any]) -> None:
    report, vek = report_of(case), (VECTORS / case["chain"][0]).read_bytes()
    pair = (VECTORS / index()["anchors"]["sev_snp"]["Milan VCEK"]).read_bytes()
    pem = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(vek) + b"-----END CERTIFICATE-----\n"
    expected = verify(case, report)
    for presented in ([pem], [vek, pair], [pem + pair], [vek, *[pair] * 3]):
        assert verify(case, report, certificates=presented) == expected


@pytest.mark.parametrize("case", genuine()[:1])
def test_genuine_evidence_counts_only_where_its_class_and_root_are_accepted(case: dict[str, Any]) -> None:
    amd = pinned_anchors(EvidenceClass.AMD_SEV_SNP)
    changes = (
        {"accepted": (EvidenceClass.INTEL_TDX, EvidenceClass.SIMULATED)},
        {"anchors": pinned_anchors(EvidenceClass.INTEL_TDX)},
        {"anchors": tuple(anchor for anchor in amd if b"Milan" not in anchor.root_der)},
    )
    for change in changes:
        with pytest.raises(EvidenceError) as refused:
            verify(case, report_of(case), **change)
        assert refused.value.code == "root_unknown"


@pytest.mark.parametrize("case", genuine()[:1])
def test_the_defaults_of_the_rules_are_stricter_than_a_recorded_milan_host(case: dict[str, Any]) -> None:
    """Milan is denied, and even where it is not, the list of revoked certificates is missing."""
    strict = SnpRules()
    for rules, code in (
        (strict, "collateral_stale"),
        (strict.model_copy(update={"require_crl": False}), "firmware_floor"),
    ):
        with pytest.raises(EvidenceError) as refused:
            verify(case, report_of(case), rules=rules)
        assert refused.value.code == code


@pytest.mark.parametrize("case", genuine()[:1])
def test_a_genuine_certificate_with_serial_number_zero_still_loads(case: dict[str, Any]) -> None:
    """The library announces that it will refuse these one day; all certificates of AMD's chips have number 0."""
    vek = (VECTORS / case["chain"][0]).read_bytes()
    with pytest.warns(CryptographyDeprecationWarning, match="serial number"):
        x509.load_der_x509_certificate(vek)
    assert serial_number(read_presented(vek)[0]) == 0
