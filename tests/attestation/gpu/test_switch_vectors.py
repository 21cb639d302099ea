"""A recorded report of a real switch, with its chain and reference values."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.gpu.device import DeviceClaims
from raycloak.attestation.gpu.report import parse_device_report
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.switches import verify_switch
from raycloak.attestation.trust.roots import VerifierTerms, pinned_anchors
from raycloak.attestation.vectors.check import check
from raycloak.attestation.vectors.index import read_index
from raycloak.metrics.errors import EvidenceError

# While the signer of the manifest is valid; the signer of the broken one had ended by then.
NOW = 1_780_000_000
BROKEN_NOW = 1_750_000_000
RIM = "switchVBIOSRim_NV_SWITCH_BIOS_5612_0002_890_9610550001.xml"
BROKEN_RIM = "NV_SWITCH_BIOS_5612_0002_890_9610550001_invalid_signature.xml"
# No answer about its certificates was recorded.
RULES = GpuRules(require_ocsp=False)


class Recorded:
    """The recorded files, and a verifier with NVIDIA's roots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (found,) = json.loads((folder / "switch_evidence_ls10.json").read_text())
        self.report = base64.b64decode(found["evidence"])
        self.chain = base64.b64decode(found["certificate"])
        self.nonce = bytes.fromhex(found["nonce"])

    def verify(self, now: int = NOW, **changes: Any) -> DeviceClaims:
        arguments: dict[str, Any] = {
            "report": self.report,
            "chain": (self.chain,),
            "rules": RULES,
            "terms": VerifierTerms(pinned_anchors(EvidenceClass.NVIDIA_GPU), (EvidenceClass.NVIDIA_GPU,), now),
            "nonce": self.nonce,
            "rim": (self.folder / RIM).read_bytes(),
            "ocsp": (),
        }
        return verify_switch(**arguments | changes)

    def code(self, **changes: Any) -> str | None:
        try:
            self.verify(**changes)
        except EvidenceError as error:
            return error.code
        return None


@pytest.fixture(scope="module")
def recorded(vectors: Path) -> Recorded:
    folder = vectors / "nvidia_switch" / "attestation-sdk"
    if not folder.is_dir():
        pytest.skip("the recorded evidence of a switch is not here")
    return Recorded(folder)


def test_the_report_of_a_real_switch_is_accepted(recorded: Recorded) -> None:
    claims = recorded.verify()
    assert claims.evidence_class is EvidenceClass.NVIDIA_GPU
    assert claims.hwmodel == "LS_10 A01 FSP BROM"
    assert (claims.dbgstat, claims.uncovered) == ("disabled", ())
    assert dict(claims.steps)["measurements"] == "31 equal their reference values"
    assert claims.device_id.hex() == "203eb31ad9ed0008"
    assert len(claims.linked) == 7


def test_the_parser_reads_what_the_vendors_reads(recorded: Recorded) -> None:
    expected = json.loads((recorded.folder / "switch_spdm_parsed_output.json").read_text())
    parsed = parse_device_report(recorded.report, "switch")
    blocks = expected["MeasurementRecord"]["MeasurementBlocks"]
    values = {int(index): block["DMTFSpecMeasurementValue"].removeprefix("0x") for index, block in blocks.items()}
    assert {index: value.hex() for index, value in parsed.measurements.items()} == values
    fields = expected["OpaqueData"]["OpaqueDataField"]
    listed = [each.removeprefix("0x") for each in fields["OPAQUE_FIELD_ID_SWITCH_GPU_PDIS"]]
    assert recorded.verify().linked == {bytes.fromhex(each) for each in listed}
    assert parsed.signature.hex() == expected["Signature"].removeprefix("0x")


def test_the_manifest_with_the_broken_signature_is_refused(recorded: Recorded) -> None:
    broken = (recorded.folder / BROKEN_RIM).read_bytes()
    assert recorded.code(rim=broken, now=BROKEN_NOW) == "gpu_state"
    assert recorded.code(rim=broken) == "collateral_stale"
    assert recorded.code(rim=None) == "gpu_state"
    assert recorded.code(rules=GpuRules()) == "collateral_stale", "no answer about its certificates"


def test_bits_cuts_and_trailing_bytes_are_refused(recorded: Recorded) -> None:
    for position in range(0, len(recorded.report), 97):
        changed = bytearray(recorded.report)
        changed[position] ^= 1
        assert recorded.code(report=bytes(changed)) in ("evidence_malformed", "evidence_tampered")
    assert recorded.code(report=recorded.report[:-1]) == "evidence_malformed"
    assert recorded.code(report=recorded.report + b"\x01") == "evidence_malformed"
    assert recorded.code(nonce=bytes(32)) == "nonce_foreign"


def test_an_index_may_have_cases_of_switches(recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "report").write_bytes(recorded.report)
    (tmp_path / "chain.pem").write_bytes(recorded.chain)
    for name, kept in ((RIM, "rim.xml"), (BROKEN_RIM, "broken.xml")):
        (tmp_path / kept).write_bytes((recorded.folder / name).read_bytes())
    case = {
        "id": "switch",
        "family": "nvidia_switch",
        "evidence": "report",
        "encoding": "raw",
        "chain": ["chain.pem"],
        "at": "2026-05-28T20:26:40Z",
        "nonce": recorded.nonce.hex(),
        "rim": {"vbios": "rim.xml"},
        "policy": {"require_ocsp": False},
        "expect": "accept",
    }
    broken = case | {
        "id": "switch-broken-rim",
        "rim": {"vbios": "broken.xml"},
        "at": "2025-06-15T15:06:40Z",
        "expect": "refuse",
        "refusal": "gpu_state",
    }
    (tmp_path / "INDEX.json").write_text(json.dumps({"format": 1, "default_policy": {}, "cases": [case, broken]}))
    verdicts = [check(each) for each in read_index(tmp_path / "INDEX.json")]
    assert [each.as_expected for each in verdicts] == [True, True]
