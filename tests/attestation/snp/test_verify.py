"""The SEV-SNP verifier on everything that the simulated AMD can get wrong."""

import random
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.simulators.tdx_pki import new_root
from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_LIFETIME_S
from raycloak.attestation.snp.report import SIGNED_BYTES
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.snp.verify import MAX_CERTIFICATES
from raycloak.attestation.trust.certificates import serial_number
from raycloak.attestation.trust.guest import check_registers
from raycloak.attestation.trust.roots import Anchor, pinned_anchors
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MEASUREMENT, NOW
from tests.attestation.snp.snp_bench import ADMIT_ALL, GENERATIONS, REPORT_DATA, SnpBench, anchor, bench_of
from tests.rounds import ALL
from tests.simulators.snp import CRL_NUMBER, SNP_SVN, SVNS, ReportVariant, SimulatedAmd
from tests.simulators.snp_pki import AuthorityKeys, EndorsementVariant


@pytest.fixture(scope="module", params=GENERATIONS)
def each(request: pytest.FixtureRequest, amd_keys: AuthorityKeys) -> SnpBench:
    return bench_of(request.param, amd_keys)


@pytest.fixture(scope="module")
def bench(amd_keys: AuthorityKeys) -> SnpBench:
    return bench_of("Genoa", amd_keys)


@pytest.fixture(scope="module")
def turin(amd_keys: AuthorityKeys) -> SnpBench:
    return bench_of("Turin", amd_keys)


@pytest.fixture(scope="module")
def stranger(amd_keys: AuthorityKeys) -> SimulatedAmd:
    """Return another vendor with the same names; root and CAs have each other's keys, since those take long to make."""
    return SimulatedAmd("Genoa", AuthorityKeys(amd_keys.vcek_ca, amd_keys.root, amd_keys.root))


def test_a_simulated_report_passes_with_the_class_of_its_root(each: SnpBench) -> None:
    claims = each.verify(each.report())
    assert claims.evidence_class is EvidenceClass.SIMULATED
    assert (claims.measurement, claims.report_data) == (MEASUREMENT, REPORT_DATA)
    assert claims.hwmodel == f"AMD EPYC {each.amd.generation}"
    assert "VCEK" in dict(claims.steps)["chain"]
    assert claims.platform_id == each.machine.chip_id
    assert claims.expires_at == NOW + COLLATERAL_LIFETIME_S
    assert [number for _, number in claims.facts] == [CRL_NUMBER]
    assert claims.dbgstat == "disabled-since-boot"
    assert f"snp {SNP_SVN}" in claims.tcb_status


def test_a_vlek_names_the_guest_where_the_provider_masks_the_chip(each: SnpBench) -> None:
    vlek = each.with_machine("VLEK")
    first, second = (vlek.verify(vlek.report()) for _ in range(2))
    assert "VLEK" in dict(first.steps)["chain"]
    assert len(first.platform_id) == 32
    assert not first.names_machine
    assert first.platform_id != second.platform_id
    chip = bytes(range(64))
    named = vlek.verify(vlek.report(chip_id=chip))
    assert (named.platform_id, named.names_machine) == (chip, True)


@pytest.mark.parametrize("version", [2, 3, 4, 5])
@pytest.mark.parametrize("low_s", [True, False])
def test_every_report_version_and_either_s_passes(bench: SnpBench, version: int, low_s: bool) -> None:
    assert bench.refusal(bench.report(version=version, low_s=low_s)) is None


def test_simulated_certificates_have_serial_number_zero_as_genuine_ones(bench: SnpBench) -> None:
    assert serial_number(bench.machine.chain[0]) == 0
    for certificate in bench.machine.chain:
        assert "SIMULATOR - NOT A TEE" in certificate.subject.rfc4514_string()


def test_newer_certificates_wrap_the_hardware_id(each: SnpBench) -> None:
    wrapped = each.with_machine(endorsement=EndorsementVariant(wrap_hardware_id=True))
    assert wrapped.verify(wrapped.report()).platform_id == wrapped.machine.chip_id


def test_a_bare_hardware_id_that_looks_like_an_octet_string_is_one(each: SnpBench) -> None:
    size = 8 if each.amd.generation == "Turin" else 64
    hardware_id = bytes((4, size - 2)) + bytes(range(size - 2))
    for wrap in (False, True):
        variant = EndorsementVariant(hardware_id=hardware_id, wrap_hardware_id=wrap)
        chip = each.with_machine(endorsement=variant)
        assert chip.refusal(chip.report(chip_id=hardware_id.ljust(64, b"\0"))) is None


def guests(bench: SnpBench) -> dict[str, tuple[ReportVariant, str]]:
    old = bench.machine.tcb_with(3, SNP_SVN - 1)
    return {
        "key that nobody certified": (ReportVariant(foreign_key=True), "evidence_tampered"),
        "chip of another machine": (ReportVariant(chip_id=bytes(range(64))), "platform_mismatch"),
        "masked chip id": (ReportVariant(chip_id=bytes(64)), "platform_mismatch"),
        "reported TCB of another version": (ReportVariant(reported_tcb=old), "platform_mismatch"),
        "committed TCB below the floor": (ReportVariant(committed_tcb=old), "firmware_floor"),
        "launched on firmware below the floor": (ReportVariant(launch_tcb=old), "firmware_floor"),
        "no alias check": (ReportVariant(platform_info=0x05), "firmware_floor"),
        "debug": (ReportVariant(policy=0xB_0000), "debug"),
        "debug and migration agent": (ReportVariant(policy=0xF_0000), "debug"),
        "migration agent": (ReportVariant(policy=0x7_0000), "attributes"),
        "VMPL 1": (ReportVariant(vmpl=1), "privilege_level"),
        "asked for by the host": (ReportVariant(vmpl=2**32 - 1), "privilege_level"),
        "VLEK by name": (ReportVariant(key_kind="VLEK"), "chain_broken"),
        "version 1": (ReportVariant(version=1), "evidence_malformed"),
        "version 6": (ReportVariant(version=6), "evidence_malformed"),
    }


@pytest.mark.parametrize("index", range(15))
def test_bad_reports_are_refused_by_name(each: SnpBench, index: int) -> None:
    variants = list(guests(each).values())
    assert len(variants) == 15
    variant, code = variants[index]
    assert each.refusal(each.machine.report(REPORT_DATA, MEASUREMENT, variant)) == code


def endorsements(bench: SnpBench) -> dict[str, tuple[EndorsementVariant, str]]:
    size = 8 if bench.amd.generation == "Turin" else 64
    return {
        "of another chip": (EndorsementVariant(hardware_id=bytes(range(size))), "platform_mismatch"),
        "without a hardware id": (EndorsementVariant(hardware_id=b""), "platform_mismatch"),
        "a hardware id of another length": (EndorsementVariant(hardware_id=bytes(range(16))), "platform_mismatch"),
        "another TCB": (EndorsementVariant(tcb=bench.machine.tcb_with(8, 1)), "platform_mismatch"),
        "a reserved component": (EndorsementVariant(tcb=bench.machine.tcb_with(5, 1)), "platform_mismatch"),
        "no SNP component": (EndorsementVariant(without_tcb=3), "platform_mismatch"),
        "not valid yet": (EndorsementVariant(valid_from=instant(NOW + 1)), "collateral_stale"),
        "expired": (EndorsementVariant(valid_until=instant(NOW - 1)), "collateral_stale"),
    }


def instant(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@pytest.mark.parametrize("index", range(8))
def test_bad_endorsements_are_refused_by_name(each: SnpBench, index: int) -> None:
    variants = list(endorsements(each).values())
    assert len(variants) == 8
    variant, code = variants[index]
    changed = each.with_machine(endorsement=variant)
    assert changed.refusal(changed.report()) == code


def test_a_certificate_of_chip_zero_does_not_fit_a_masked_chip_id(bench: SnpBench) -> None:
    blank = bench.with_machine(endorsement=EndorsementVariant(hardware_id=bytes(64)))
    assert blank.refusal(blank.report(chip_id=bytes(64))) == "platform_mismatch"


def test_reserved_components_may_be_absent_and_are_then_zero(each: SnpBench) -> None:
    shorter = each.with_machine(endorsement=EndorsementVariant(without_tcb=5))
    assert shorter.refusal(shorter.report()) is None


def test_turin_has_a_layout_of_its_own(turin: SnpBench, bench: SnpBench) -> None:
    """The byte that holds the SNP version elsewhere is reserved on Turin, and the other way round."""
    assert turin.machine.tcb[3] == bench.machine.tcb[6] == SNP_SVN
    assert turin.machine.tcb[6] == bench.machine.tcb[3] == 0
    lower = ADMIT_ALL.model_copy(update={"min_snp_svn": {"Turin": SNP_SVN}})
    for tcb, code in ((turin.machine.tcb_with(3, SNP_SVN - 1), "firmware_floor"), (turin.machine.tcb_with(9, 0), None)):
        assert turin.refusal(turin.report(committed_tcb=tcb), rules=lower) == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"allowed_generations": ("Milan",)}, "firmware_floor"),
        ({"allowed_generations": ()}, "firmware_floor"),
        ({"min_snp_svn": {"Genoa": SNP_SVN + 1}}, "firmware_floor"),
        ({"min_snp_svn": {"Milan": 0}}, "firmware_floor"),
        ({"key_kinds": ("VLEK",)}, "firmware_floor"),
        ({"key_kinds": ()}, "firmware_floor"),
        ({"allow_smt": False}, "attributes"),
        ({"allowed_vmpl": (1, 2, 3)}, "privilege_level"),
        ({"allowed_vmpl": ()}, "privilege_level"),
    ],
)
def test_what_the_rules_do_not_allow_is_refused(bench: SnpBench, change: dict[str, Any], code: str) -> None:
    assert bench.refusal(bench.report(), rules=ADMIT_ALL.model_copy(update=change)) == code


@pytest.mark.parametrize(
    ("change", "variant"),
    [
        ({"allow_debug": True}, {"policy": 0xB_0000}),
        ({"allow_migrate_ma": True}, {"policy": 0x7_0000}),
        ({"allow_smt": False}, {"policy": 0x2_0000}),
        ({"require_alias_check": False}, {"platform_info": 0}),
        ({"allowed_vmpl": (0, 3)}, {"vmpl": 3}),
        ({"min_snp_svn": {"Genoa": 0}}, {"launch_tcb": bytes(7) + b"\1", "committed_tcb": bytes(7) + b"\1"}),
    ],
)
def test_what_the_rules_allow_passes(bench: SnpBench, change: dict[str, Any], variant: dict[str, Any]) -> None:
    assert bench.refusal(bench.report(**variant), rules=ADMIT_ALL.model_copy(update=change)) is None


@pytest.mark.parametrize("rule", ["min_boot_loader_svn", "min_tee_svn", "min_snp_svn", "min_microcode_svn"])
def test_each_part_of_the_firmware_has_its_floor_in_every_tcb_of_a_report(bench: SnpBench, rule: str) -> None:
    """A floor of another generation is none."""
    number = {"min_boot_loader_svn": 1, "min_tee_svn": 2, "min_snp_svn": 3, "min_microcode_svn": 8}[rule]
    svn = SVNS[number]
    rules = ADMIT_ALL.model_copy(update={rule: {"Genoa": svn}})
    assert bench.refusal(bench.report(), rules=rules) is None
    for tcb in ("committed_tcb", "launch_tcb"):
        below = bench.machine.tcb_with(number, svn - 1)
        assert bench.refusal(bench.report(**{tcb: below}), rules=rules) == "firmware_floor"
    higher = ADMIT_ALL.model_copy(update={rule: {"Genoa": svn + 1}})
    assert bench.refusal(bench.report(), rules=higher) == "firmware_floor"
    if rule != "min_snp_svn":
        assert bench.refusal(bench.report(), rules=ADMIT_ALL.model_copy(update={rule: {"Milan": 255}})) is None


def test_a_vlek_is_refused_unless_the_rules_name_it(bench: SnpBench) -> None:
    shared = bench.with_machine("VLEK")
    default = SnpRules(measurements=(MEASUREMENT,), min_snp_svn={"Genoa": SNP_SVN})
    assert shared.refusal(shared.report(), rules=default) == "firmware_floor"
    assert shared.refusal(shared.report(), rules=default.model_copy(update={"key_kinds": ("VLEK",)})) is None
    assert bench.refusal(bench.report(), rules=default) is None


def test_host_data_is_compared_where_the_rules_list_values(bench: SnpBench) -> None:
    claims = bench.verify(bench.report())
    for listed, accepted in (
        (None, True),
        ((claims.registers["host_data"],), True),
        ((b"x" * 32,), False),
        ((), False),
    ):
        rules = ADMIT_ALL.model_copy(update={"host_data": listed})
        if accepted:
            check_registers(claims, rules.registers)
        else:
            with pytest.raises(EvidenceError) as refusal:
                check_registers(claims, rules.registers)
            assert refusal.value.code == "measurement_unknown"


def test_an_accepted_debug_guest_says_so(bench: SnpBench) -> None:
    rules = ADMIT_ALL.model_copy(update={"allow_debug": True})
    assert bench.verify(bench.report(policy=0xB_0000), rules=rules).dbgstat == "enabled"


# Chains and roots


def test_a_simulator_never_satisfies_a_hardware_policy(bench: SnpBench) -> None:
    hardware = pinned_anchors(EvidenceClass.AMD_SEV_SNP)
    report, accepted = bench.report(), (EvidenceClass.AMD_SEV_SNP,)
    known = bench.refusal(report, accepted=accepted, anchors=(*hardware, anchor(bench.amd)))
    assert known == "simulator_not_allowed"
    full = (*bench.machine.certificates, bench.amd.root_der)
    assert bench.refusal(report, accepted=accepted, anchors=hardware, certificates=full) == "root_unknown"
    assert bench.refusal(report, accepted=accepted, anchors=hardware) == "chain_broken"


def test_a_root_of_another_family_vouches_for_no_report(bench: SnpBench) -> None:
    other = Anchor(evidence_class=EvidenceClass.SIMULATED, family="nvidia_gpu", root_der=bench.amd.root_der)
    full = (*bench.machine.certificates, bench.amd.root_der)
    assert bench.refusal(bench.report(), anchors=(other,), certificates=full) == "root_unknown"


def test_evidence_under_another_vendors_root_is_refused(bench: SnpBench, stranger: SimulatedAmd) -> None:
    machine = stranger.machine()
    full = (*machine.certificates, stranger.root_der)
    report = machine.report(REPORT_DATA, MEASUREMENT)
    assert bench.refusal(report, certificates=full) == "root_unknown"
    assert bench.refusal(report, certificates=machine.certificates) == "chain_broken"
    mixed = (machine.certificates[0], *bench.machine.certificates[1:], bench.amd.root_der)
    assert bench.refusal(report, certificates=mixed) == "chain_broken"


def test_broken_chains_are_refused(bench: SnpBench) -> None:
    vek, ca = bench.machine.certificates
    root = bench.amd.root_der
    other_key = new_root().certificate.public_bytes(Encoding.DER)
    for presented in ((), (vek,), (ca,), (root,), (ca, vek), (root, ca), (b"",), (b"?", vek, ca), (vek + b"\0", ca)):
        assert bench.refusal(bench.report(), certificates=presented) == "chain_broken", presented
    assert bench.refusal(bench.report(), certificates=(other_key, ca)) == "chain_broken"
    for hints in ((ca, b"?"), (b"?", ca), (b"-----BEGIN CERTIFICATE-----", ca, b"")):
        assert bench.refusal(bench.report(), certificates=(vek, *hints)) is None
    assert bench.refusal(bench.report(), certificates=(vek, ca, *(b"?",) * MAX_CERTIFICATES)) == "evidence_malformed"
    crowd = (vek,) + (ca,) * MAX_CERTIFICATES
    assert bench.refusal(bench.report(), certificates=crowd) == "evidence_malformed"
    assert bench.refusal(bench.report(), certificates=crowd[:-1]) is None
    bundle = "".join(each.public_bytes(Encoding.PEM).decode() for each in bench.machine.chain[1:] * MAX_CERTIFICATES)
    assert bench.refusal(bench.report(), certificates=(vek, bundle.encode())) == "evidence_malformed"


def test_a_key_of_one_kind_under_the_ca_of_the_other_is_refused(bench: SnpBench) -> None:
    for kind, ca_kind in (("VLEK", "VCEK"), ("VCEK", "VLEK")):
        crossed = bench.with_machine(kind, ca_kind=ca_kind)
        assert crossed.refusal(crossed.report()) == "chain_broken"


def test_an_endorsement_key_is_a_p384_key(bench: SnpBench) -> None:
    weak = bench.with_machine(endorsement=EndorsementVariant(curve=SECP256R1()))
    assert weak.refusal(bench.report()) == "chain_broken"


# Changed bytes


def test_no_changed_byte_of_a_report_passes(bench: SnpBench) -> None:
    """Every byte that is not signed and a sixth of those that are, or all in a long run; masks of a fixed seed."""
    report, draw = bench.report(), random.Random(1)
    signed = range(0, SIGNED_BYTES, 1 if ALL else 6)
    for position in (*signed, *range(SIGNED_BYTES, len(report))):
        changed = bytearray(report)
        changed[position] ^= draw.randrange(1, 256)
        code = bench.refusal(bytes(changed))
        assert code in ("evidence_malformed", "chain_broken", "platform_mismatch", "evidence_tampered"), position


@settings(max_examples=40)
@given(st.data())
def test_changed_certificates_are_refused_or_say_the_same(bench: SnpBench, data: st.DataObject) -> None:
    report = bench.report()
    presented = [bytearray(certificate) for certificate in bench.machine.certificates]
    for _ in range(data.draw(st.integers(1, 3))):
        certificate = presented[data.draw(st.integers(0, 1))]
        certificate[data.draw(st.integers(0, len(certificate) - 1))] ^= data.draw(st.integers(0, 255))
    try:
        claims = bench.verify(report, certificates=tuple(map(bytes, presented)))
    except EvidenceError:
        return
    assert claims == bench.verify(report)


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=200), max_size=3), st.lists(st.binary(max_size=200), max_size=2))
def test_any_certificates_and_lists_are_judged_without_another_error(
    bench: SnpBench, certificates: list[bytes], crls: list[bytes]
) -> None:
    assert bench.refusal(bench.report(), certificates=certificates) == "chain_broken"
    assert bench.refusal(bench.report(), crls=crls) == "collateral_stale"


@pytest.mark.parametrize(("report_data", "measurement"), [(bytes(63), MEASUREMENT), (bytes(64), bytes(32))])
def test_report_data_and_measurement_have_fixed_sizes(bench: SnpBench, report_data: bytes, measurement: bytes) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        bench.machine.report(report_data, measurement)
