"""The second opinion of dcap-qvl: the question, the parts of its answer that are ignored, and the code of its
refusal."""

from typing import Any

import dcap_qvl
import pytest

from raycloak.attestation.core.evidence import Collateral
from raycloak.attestation.simulators.tdx_platform import TEE_TCB_SVN
from raycloak.attestation.tdx import second_opinion
from raycloak.attestation.tdx import verify as tdx
from raycloak.attestation.tdx.rating import TdxRating
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MEASUREMENT, NOW, Session, with_tdx
from tests.attestation.tdx.test_verify import REPORT_DATA, refusal, verify
from tests.simulators.tdx import CollateralVariant, QuoteVariant

DEBUG = QuoteVariant(td_attributes=bytes.fromhex("0100001000000000"))
OTHER_DEBUG = QuoteVariant(td_attributes=bytes.fromhex("8000001000000000"))
NO_SEPT_VE = QuoteVariant(td_attributes=bytes(8))
OLD_MODULE = bytes((TEE_TCB_SVN[0] - 1,)) + TEE_TCB_SVN[1:]


def library_text(session: Session, quote: bytes, variant: CollateralVariant, number: int = 0) -> str:
    """Return why the library refuses, under a policy that only asks for an evaluation number."""
    collateral = session.vendor.tdx_collateral(NOW, variant)
    fields = {name: getattr(collateral, name) for name in Collateral.model_fields}
    policy = dcap_qvl.QuotePolicy.strict(NOW).allow_dynamic_platform(True).allow_cached_keys(True).allow_smt(True)
    policy = policy.min_tcb_eval_data_number(number).reject_advisories(["INTEL-SA-1"])
    with pytest.raises(ValueError, match=r".") as refused:
        dcap_qvl.QuoteVerifier(session.vendor.root_der).verify_with_policy(
            quote, dcap_qvl.QuoteCollateralV3(**fields), NOW, policy
        )
    return str(refused.value).removeprefix("Verification failed: ")


TEXTS: dict[str, tuple[QuoteVariant, CollateralVariant, str]] = {
    "below every level": (QuoteVariant(), CollateralVariant(component_svns=bytes([4] * 16)), "tcb_unacceptable"),
    "revoked": (QuoteVariant(), CollateralVariant(tcb_status="Revoked"), "tcb_unacceptable"),
    "unknown module": (QuoteVariant(tee_tcb_svn=bytes([3, 9, 3]) + bytes(13)), CollateralVariant(), "tcb_unacceptable"),
    "old module now": (QuoteVariant(version=5, tee_tcb_svn2=OLD_MODULE), CollateralVariant(), "tcb_unacceptable"),
    "advisory": (QuoteVariant(), CollateralVariant(advisory_ids=("INTEL-SA-1",)), "tcb_unacceptable"),
    "out of date": (QuoteVariant(), CollateralVariant(tcb_status="OutOfDate"), "tcb_status"),
    "number": (QuoteVariant(), CollateralVariant(evaluation_number=17), "collateral_rollback"),
    "debug": (DEBUG, CollateralVariant(), "debug"),
    "SEPT_VE": (NO_SEPT_VE, CollateralVariant(), "attributes"),
    "migration": (QuoteVariant(td_attributes=bytes.fromhex("0000003000000000")), CollateralVariant(), "attributes"),
    "other family": (QuoteVariant(), CollateralVariant(fmspc=bytes(6)), "platform_mismatch"),
    "vendor": (QuoteVariant(qe_vendor=bytes(16)), CollateralVariant(), "attestation_key_uncertified"),
    "foreign key": (QuoteVariant(foreign_attestation_key=True), CollateralVariant(), "evidence_tampered"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_librarys_own_words_get_the_code_that_our_stage_would_set(session: Session, name: str) -> None:
    """The texts come from the installed library, so a changed wording would show here."""
    guest, collateral, code = TEXTS[name]
    text = library_text(session, session.platform.quote(REPORT_DATA, MEASUREMENT, guest), collateral, 18)
    with pytest.raises(EvidenceError) as refused:
        second_opinion._refuse_by_text(text)
    assert refused.value.code == code, text


def test_words_that_nobody_knows_are_tampered_evidence() -> None:
    for text in ("", "something failed to evaluate", "no debug information in DER"):
        with pytest.raises(EvidenceError) as refused:
            second_opinion._refuse_by_text(text)
        assert refused.value.code == "evidence_tampered"


LAX: dict[str, tuple[QuoteVariant, dict[str, Any]]] = {
    "debug": (DEBUG, {"allow_debug": True}),
    "another debug attribute": (OTHER_DEBUG, {"allow_debug": True}),
    "no SEPT_VE_DISABLE": (NO_SEPT_VE, {"require_sept_ve_disable": False}),
}


@pytest.mark.parametrize("name", LAX)
def test_of_a_tolerated_guest_the_library_judges_everything_else(
    session: Session, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rating of ours that finds nothing wrong does not decide alone whether the platform reaches a level."""
    guest, rules = LAX[name]
    policy = with_tdx(session.policy, **rules)
    quote = session.platform.quote(REPORT_DATA, MEASUREMENT, guest)
    assert refusal(session, quote, policy=policy) is None
    assert refusal(session, quote) in ("debug", "attributes")
    below = session.vendor.tdx_collateral(NOW, CollateralVariant(component_svns=bytes([4] * 16)))
    monkeypatch.setattr(tdx, "rate", lambda *_: TdxRating("UpToDate", "UpToDate", "UpToDate", ()))
    assert refusal(session, quote, policy=policy, collateral=below) == "tcb_unacceptable"


def test_another_refusal_than_the_tolerated_one_stands(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debug guests are tolerated, SEPT_VE_DISABLE off is not, and a stage of ours looks away."""
    monkeypatch.setattr(tdx, "_check_guest", lambda *_: None)
    policy = with_tdx(session.policy, allow_debug=True)
    for guest, code in ((DEBUG, None), (NO_SEPT_VE, "attributes")):
        quote = session.platform.quote(REPORT_DATA, MEASUREMENT, guest)
        assert refusal(session, quote, policy=policy) == code


# TD 1.5: a TDX module that was updated below a running guest


@pytest.mark.parametrize(
    ("platform", "advised"),
    [
        ("UpToDate", "TDRelaunchAdvised"),
        ("ConfigurationNeeded", "TDRelaunchAdvisedConfigurationNeeded"),
        ("SWHardeningNeeded", "TDRelaunchAdvised"),
    ],
)
def test_a_guest_launched_on_an_older_module_needs_a_policy_that_says_so(
    session: Session, platform: Any, advised: Any
) -> None:
    guest = QuoteVariant(5, tee_tcb_svn=OLD_MODULE, tee_tcb_svn2=TEE_TCB_SVN)
    quote = session.platform.quote(REPORT_DATA, MEASUREMENT, guest)
    variant = CollateralVariant(old_module_status="OutOfDate", tcb_status=platform)
    collateral = session.vendor.tdx_collateral(NOW, variant)
    for statuses in (("UpToDate",), ("UpToDate", "OutOfDate", "OutOfDateConfigurationNeeded", platform)):
        policy = with_tdx(session.policy, tcb_statuses=statuses)
        assert refusal(session, quote, policy=policy, collateral=collateral) == "tcb_status"
    policy = with_tdx(session.policy, tcb_statuses=("UpToDate", advised))
    hardened = platform == "SWHardeningNeeded"
    assert refusal(session, quote, policy=policy, collateral=collateral) == ("tcb_status" if hardened else None)
    policy = with_tdx(session.policy, tcb_statuses=("UpToDate", advised, platform))
    assert verify(session, quote, policy=policy, collateral=collateral).tcb_status == advised


def test_the_current_module_is_rated_too(session: Session) -> None:
    """It is older than the one at launch, or unknown: what the library says of the first we do not take."""
    collateral = session.vendor.tdx_collateral(NOW, CollateralVariant(old_module_status="OutOfDate"))
    for svn2, code in (
        (TEE_TCB_SVN, None),
        (OLD_MODULE, "tcb_status"),
        (bytes([1]) + TEE_TCB_SVN[1:], "tcb_unacceptable"),
        (bytes([3, 9, 3]) + bytes(13), "tcb_unacceptable"),
        (TEE_TCB_SVN[:2] + bytes(14), "tcb_unacceptable"),
    ):
        quote = session.platform.quote(REPORT_DATA, MEASUREMENT, QuoteVariant(5, tee_tcb_svn2=svn2))
        assert refusal(session, quote, collateral=collateral) == code
    revoked = session.vendor.tdx_collateral(NOW, CollateralVariant(old_module_status="Revoked"))
    for launch, now in ((OLD_MODULE, TEE_TCB_SVN), (TEE_TCB_SVN, OLD_MODULE)):
        quote = session.platform.quote(REPORT_DATA, MEASUREMENT, QuoteVariant(5, tee_tcb_svn=launch, tee_tcb_svn2=now))
        assert refusal(session, quote, collateral=revoked) == "tcb_unacceptable"
