from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from attestation.evidence import EvidenceClass
from attestation.policy import INTEL_TDX_ANCHOR, Anchor, Policy, load_policy, simulated_policy
from attestation.roots import INTEL_SGX_ROOT_DER
from metrics.errors import ConfigError
from tests.attestation.conftest import MEASUREMENT, Session

HARDWARE = {"accepted_classes": ["intel_tdx"], "anchors": ["intel_tdx"], "measurements": [MEASUREMENT.hex()]}


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
    policy = load(tmp_path, HARDWARE | {"tcb_statuses": ["UpToDate", "SWHardeningNeeded"], "platforms": ["0a" * 16]})
    assert policy.anchors == (INTEL_TDX_ANCHOR,)
    assert policy.measurements == (MEASUREMENT,)
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
        {"anchors": ["amd_sev_snp"]},
        {"anchors": [{"evidence_class": "simulated", "root_der": "00"}]},
        {"measurements": ["00"]},
        {"measurements": "all"},
        {"measurements": None},
        {"tcb_statuses": ["Revoked"]},
        {"tcb_statuses": ["anything"]},
        {"evidence_lifetime_s": 0},
        {"minimum_evaluation_number": -1},
        {"allow_smt": "yes"},
        {"platforms": ["00"]},
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
    assert load(tmp_path, text).measurements == (MEASUREMENT,)
    with pytest.raises(ConfigError, match="given twice"):
        load(tmp_path, text + f"measurements: ['{MEASUREMENT.hex()}']\n")


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for name in ("absent", "binary"):
        with pytest.raises(ConfigError):
            load_policy(tmp_path / name)


def test_every_field_is_in_the_digest(session: Session) -> None:
    base = simulated_policy(session.vendor, MEASUREMENT)
    changes = {
        "accepted_classes": (EvidenceClass.SIMULATED, EvidenceClass.INTEL_TDX),
        "anchors": (*base.anchors, INTEL_TDX_ANCHOR),
        "measurements": (bytes(48),),
        "tcb_statuses": ("UpToDate", "OutOfDate"),
        "rejected_advisories": ("INTEL-SA-1",),
        "minimum_evaluation_number": 1,
        "evidence_lifetime_s": 5,
        "allow_dynamic_platform": False,
        "allow_cached_keys": False,
        "allow_smt": False,
        "platforms": (),
    }
    assert set(changes) == set(Policy.model_fields)
    digests = {base.model_copy(update={name: value}).digest() for name, value in changes.items()}
    assert len(digests | {base.digest()}) == len(changes) + 1


def test_the_documented_policy_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "attestation.md").read_text()
    policy = load(tmp_path, page.split("```yaml")[1].split("```")[0])
    assert policy.anchors == (INTEL_TDX_ANCHOR,)
    assert not policy.accepts_simulated
