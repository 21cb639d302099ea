"""The quote verifier: recorded hardware evidence, and everything the simulator can get wrong."""

import random
from dataclasses import replace
from typing import Any

import dcap_qvl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.core.evidence import Collateral, EvidenceClass
from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.simulators.tdx_platform import FMSPC
from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_AGE_S, COLLATERAL_LIFETIME_S, SimulatedVendor
from raycloak.attestation.tdx.rules import RTMRS, TdxRules
from raycloak.attestation.tdx.verify import verify_tdx
from raycloak.attestation.trust.guest import GuestClaims
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import EvidenceError
from tests.anchors import INTEL_TDX_ANCHOR
from tests.attestation.conftest import MEASUREMENT, NOW, Session, with_tdx
from tests.rounds import ALL
from tests.simulators.tdx import GENUINE, CollateralVariant, QuoteVariant

REPORT_DATA = bytes(range(64))
SIGNED_BYTES = 632


def verify(session: Session, quote: bytes, **changes: Any) -> GuestClaims:
    policy = changes.get("policy", session.policy)
    collateral = changes.get("collateral", session.collateral.tdx[0])
    terms = VerifierTerms(
        changes.get("anchors", policy.anchors),
        policy.accepted_classes,
        changes.get("now", NOW),
        changes.get("floors", {}),
    )
    return verify_tdx(quote, changes.get("bundle", (collateral,)), policy.tdx, terms)


def refusal(session: Session, quote: bytes, **changes: Any) -> str | None:
    try:
        verify(session, quote, **changes)
    except EvidenceError as error:
        return error.code
    return None


@pytest.fixture(scope="module")
def quote(session: Session) -> bytes:
    return session.platform.quote(REPORT_DATA, MEASUREMENT)


def test_what_was_found_of_collateral_before_is_judged_at_every_time_anew(session: Session, quote: bytes) -> None:
    end = verify(session, quote).expires_at
    assert verify(session, quote, now=end - 1).expires_at == verify(session, quote).expires_at
    assert refusal(session, quote, now=end) == "collateral_stale"
    assert refusal(session, quote, now=NOW - 10**8) == "collateral_stale"
    assert refusal(session, quote) is None


def test_a_simulated_quote_passes_with_the_class_of_its_root(session: Session, quote: bytes) -> None:
    claims = verify(session, quote)
    assert claims.evidence_class is EvidenceClass.SIMULATED
    assert (claims.measurement, claims.report_data) == (MEASUREMENT, REPORT_DATA)
    assert claims.platform_id == session.platform.instance_id
    assert claims.expires_at == NOW + COLLATERAL_LIFETIME_S
    assert dict(claims.steps)["rollback"] == "evaluation number 18"
    assert claims.tcb_status == "UpToDate"


def test_a_quote_of_version_5_says_the_same(session: Session, quote: bytes) -> None:
    claims = verify(session, session.platform.quote(REPORT_DATA, MEASUREMENT, QuoteVariant(version=5)))
    assert replace(claims, steps=()) == replace(verify(session, quote), steps=())


def test_no_change_to_a_signed_byte_passes(session: Session, quote: bytes) -> None:
    """One random bit in every third of the 632 signed bytes, or in each in a long run; drawn with a fixed seed."""
    draw = random.Random(1)
    for position in range(0, SIGNED_BYTES, 1 if ALL else 3):
        changed = bytearray(quote)
        changed[position] ^= 1 << draw.randrange(8)
        expected = "evidence_malformed" if position < 8 else "evidence_tampered"
        assert refusal(session, bytes(changed)) == expected, position


@given(st.data())
def test_a_changed_quote_is_refused_or_says_the_same(session: Session, quote: bytes, data: st.DataObject) -> None:
    changed = bytearray(quote)
    changed[data.draw(st.integers(SIGNED_BYTES, len(quote) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        claims = verify(session, bytes(changed))
    except EvidenceError:
        return
    assert claims == verify(session, quote)


COLLATERAL_BYTES = [name for name in Collateral.model_fields if not name.endswith("chain")]


@pytest.mark.parametrize("name", COLLATERAL_BYTES)
def test_changed_collateral_is_refused_as_tampered(session: Session, quote: bytes, name: str) -> None:
    """A document is judged by its signature first, also where a change left no JSON, or another family's name."""
    draw = random.Random(name)
    original = getattr(session.collateral.tdx[0], name)
    raw = original.encode() if isinstance(original, str) else original
    expected = {"evidence_tampered"}
    if name.endswith("crl"):
        expected.add("collateral_stale")  # a list that is no DER any more
    if name == "tcb_info":
        expected.add("platform_mismatch")  # of another family, which is judged before signatures
    if name == "qe_identity":
        expected.add("attestation_key_uncertified")  # of another enclave, likewise
    for _ in range(25):
        changed = bytearray(raw)
        changed[draw.randrange(len(raw))] ^= 1 << draw.randrange(7)
        value = changed.decode() if isinstance(original, str) else bytes(changed)
        found = refusal(session, quote, collateral=session.collateral.tdx[0].model_copy(update={name: value}))
        assert found in expected


@pytest.mark.parametrize("name", ["tcb_info", "qe_identity"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"id": "TDX"'])
def test_a_document_that_is_no_longer_json_is_tampered_not_stale(
    session: Session, quote: bytes, name: str, text: str
) -> None:
    collateral = session.collateral.tdx[0].model_copy(update={name: text})
    assert refusal(session, quote, collateral=collateral) == "evidence_tampered"


def test_a_signed_document_that_is_not_readable_is_stale(session: Session, quote: bytes) -> None:
    own = session.collateral.tdx[0]
    for name in ("tcb_info", "qe_identity"):
        for text in ("{", "{}", "[]"):
            signature = session.vendor._tcb_signer.sign(text.encode())
            unreadable = own.model_copy(update={name: text, f"{name}_signature": signature})
            assert refusal(session, quote, collateral=unreadable) == "collateral_stale"


@pytest.mark.parametrize(("name", "code"), [(name, "collateral_stale") for name in ("root_ca_crl", "pck_crl")])
def test_a_missing_revocation_list_refuses(session: Session, quote: bytes, name: str, code: str) -> None:
    assert refusal(session, quote, collateral=session.collateral.tdx[0].model_copy(update={name: b""})) == code


QUOTE_VARIANTS = {
    "debug": (QuoteVariant(td_attributes=bytes.fromhex("0100001000000000")), "debug"),
    "another debug attribute": (QuoteVariant(td_attributes=bytes.fromhex("8000001000000000")), "debug"),
    "no SEPT_VE_DISABLE": (QuoteVariant(td_attributes=bytes(8)), "attributes"),
    "migratable": (QuoteVariant(td_attributes=bytes.fromhex("0000003000000000")), "attributes"),
    "reserved attribute": (QuoteVariant(td_attributes=bytes.fromhex("0000011000000000")), "attributes"),
    "service TD": (QuoteVariant(version=5, mr_service_td=bytes(47) + b"\1"), "attributes"),
    "debug in version 5": (QuoteVariant(version=5, td_attributes=bytes.fromhex("0100001000000000")), "debug"),
    "foreign attestation key": (QuoteVariant(foreign_attestation_key=True), "attestation_key_uncertified"),
    "enclave of another signer": (QuoteVariant(qe_mrsigner=bytes(32)), "attestation_key_uncertified"),
    "debug enclave": (QuoteVariant(qe_attributes=bytes.fromhex("13" + "00" * 15)), "attestation_key_uncertified"),
    "old enclave": (QuoteVariant(qe_svn=3), "attestation_key_uncertified"),
    "zero vendor": (QuoteVariant(qe_vendor=bytes(16)), "attestation_key_uncertified"),
    "old TDX module": (QuoteVariant(tee_tcb_svn=bytes([2, 1, 3]) + bytes(13)), "tcb_unacceptable"),
    "unknown TDX module": (QuoteVariant(tee_tcb_svn=bytes([3, 9, 3]) + bytes(13)), "tcb_unacceptable"),
}


@pytest.mark.parametrize("name", QUOTE_VARIANTS)
def test_bad_guests_and_enclaves_are_refused_by_name(session: Session, name: str) -> None:
    variant, code = QUOTE_VARIANTS[name]
    assert variant != GENUINE
    assert refusal(session, session.platform.quote(REPORT_DATA, MEASUREMENT, variant)) == code


def collateral_variants(session: Session) -> dict[str, tuple[CollateralVariant, str]]:
    return {
        "other platform family": (CollateralVariant(fmspc=bytes(6)), "platform_mismatch"),
        "platform signs its own TCB info": (CollateralVariant(signer=session.platform), "signer_role"),
        "platform revoked": (CollateralVariant(revoked_platforms=(session.platform,)), "revoked"),
        "TCB signer revoked": (CollateralVariant(revoke_tcb_signer=True), "revoked"),
        "platform CA revoked": (CollateralVariant(revoke_platform_ca=True), "revoked"),
        "level revoked": (CollateralVariant(tcb_status="Revoked"), "tcb_unacceptable"),
        "below every level": (CollateralVariant(component_svns=bytes([4] * 16)), "tcb_unacceptable"),
        "out of date": (CollateralVariant(tcb_status="OutOfDate"), "tcb_status"),
        "hardening needed": (CollateralVariant(tcb_status="SWHardeningNeeded"), "tcb_status"),
    }


@pytest.mark.parametrize("index", range(9))
def test_bad_collateral_is_refused_by_name(session: Session, quote: bytes, index: int) -> None:
    variants = list(collateral_variants(session).values())
    assert len(variants) == 9
    variant, code = variants[index]
    assert refusal(session, quote, collateral=session.vendor.tdx_collateral(NOW, variant)) == code


@pytest.mark.parametrize("status", ["OutOfDate", "SWHardeningNeeded", "ConfigurationNeeded"])
def test_a_listed_status_is_tolerated(session: Session, quote: bytes, status: Any) -> None:
    policy = with_tdx(session.policy, tcb_statuses=("UpToDate", status))
    collateral = session.vendor.tdx_collateral(NOW, CollateralVariant(tcb_status=status))
    assert verify(session, quote, policy=policy, collateral=collateral).tcb_status == status


def test_the_window_of_collateral_has_exact_edges(session: Session, quote: bytes) -> None:
    start, end = NOW - COLLATERAL_AGE_S, NOW + COLLATERAL_LIFETIME_S
    assert [refusal(session, quote, now=now) for now in (start, end - 1)] == [None, None]
    for now in (start - 1, end, end + 1, end + 10**8):
        assert refusal(session, quote, now=now) == "collateral_stale"


@pytest.mark.parametrize("document", ["tcb_info", "qe_identity"])
def test_an_expired_document_beside_current_revocation_lists_is_stale(
    session: Session, quote: bytes, document: str
) -> None:
    older = session.vendor.tdx_collateral(NOW - COLLATERAL_LIFETIME_S)
    fields = {name: getattr(older, name) for name in (document, f"{document}_signature")}
    collateral = session.collateral.tdx[0].model_copy(update=fields)
    assert refusal(session, quote, collateral=collateral, now=NOW - 1) is None
    assert refusal(session, quote, collateral=collateral, now=NOW) == "collateral_stale"


@pytest.mark.parametrize("name", ["allow_dynamic_platform", "allow_cached_keys", "allow_smt"])
def test_platform_properties_the_policy_does_not_allow_are_refused(session: Session, quote: bytes, name: str) -> None:
    assert refusal(session, quote, policy=with_tdx(session.policy, **{name: False})) == "attributes"


def test_collateral_of_another_vendor_is_refused(session: Session, quote: bytes) -> None:
    assert refusal(session, quote, collateral=SimulatedVendor.create().tdx_collateral(NOW)) == "chain_broken"


def test_each_class_is_refused_under_the_other_anchor(session: Session, quote: bytes) -> None:
    other = simulated_policy(SimulatedVendor.create(), MEASUREMENT)
    hardware = Policy(
        accepted_classes=(EvidenceClass.INTEL_TDX,),
        anchors=(INTEL_TDX_ANCHOR,),
        tdx=TdxRules(measurements=(MEASUREMENT,), **dict.fromkeys(RTMRS, "any")),
    )
    for policy in (other, hardware):
        assert refusal(session, quote, policy=policy) == "root_unknown"


def test_a_simulator_never_satisfies_a_hardware_policy(session: Session, quote: bytes) -> None:
    policy = session.policy.model_copy(
        update={
            "accepted_classes": (EvidenceClass.INTEL_TDX,),
            "anchors": (INTEL_TDX_ANCHOR, *session.policy.anchors),
        }
    )
    assert refusal(session, quote, policy=policy) == "simulator_not_allowed"


def test_a_quote_without_certificates_is_refused(session: Session, quote: bytes) -> None:
    pem_at = quote.index(b"-----BEGIN")
    blank = quote[:pem_at] + b" " * (len(quote) - pem_at)
    assert refusal(session, blank) == "chain_broken"


def test_a_debug_guest_is_refused_unless_the_rules_tolerate_it(session: Session) -> None:
    variant = QuoteVariant(td_attributes=bytes.fromhex("0100001000000000"))
    debug = session.platform.quote(REPORT_DATA, MEASUREMENT, variant)
    claims = verify(session, debug, policy=with_tdx(session.policy, allow_debug=True))
    assert claims.dbgstat == "enabled"
    assert verify(session, session.platform.quote(REPORT_DATA, MEASUREMENT)).dbgstat == "disabled-since-boot"


def test_a_guest_without_sept_ve_disable_is_refused_unless_the_rules_tolerate_it(session: Session) -> None:
    quote = session.platform.quote(REPORT_DATA, MEASUREMENT, QuoteVariant(td_attributes=bytes(8)))
    assert refusal(session, quote) == "attributes"
    assert refusal(session, quote, policy=with_tdx(session.policy, require_sept_ve_disable=False)) is None


FAULTS = {
    "tcb_unacceptable": CollateralVariant(component_svns=bytes([4] * 16)),
    "tcb_status": CollateralVariant(tcb_status="OutOfDate"),
    "debug": CollateralVariant(),
}


@pytest.mark.parametrize("first", FAULTS)
def test_the_first_failing_stage_names_the_refusal(session: Session, first: str) -> None:
    """A guest with debug on and page faults unprotected, on a platform with one more fault of an earlier stage."""
    debug = QuoteVariant(td_attributes=bytes.fromhex("0100000000000000"))
    quote = session.platform.quote(REPORT_DATA, MEASUREMENT, debug)
    collateral = session.vendor.tdx_collateral(NOW, FAULTS[first])
    assert refusal(session, quote, collateral=collateral) == first
    assert refusal(session, quote, collateral=collateral, now=NOW + 10**8) == "collateral_stale"


def test_faults_of_the_quote_come_before_missing_collateral(session: Session, quote: bytes) -> None:
    def code(evidence: bytes) -> str | None:
        try:
            verify(session, evidence, bundle=())
        except EvidenceError as error:
            return error.code
        return None

    changed = bytearray(quote)
    changed[200] ^= 1
    foreign = session.platform.quote(REPORT_DATA, MEASUREMENT, QuoteVariant(foreign_attestation_key=True))
    assert code(quote) == "collateral_stale"
    assert code(bytes(changed)) == "evidence_tampered"
    assert code(foreign) == "attestation_key_uncertified"


def test_the_collateral_of_the_platforms_own_family_is_used(session: Session, quote: bytes) -> None:
    other = session.vendor.tdx_collateral(NOW, CollateralVariant(fmspc=bytes(6)))
    claims = verify(session, quote, bundle=(other, session.collateral.tdx[0]))
    assert dict(claims.steps)["platform"] == f"family {FMSPC.hex()}"


def test_an_advisory_that_the_rules_reject_is_refused(session: Session, quote: bytes) -> None:
    collateral = session.vendor.tdx_collateral(NOW, CollateralVariant(advisory_ids=("INTEL-SA-1", "INTEL-SA-2")))
    rated = dict(verify(session, quote, collateral=collateral).steps)["TCB status"]
    assert rated == "UpToDate, INTEL-SA-1 INTEL-SA-2"
    policy = with_tdx(session.policy, rejected_advisories=("INTEL-SA-2",))
    assert refusal(session, quote, collateral=collateral, policy=policy) == "tcb_unacceptable"
    assert refusal(session, quote, policy=policy) is None


# What the library does on its own


def library_accepts(session: Session, quote: bytes, variant: CollateralVariant) -> bool:
    collateral = session.vendor.tdx_collateral(NOW, variant)
    fields = {name: getattr(collateral, name) for name in Collateral.model_fields}
    policy = dcap_qvl.QuotePolicy.strict(NOW).allow_dynamic_platform(True).allow_cached_keys(True).allow_smt(True)
    try:
        dcap_qvl.QuoteVerifier(session.vendor.root_der).verify_with_policy(
            quote, dcap_qvl.QuoteCollateralV3(**fields), NOW, policy
        )
    except ValueError:
        return False
    return True


def test_the_gaps_of_the_library_that_we_close_are_still_there(session: Session, quote: bytes) -> None:
    """A failure means that the library closed a gap, and that a check of ours is no longer needed."""
    assert library_accepts(session, quote, CollateralVariant(signer=session.platform))
    assert library_accepts(session, quote, CollateralVariant(evaluation_number=1))
    assert library_accepts(session, quote + b"x", CollateralVariant())
