"""Recorded evidence of real GPUs, with the verdict that each case must have."""

from pathlib import Path

import pytest

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.gpu.report import parse_device_report
from raycloak.attestation.trust.roots import pinned_anchors
from tests.attestation.gpu.gpu_cases import GpuCase, load_gpu_cases


@pytest.fixture(scope="module")
def cases(vectors: Path) -> dict[str, GpuCase]:
    return load_gpu_cases(vectors)


def test_every_case_has_its_verdict(cases: dict[str, GpuCase]) -> None:
    assert len(cases) >= 36
    assert {name: case.refusal() for name, case in cases.items()} == {
        name: case.expected for name, case in cases.items()
    }


def test_claims_of_a_genuine_gpu(cases: dict[str, GpuCase]) -> None:
    claims = cases["gpu-hopper-550-rim-ocsp"].verify()
    assert claims.evidence_class is EvidenceClass.NVIDIA_GPU
    report = parse_device_report(cases["gpu-hopper-550-rim-ocsp"].report, "GPU")
    assert (report.driver_version, report.vbios_version) == ("550.90.07", "96.00.9F.00.01")
    assert (claims.hwmodel, claims.dbgstat) == ("GH100 A01 GSP BROM", "disabled")
    # A genuine Hopper reports 64, of which its manifests list 33.
    assert len(claims.uncovered) == 31
    uncovered = ", ".join(map(str, claims.uncovered))
    expected = f"33 equal their reference values; in no reference manifest: {uncovered}"
    assert dict(claims.steps)["measurements"] == expected
    assert claims.mode == "not stated"
    # The defaults do not take silence for confidential computing.
    strict = cases["gpu-hopper-550-rim-ocsp"].rules.model_copy(update={"allow_unstated_mode": False})
    assert cases["gpu-hopper-550-rim-ocsp"].refusal(rules=strict) == "gpu_state"
    assert claims.report_data == cases["gpu-hopper-550-rim-ocsp"].nonce
    assert claims.expires_at == 1755845227  # the first OCSP answer's next update
    assert cases["gpu-hopper-550"].verify().dbgstat == ""


def test_the_gpus_of_one_machine_have_one_identity_each(cases: dict[str, GpuCase]) -> None:
    claims = [cases[f"gpu-multi-{i}-ppcie-allowed"].verify() for i in range(4)]
    assert len({each.platform_id for each in claims}) == 4


def test_a_root_vouches_for_its_own_role_alone(cases: dict[str, GpuCase]) -> None:
    """The root of devices signs no reference values and the root of reference values certifies no device."""
    case, anchors = cases["gpu-hopper-550-rim"], pinned_anchors(EvidenceClass.NVIDIA_GPU)
    by_family = {anchor.family: anchor for anchor in anchors}
    assert case.refusal(anchors=(by_family["nvidia_gpu"],)) == "gpu_state"
    assert case.refusal(anchors=(by_family["nvidia_rim"],)) == "root_unknown"
    assert case.refusal(anchors=pinned_anchors(EvidenceClass.INTEL_TDX)) == "root_unknown"
    assert case.refusal(accepted=(EvidenceClass.INTEL_TDX,)) == "root_unknown"


@pytest.mark.parametrize(("shift", "code"), [(-1, "collateral_stale"), (0, None)])
def test_an_ocsp_answer_ends_before_its_next_update(cases: dict[str, GpuCase], shift: int, code: str | None) -> None:
    case = cases["gpu-hopper-550-rim-ocsp"]
    first, last = 1755758828, 1755845227  # the latest this update and the earliest next update
    assert case.refusal(now=first + shift) == code
    assert case.refusal(now=last - 1 - shift) == code


def test_zero_bytes_behind_a_report_change_nothing(cases: dict[str, GpuCase]) -> None:
    case = cases["gpu-hopper-550"]
    assert case.verify(report=case.report + bytes(4000)) == case.verify()
