"""Indexes of evidence: one made with the simulator, and the recorded one where it is there."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.evidence import Refusal
from raycloak.attestation.snp.report import parse_report
from raycloak.attestation.tdx.quote import parse_quote
from raycloak.attestation.tdx.rules import REGISTERS
from raycloak.attestation.trust.roots import INTEL_SGX_ROOT_DER
from raycloak.attestation.vectors.check import FAMILIES, LAST_STEP, CaseVerdict, check
from raycloak.attestation.vectors.index import VectorCase, read_index
from raycloak.metrics.errors import ConfigError
from tests.attestation.conftest import MEASUREMENT, NOW, Session
from tests.simulators.tdx import CollateralVariant

VECTORS = Path(__file__).resolve().parents[4] / "shared" / "vectors" / "INDEX.json"
REPORT_DATA = bytes(range(64))
AT = datetime.fromtimestamp(NOW, UTC).isoformat()


@pytest.fixture
def folder(session: Session, tmp_path: Path) -> Path:
    """Return a quote, its collateral and its root as files."""
    quote = session.platform.quote(REPORT_DATA, MEASUREMENT)
    (tmp_path / "quote.bin").write_bytes(quote)
    (tmp_path / "quote.json").write_text(json.dumps({"quotes": [quote.hex()]}))
    (tmp_path / "collateral.json").write_bytes(session.collateral.tdx[0].encode())
    (tmp_path / "root.der").write_bytes(session.vendor.root_der)
    return tmp_path


def case(**changes: Any) -> dict[str, Any]:
    policy = {"simulator_root": "root.der", "allow_simulator": True, "measurements": None} | changes.pop("policy", {})
    fields = {"id": "one", "family": "tdx", "evidence": "quote.bin", "encoding": "raw", "at": AT}
    return fields | {"collateral": "collateral.json", "policy": policy, "why": "ignored"} | changes


def write(folder: Path, *cases: dict[str, Any], **fields: Any) -> Path:
    path = folder / "INDEX.json"
    path.write_text(json.dumps({"format": 1, "cases": list(cases)} | fields))
    return path


def verdict(folder: Path, **changes: Any) -> CaseVerdict:
    (found,) = read_index(write(folder, case(**changes)))
    return check(found)


def test_accepted_evidence_says_so(folder: Path) -> None:
    found = verdict(folder, report_data=REPORT_DATA.hex(), policy={"measurements": [MEASUREMENT.hex()]})
    assert (found.accepted, found.refusal, found.step) == (True, None, LAST_STEP)
    assert found.milliseconds > 0
    assert found.as_expected is None
    assert verdict(folder, evidence="quote.json", encoding="json:/quotes/0", expect="accept").as_expected


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"policy": {"measurements": []}}, "measurement_unknown"),
        ({"policy": {"measurements": [bytes(48).hex()]}}, "measurement_unknown"),
        ({"report_data": bytes(64).hex()}, "key_not_bound"),
        ({"policy": {"allow_simulator": False}}, "simulator_not_allowed"),
        ({"policy": {"allow_simulator": "true"}}, "simulator_not_allowed"),
        ({"policy": {"simulator_root": None}}, "root_unknown"),
        ({"collateral": None}, "collateral_stale"),
        ({"collateral": "root.der"}, "collateral_stale"),
        ({"at": "2031-01-01T00:00:00.5z"}, "collateral_stale"),
        ({"encoding": "base64"}, "evidence_malformed"),
        ({"encoding": "json:/x", "evidence": "quote.json"}, "evidence_malformed"),
    ],
)
def test_refused_evidence_names_the_stage(folder: Path, changes: dict[str, Any], code: str) -> None:
    found = verdict(folder, **changes)
    assert (found.accepted, found.refusal, found.step) == (False, code, Refusal[code.upper()].stage)
    assert found.detail


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "sgx"},
        {"evidence": "absent.bin"},
        {"evidence": "a\0b"},
        {"collateral": "absent.json"},
        {"encoding": "utf-7"},
        {"at": "2026-01-01T00:00:00"},
        {"at": "yesterday"},
        {"at": "0001-01-01T00:00:00+14:00"},
        {"at": "9999-12-31T23:59:59-14:00"},
        {"rim": "both"},
        {"expect": "maybe"},
        {"encoding": None},
        {"report_data": "xyz!"},
        {"policy": {"no_such_rule": 1}},
        {"policy": {"tcb_statuses": ["Fine"]}},
        {"policy": {"simulator_root": "absent.der"}},
        {"policy": {"simulator_root": "collateral.json"}},
    ],
)
def test_what_cannot_be_appraised_gets_no_verdict(folder: Path, changes: dict[str, Any]) -> None:
    found = verdict(folder, **changes)
    assert (found.accepted, found.refusal) == (None, None)
    assert found.detail


def test_a_case_that_is_not_of_the_format_costs_the_others_nothing(folder: Path) -> None:
    found = [check(each) for each in read_index(write(folder, case(id="odd", crl=7), case(), {"id": "bare"}))]
    assert [each.accepted for each in found] == [None, True, None]
    assert ["crl" in found[0].detail, "family" in found[2].detail] == [True, True]


def test_a_policy_of_null_is_an_empty_one(folder: Path) -> None:
    silent = case() | {"policy": None}
    (found,) = read_index(write(folder, silent, default_policy=None))
    assert check(found).refusal == "root_unknown"


def test_registers_of_real_hardware_are_compared_where_a_case_lists_them(vectors: Path) -> None:
    (known,) = (each for each in recorded() if each.fields.id == "tdx-cos-uptodate")
    quote = parse_quote(known.evidence())
    values = {name: getattr(quote.report, name) for name in REGISTERS}
    right = {name: [value.hex()] for name, value in values.items()}
    assert len(set(values.values())) > 3
    assert check(replace(known, policy={**known.policy, **right})).accepted
    for name in right:
        wrong = {**known.policy, **right, name: [bytes([1] * 48).hex()]}
        assert check(replace(known, policy=wrong)).refusal == "measurement_unknown"


def test_host_data_and_key_kinds_of_real_hardware_are_compared_where_a_case_lists_them(vectors: Path) -> None:
    known = {each.fields.id: each for each in recorded()}
    chip, shared = known["snp-azure-v1"], known["snp-vlek-vmpl1-allowed"]
    own = parse_report(chip.evidence()).host_data.hex()
    for case, rule, code in (
        (chip, {"host_data": [own]}, None),
        (chip, {"host_data": ["11" * 32]}, "measurement_unknown"),
        (chip, {"key_kinds": ["VCEK"]}, None),
        (shared, {"key_kinds": ["VCEK"]}, "firmware_floor"),
    ):
        assert check(replace(case, policy={**case.policy, **rule})).refusal == code


def test_a_status_that_nobody_may_accept_stays_refused(folder: Path, session: Session) -> None:
    revoked = session.vendor.tdx_collateral(NOW, CollateralVariant(tcb_status="Revoked"))
    (folder / "revoked.json").write_bytes(revoked.encode())
    policy = {"tcb_statuses": ["UpToDate", "Revoked"]}
    assert verdict(folder, policy=policy).accepted
    assert verdict(folder, policy=policy, collateral="revoked.json").refusal == "tcb_unacceptable"


def test_a_vendors_root_is_no_simulators(folder: Path) -> None:
    (folder / "root.der").write_bytes(INTEL_SGX_ROOT_DER)
    assert verdict(folder).accepted is None


def test_a_default_policy_lies_under_a_cases_own(folder: Path) -> None:
    defaults = {"tdx": {"measurements": [MEASUREMENT.hex()], "allow_simulator": True, "simulator_root": "root.der"}}
    plain, strict = case(policy={}), case(id="two", policy={})
    plain["policy"], strict["policy"] = {}, {"measurements": []}
    found = [check(each) for each in read_index(write(folder, plain, strict, default_policy=defaults))]
    assert [each.refusal for each in found] == [None, "measurement_unknown"]


def test_without_a_word_about_measurements_none_is_known(folder: Path) -> None:
    silent = case()
    del silent["policy"]["measurements"]
    (found,) = read_index(write(folder, silent))
    assert check(found).refusal == "measurement_unknown"


@pytest.mark.parametrize(
    "document",
    [
        *("", "[]", "{}", '{"cases": [{}]}', '{"cases": 1}', '{"cases": [], "cases": []}', "\ud800"),
        *('{"cases": [], "format": 2}', '{"cases": [{"id": "a"}], "default_policy": []}', '{"cases": [0]}'),
        *('{"cases": []}', '{"cases": {"id": "a"}}', '{"cases": [{"id": "a"}], "default_policy": {"tdx": 1}}'),
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, document: str) -> None:
    path = tmp_path / "INDEX.json"
    path.write_bytes(document.encode(errors="surrogatepass"))
    for where in (path, tmp_path / "absent.json"):
        with pytest.raises(ConfigError) as refused:
            read_index(where)
        assert refused.value.code == "index"


@pytest.mark.parametrize(
    ("document", "fact"),
    [
        ("{}", "it has no list 'cases' with a case in it"),
        ("[]", "it has no list 'cases' with a case in it"),
        ('{"cases": []}', "it has no list 'cases' with a case in it"),
        ('{"cases": [{"name": "a"}]}', "each of its 'cases' must be an object with an 'id'"),
    ],
)
def test_the_refusal_of_an_index_says_what_it_lacks(tmp_path: Path, document: str, fact: str) -> None:
    (path := tmp_path / "INDEX.json").write_text(document)
    with pytest.raises(ConfigError) as refused:
        read_index(path)
    assert str(refused.value).endswith(f"{path} is not an index of evidence: {fact}. See docs/attestation-index.md.")


@pytest.mark.parametrize("rim", [{"Driver": "rim.xml"}, {"driver": "rim.xml", "firmware": None}, {"driver": 1}])
def test_reference_values_under_another_name_are_not_passed_over(folder: Path, rim: dict[str, Any]) -> None:
    found = verdict(folder, rim=rim)
    assert found.accepted is None
    assert "rim" in found.detail


def test_an_id_given_twice_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        read_index(write(folder, case(), case()))


# The recorded index


@cache
def recorded() -> tuple[VectorCase, ...]:
    return read_index(VECTORS) if VECTORS.is_file() else ()


def recorded_cases() -> list[Any]:
    cases = [pytest.param(each, id=each.fields.id) for each in recorded() if each.fields.family in FAMILIES]
    absent = pytest.mark.skip(reason="no recorded hardware evidence beside the repository (../shared/vectors)")
    return cases or [pytest.param(None, marks=absent, id="absent")]


@pytest.mark.parametrize("known", recorded_cases())
def test_recorded_evidence_gets_its_known_verdict(known: VectorCase) -> None:
    found = check(known)
    fields = known.fields
    assert (found.accepted, found.refusal) == (fields.expect == "accept", fields.refusal), found.detail


def test_no_verdict_depends_on_the_order_of_cases(vectors: Path) -> None:
    """Every tenth case in reverse order, after all of them were judged once above in order."""
    for known in recorded()[::-10]:
        if known.fields.family in FAMILIES:
            assert check(known).refusal == known.fields.refusal


def test_recorded_evidence_is_of_both_verdicts(vectors: Path) -> None:
    expected = {each.fields.expect for each in recorded() if each.fields.family == "tdx"}
    assert expected == {"accept", "refuse"}
