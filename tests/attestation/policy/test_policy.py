from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.policy.collateral_service import CollateralService
from raycloak.attestation.policy.policy import KeyQuotas, Policy, load_policy, simulated_policy
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.tdx.rules import REGISTERS, RTMRS, TdxRules
from raycloak.attestation.trust.roots import INTEL_SGX_ROOT_DER, Anchor
from raycloak.metrics.errors import ConfigError, EvidenceError
from tests.anchors import INTEL_TDX_ANCHOR
from tests.attestation.conftest import MEASUREMENT, Session, with_tdx

TDX = {"measurements": [MEASUREMENT.hex()], **dict.fromkeys(RTMRS, "any")}
HARDWARE = {"accepted_classes": ["intel_tdx"], "anchors": ["intel_tdx"], "tdx": TDX}


def load(folder: Path, content: object) -> Policy:
    path = folder / "policy.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_policy(path)


def test_no_policy_can_declare_a_simulator_s_root_to_be_hardware(session: Session) -> None:
    for evidence_class, root in (
        (EvidenceClass.INTEL_TDX, session.vendor.root_der),
        (EvidenceClass.SIMULATED, INTEL_SGX_ROOT_DER),
        (EvidenceClass.SIMULATED, b"not a certificate"),
    ):
        with pytest.raises(ValidationError):
            Anchor(evidence_class=evidence_class, root_der=root)


def test_a_hardware_policy_is_read_from_yaml(tmp_path: Path) -> None:
    tdx = TDX | {"tcb_statuses": ["UpToDate", "SWHardeningNeeded"]}
    policy = load(tmp_path, HARDWARE | {"tdx": tdx, "platforms": ["0a" * 16]})
    assert policy.anchors == (INTEL_TDX_ANCHOR,)
    assert policy.tdx.measurements == (MEASUREMENT,)
    assert policy.platforms == (b"\x0a" * 16,)
    assert not policy.accepts_simulated


def test_a_simulated_policy_survives_yaml(tmp_path: Path, session: Session) -> None:
    policy = simulated_policy(session.vendor, MEASUREMENT)
    assert policy.accepts_simulated
    again = load(tmp_path, policy.model_dump(mode="json"))
    assert again == policy
    assert again.digest() == policy.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"accepted_classes": []},
        {"accepted_classes": ["not a sample"]},
        {"anchors": []},
        {"anchors": ["intel_tdx", "intel_tdx"]},
        {"anchors": ["simulated"]},
        {"anchors": [{"evidence_class": "simulated", "root_der": "00"}]},
        {"tdx": {"measurements": ["00"]}},
        {"tdx": {"measurements": "all"}},
        {"tdx": {"measurements": None}},
        {"sev_snp": {"measurements": None}},
        {"tdx": TDX | {"tcb_statuses": ["Revoked"]}},
        {"tdx": TDX | {"tcb_statuses": ["anything"]}},
        {"tdx": TDX | {"min_tcb_evaluation_data_number": -1}},
        {"tdx": TDX | {"allow_smt": "yes"}},
        {"tdx": TDX | {"rejected_advisories": ["SA-00960"]}},
        {"tdx": TDX | {"rejected_advisories": ["INTEL-SA-00960 "]}},
        {"tdx": TDX | {"rejected_advisories": ["intel-sa-00960"]}},
        {"tdx": {"measurements": [MEASUREMENT.hex()]}},
        {"tdx": TDX | {"rtmr2": None}},
        {"tdx": TDX | {"rtmr2": "all"}},
        {"accepted_classes": ["intel_tdx", "nvidia_gpu"], "anchors": ["intel_tdx", "nvidia_gpu"]},
        {"sev_snp": {"host_data": ["00"]}},
        {"sev_snp": {"key_kinds": ["ARK"]}},
        {"nvidia_gpu": {"models": ["H100"]}},
        {"evidence_lifetime_s": 0},
        {"workers_per_platform": 0},
        {"gpus_per_worker": -1},
        {"platforms": ["00"]},
        {"platforms": ["0a" * 32]},
        {"code": ["0a" * 31]},
        {"code": "any"},
        {"require_boundary": True},
        {"require_boundary": ["tdx.rtmr9"]},
        {"require_boundary": []},
        {"require_boundary": ["sev_snp.measurements"]},
        {"require_boundary": ["tdx.mr_config_id"]},
        {"tdx": TDX | {"rtmr2": "any"}, "require_boundary": ["tdx.rtmr2"]},
        {1: 2},
    ],
)
def test_unknown_or_wrong_fields_are_refused(tmp_path: Path, change: dict) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, HARDWARE | change)
    assert refused.value.code == "policy"
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "a: [",
        "measurements: []\nmeasurements: []\n",
        "a: 2020-01-01",
        "? [a]\n: 1",
        "!!python/object:os.x {}",
        "\0",
    ],
)
def test_what_is_no_policy_document_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    assert refused.value.code == "policy"


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    text = yaml.safe_dump(HARDWARE)
    assert load(tmp_path, text).tdx.measurements == (MEASUREMENT,)
    with pytest.raises(ConfigError, match="given twice"):
        load(tmp_path, text + "tdx: {}\n")


def test_a_document_that_repeats_itself_without_end_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [0, 0]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    with pytest.raises(ConfigError, match="write the value out"):
        load(tmp_path, "\n".join(lines))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for name in ("absent", "binary"):
        with pytest.raises(ConfigError):
            load_policy(tmp_path / name)


def test_every_field_is_in_the_digest(session: Session) -> None:
    base = simulated_policy(session.vendor, MEASUREMENT)
    tdx = {
        "measurements": (bytes(48),),
        **{name: (bytes(48),) for name in REGISTERS},
        "tcb_statuses": ("UpToDate", "OutOfDate"),
        "rejected_advisories": ("INTEL-SA-00001",),
        "min_tcb_evaluation_data_number": 1,
        "allow_dynamic_platform": False,
        "allow_cached_keys": False,
        "allow_smt": False,
        "allow_debug": True,
        "require_sept_ve_disable": False,
    }
    changes = {
        "accepted_classes": (EvidenceClass.SIMULATED, EvidenceClass.INTEL_TDX),
        "anchors": (*base.anchors, INTEL_TDX_ANCHOR),
        "evidence_lifetime_s": 5,
        "platforms": (),
        "workers_per_platform": 1,
        "gpus_per_worker": 1,
        "key_quotas": KeyQuotas(per_run=1),
        "collateral_service": CollateralService(amd="https://a.example", snp_lists=("vcek/Genoa",)),
        "code": (),
        "require_boundary": (),
        "tdx": TdxRules(),
        "sev_snp": SnpRules(require_crl=False),
        "nvidia_gpu": GpuRules(require_rim=False),
    }
    assert (set(changes), set(tdx)) == (set(Policy.model_fields), set(TdxRules.model_fields))
    changed = [base.model_copy(update={name: value}) for name, value in changes.items()]
    changed += [with_tdx(base, **{name: value}) for name, value in tdx.items()]
    assert len({policy.digest() for policy in (base, *changed)}) == len(changes) + len(tdx) + 1


def test_a_policy_without_a_list_of_code_has_the_bytes_that_it_always_had(session: Session) -> None:
    base = simulated_policy(session.vendor, MEASUREMENT)
    assert b'"code"' not in base.encode()
    assert base.model_copy(update={"code": ()}).encode() == base.encode().replace(
        b'"collateral_service"', b'"code":[],"collateral_service"'
    )


def test_code_is_admitted_by_its_digest(session: Session) -> None:
    base, one, two = simulated_policy(session.vendor, MEASUREMENT), b"1" * 32, b"2" * 32
    for code, admitted in ((None, {b"", one, two}), ((), {b""}), ((one,), {b"", one}), ((two, one), {b"", one, two})):
        policy = base.model_copy(update={"code": code})
        for each in (b"", one, two):
            if each in admitted:
                policy.require_code(each, "the run")
            else:
                with pytest.raises(EvidenceError, match=f"code_unlisted: the code {each.hex()} of the run"):
                    policy.require_code(each, "the run")


def test_every_documented_policy_is_one_for_hardware(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "attestation.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```yaml")[1:]]
    assert blocks
    for block in blocks:
        policy = load(tmp_path, block)
        assert all(anchor.evidence_class.value in block for anchor in policy.anchors)
        assert not policy.accepts_simulated


def test_a_boundary_is_carried_by_what_the_policy_compares(tmp_path: Path) -> None:
    listed = TDX | {"rtmr2": ["00" * 48]}
    fields = {"accepted_classes": ["intel_tdx"], "anchors": ["intel_tdx"], "tdx": listed}
    plain, demanding = load(tmp_path, fields), load(tmp_path, fields | {"require_boundary": ["tdx.rtmr2"]})
    assert demanding.require_boundary == ("tdx.rtmr2",)
    assert b"require_boundary" not in plain.encode()
    assert plain.digest() != demanding.digest()


def test_each_accepted_class_has_to_carry_the_boundary(tmp_path: Path) -> None:
    both: dict = {"accepted_classes": ["intel_tdx", "amd_sev_snp"], "anchors": ["intel_tdx", "amd_sev_snp"]}
    both["tdx"] = TDX | {"rtmr2": ["00" * 48]}
    with pytest.raises(ConfigError, match="sev_snp evidence"):
        load(tmp_path, both | {"require_boundary": ["tdx.rtmr2"]})
