"""The GPU verifier on simulated devices: what passes, and each refusal by its name."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import GpuReferences
from raycloak.attestation.trust.roots import pinned_anchors
from tests.attestation.gpu.gpu_bench import NONCE, NOW, GpuBench
from tests.simulators.gpu import (
    DRIVER_INDICES,
    DRIVER_VERSION,
    GpuVariant,
    SimulatedGpu,
    SimulatedGpuVendor,
    genuine_value,
)
from tests.simulators.gpu_pki import OcspVariant, issue
from tests.simulators.gpu_rim import Manifest, sign_manifest, write_manifest


@pytest.fixture(scope="module")
def bench() -> GpuBench:
    return GpuBench.create()


def test_a_simulated_gpu_passes_under_strict_rules_and_stays_simulated(bench: GpuBench) -> None:
    claims = bench.verify()
    assert claims.evidence_class is EvidenceClass.SIMULATED
    assert (claims.report_data, claims.dbgstat, claims.mode) == (NONCE, "disabled", "single GPU")
    assert claims.expires_at == NOW + 23 * 3600  # answers are an hour old and hold for a day
    assert claims.platform_id == bench.verify().platform_id
    assert len(claims.platform_id) == len(claims.measurement) == 48


@pytest.mark.parametrize("chip", ["GB100", "GB20X"])
def test_blackwell_passes_with_its_own_form_of_the_firmware_identity(bench: GpuBench, chip: str) -> None:
    gpu = bench.vendor.gpu(chip)
    known = {"gpu": gpu, "ocsp": bench.vendor.ocsp(gpu, NOW), "rims": bench.vendor.references("GB100")}
    assert bench.code(**known) is None
    assert bench.code(GpuVariant(fwid=bytes(48)), **known) == "gpu_state"
    assert bench.code(**known | {"rims": bench.rims}) == "gpu_state"  # reference values of Hopper


def test_simulated_evidence_never_satisfies_hardware_rules(bench: GpuBench) -> None:
    hardware = (EvidenceClass.NVIDIA_GPU,)
    assert bench.code(accepted=hardware) == "simulator_not_allowed"
    assert bench.code(anchors=pinned_anchors(EvidenceClass.NVIDIA_GPU), accepted=hardware) == "root_unknown"
    assert bench.code(anchors=SimulatedGpuVendor.create().anchors) == "root_unknown"


def test_broken_chains(bench: GpuBench) -> None:
    leaf, boot_rom, provisioner, family, root = bench.gpu.chain
    other = bench.vendor.gpu().chain
    for chain in (
        (),
        (root,),
        (leaf, boot_rom, provisioner, family),
        (leaf, boot_rom, provisioner, root),
        (boot_rom, provisioner, family, root),
        (boot_rom, boot_rom, provisioner, family, root),
        (leaf, other[1], provisioner, family, root),
        (root, family, provisioner, boot_rom, leaf),
        (leaf, boot_rom, provisioner, family, b"certificate"),
        (*bench.gpu.chain, root),
    ):
        assert bench.code(chain=chain) == "chain_broken"


def test_a_chain_in_pem_has_nothing_around_its_certificates(bench: GpuBench) -> None:
    loaded = [x509.load_der_x509_certificate(each) for each in bench.gpu.chain]
    pem = b"".join(each.public_bytes(Encoding.PEM) for each in loaded)
    for chain in (pem, b"\n" + pem + b" \n" + bytes(2)):
        assert bench.code(chain=(chain,)) is None
    for chain in (b"x" + pem, pem + b"x", pem.replace(b"E-----\n-", b"E-----\nCN\n-")):
        assert bench.code(chain=(chain,)) == "evidence_malformed"
    assert bench.code(chain=(bench.gpu.chain[0] + b"x", *bench.gpu.chain[1:])) == "chain_broken"


def test_a_chain_of_five_without_a_firmware_leaf_is_broken(bench: GpuBench) -> None:
    """Otherwise the boot ROM could vouch for a key of any name."""
    named = issue("GH100 A01 GSP something", bench.gpu.credentials[1])
    gpu = SimulatedGpu((named, *bench.gpu.credentials[1:]), "GH100", b"", bench.gpu.device_id)
    assert bench.code(gpu=gpu) == "chain_broken"


def test_a_report_signed_by_another_key_is_tampered(bench: GpuBench) -> None:
    assert bench.code(GpuVariant(signed_by_boot_rom=True)) == "evidence_tampered"
    assert bench.code(report=bench.vendor.gpu().report(NONCE)) == "evidence_tampered"


def test_no_changed_byte_of_a_report_passes(bench: GpuBench) -> None:
    """A seeded choice of positions; each changed by a non-zero XOR."""
    report, draw = bench.gpu.report(NONCE), random.Random(11)
    for position in draw.sample(range(len(report)), 25):
        changed = bytearray(report)
        changed[position] ^= draw.randrange(1, 256)
        assert bench.code(report=bytes(changed)) is not None


def test_trailing_zeros_pass_and_other_bytes_do_not(bench: GpuBench) -> None:
    report = bench.gpu.report(NONCE)
    assert bench.code(report=report + bytes(99)) is None
    assert bench.code(report=report + bytes(99) + b"\x01") == "evidence_malformed"
    assert bench.code(report=report[:-1]) == "evidence_malformed"


def test_the_nonce_is_the_one_that_was_issued(bench: GpuBench) -> None:
    assert bench.code(nonce=bytes(32)) == "nonce_foreign"
    assert bench.code(nonce=NONCE[:8]) == "nonce_foreign"


def test_modes(bench: GpuBench) -> None:
    for variant, code in (
        (GpuVariant(feature_flag=None), "gpu_state"),
        (GpuVariant(feature_flag=b""), "gpu_state"),
        (GpuVariant(feature_flag=0), None),
        (GpuVariant(feature_flag=2), "gpu_state"),
        (GpuVariant(feature_flag=None, protected_pcie=True), "gpu_state"),
        (GpuVariant(feature_flag=3), "gpu_state"),
    ):
        assert bench.code(variant) == code
    names = {None: "not stated", 0: "single GPU", 1: "multi GPU", 2: "protected PCIe"}
    rules = GpuRules(allow_ppcie=True, allow_unstated_mode=True)
    for flag, name in names.items():
        assert bench.verify(GpuVariant(feature_flag=flag), rules=rules).mode == name


def test_a_switch_is_not_a_gpu(bench: GpuBench) -> None:
    switch = bench.vendor.gpu("LS_10")
    assert bench.code(gpu=switch, ocsp=bench.vendor.ocsp(switch, NOW)) == "gpu_state"


def test_a_leaf_that_certifies_a_firmware_identity_needs_the_same_one_in_the_report(bench: GpuBench) -> None:
    assert bench.code(GpuVariant(fwid=bytes(48))) == "gpu_state"
    assert bench.code(GpuVariant(fwid=b"")) == "gpu_state"


def test_the_rules_may_name_the_accepted_models(bench: GpuBench) -> None:
    model = bench.gpu.chip.split()[0]
    for models, code in (((model,), None), (("GB202", model), None), (("GB202",), "gpu_state"), ((), "gpu_state")):
        assert bench.code(rules=GpuRules(models=models)) == code


def test_a_models_name_is_that_of_the_certificate_that_nvidia_issued(bench: GpuBench) -> None:
    """The device issues the leaf itself, and could write any name into it."""
    other = bench.vendor.gpu("GH200")
    leaf = issue("GH100 A01 GSP FMC LF", other.credentials[1])
    gpu = SimulatedGpu((leaf, *other.credentials[1:]), "GH100", bytes(48), other.device_id)
    ocsp = bench.vendor.ocsp(gpu, NOW)
    assert bench.code(gpu=gpu, ocsp=ocsp) is None
    assert bench.code(gpu=gpu, ocsp=ocsp, rules=GpuRules(models=("GH100",))) == "gpu_state"
    assert bench.code(gpu=gpu, ocsp=ocsp, rules=GpuRules(models=("GH200",))) is None


def test_measurements_in_no_manifest_are_listed(bench: GpuBench) -> None:
    claims = bench.verify()
    listed = dict(claims.steps)["measurements"].rpartition("in no reference manifest: ")[2]
    assert claims.uncovered
    assert listed == ", ".join(map(str, claims.uncovered))


def test_reference_values_must_be_there_for_both(bench: GpuBench) -> None:
    lax = GpuRules(require_rim=False)
    for rims in (GpuReferences(), GpuReferences(driver=bench.rims.driver), GpuReferences(vbios=bench.rims.vbios)):
        assert bench.code(rims=rims) == "gpu_state"
        assert bench.code(rims=rims, rules=lax) is None
    for empty in (GpuReferences(b"", bench.rims.vbios), GpuReferences(bench.rims.driver, b"")):
        assert bench.code(rims=empty, rules=lax) == "evidence_malformed"  # supplied, and no reference values
    assert bench.verify(rims=GpuReferences(), rules=lax).dbgstat == ""


def test_a_differing_measurement_or_version_is_refused(bench: GpuBench) -> None:
    for variant in (
        GpuVariant(measurements={DRIVER_INDICES[0]: bytes(48)}),
        GpuVariant(measurements={0: bytes(48)}),
        GpuVariant(measurements={0: b""}),
        GpuVariant(driver_version="590.13"),
        GpuVariant(driver_version=""),
        GpuVariant(vbios_version="96.00.A5.00.02"),
    ):
        assert bench.code(variant) == "gpu_state"
        lax = GpuRules(require_rim=False)
        assert bench.code(variant, rules=lax) == "gpu_state"
        assert bench.code(variant, rules=lax, rims=GpuReferences()) is None
    assert bench.code(GpuVariant(measurements={40: bytes(48)})) is None  # no manifest speaks of it
    swapped = GpuReferences(driver=bench.rims.vbios, vbios=bench.rims.driver)
    assert bench.code(rims=swapped) == "gpu_state"


def test_one_of_several_accepted_values_is_enough(bench: GpuBench) -> None:
    values = {index: (bytes(48), bytes([index]) * 48) for index in DRIVER_INDICES}
    reported = {index: accepted[1] for index, accepted in values.items()}
    driver = bench.vendor.sign(Manifest(DRIVER_VERSION, "GH100", values))
    rims = GpuReferences(driver, bench.rims.vbios)
    assert bench.code(GpuVariant(measurements=reported), rims=rims) is None
    assert bench.code(GpuVariant(measurements=reported)) == "gpu_state"


def test_an_index_may_be_claimed_once(bench: GpuBench) -> None:
    driver = bench.vendor.sign(Manifest(DRIVER_VERSION, "GH100", {7: (genuine_value(7),)}))
    assert bench.code(rims=GpuReferences(driver, bench.rims.vbios)) == "gpu_state"
    assert bench.code(rims=GpuReferences(driver), rules=GpuRules(require_rim=False)) is None


def test_a_report_without_a_version_matches_no_manifest(bench: GpuBench) -> None:
    driver = bench.vendor.sign(Manifest("", "GH100", {8: (genuine_value(8),)}))
    assert bench.code(GpuVariant(driver_version=""), rims=GpuReferences(driver, bench.rims.vbios)) == "gpu_state"


def test_a_device_cannot_sign_its_own_reference_values(bench: GpuBench) -> None:
    leaf, *issuers = bench.gpu.credentials
    own = sign_manifest(write_manifest(Manifest(DRIVER_VERSION, "GH100", {8: (genuine_value(8),)})), leaf, issuers)
    assert bench.code(rims=GpuReferences(own, bench.rims.vbios)) == "gpu_state"


def test_a_signer_of_reference_values_must_be_current(bench: GpuBench) -> None:
    ended = bench.vendor.issue_rim_signer(datetime.fromtimestamp(NOW, UTC) - timedelta(seconds=1))
    driver = bench.vendor.sign(Manifest(DRIVER_VERSION, "GH100", {8: (bytes(48),)}), ended)
    assert bench.code(rims=GpuReferences(driver, bench.rims.vbios)) == "collateral_stale"


def test_reference_values_are_signed_under_the_root_of_their_class(bench: GpuBench) -> None:
    other = SimulatedGpuVendor.create()
    assert bench.code(rims=other.references()) == "gpu_state"
    device_alone = (bench.vendor.anchors[0], *pinned_anchors(EvidenceClass.NVIDIA_GPU))
    assert bench.code(anchors=device_alone) == "gpu_state"


def test_the_first_failing_stage_decides(bench: GpuBench) -> None:
    """Every later stage fails too; the earlier ones are repaired one by one."""
    everything: dict[str, Any] = {
        "report": bench.vendor.gpu("LS_10").report(bytes(32), GpuVariant(feature_flag=2)) + b"\x01",
        "anchors": SimulatedGpuVendor.create().anchors,
        "accepted": (EvidenceClass.NVIDIA_GPU,),
        "chain": bench.gpu.chain,
        "ocsp": bench.vendor.ocsp(bench.gpu, NOW - 90_000, {1: OcspVariant(reason=x509.ReasonFlags.superseded)}),
    }
    repairs: list[tuple[str, dict[str, Any]]] = [
        ("evidence_malformed", {"report": everything["report"][:-1]}),
        ("root_unknown", {"anchors": bench.vendor.anchors}),
        ("simulator_not_allowed", {"accepted": (EvidenceClass.SIMULATED,)}),
        ("evidence_tampered", {"report": bench.gpu.report(bytes(32), GpuVariant(feature_flag=2))}),
        ("revoked", {"ocsp": bench.vendor.ocsp(bench.gpu, NOW - 90_000)}),
        ("collateral_stale", {"ocsp": bench.ocsp}),
        ("nonce_foreign", {"nonce": bytes(32)}),
        ("gpu_state", {"rules": GpuRules(allow_ppcie=True)}),
    ]
    for code, repair in repairs:
        assert bench.code(**everything) == code
        everything |= repair
    assert bench.code(**everything) is None
