"""Numbers of TDX collateral that may only rise, and bundles of collateral of several platform families."""

import pytest

from raycloak.attestation.simulators.der import sgx_extension
from raycloak.attestation.simulators.tdx_pki import Credential, certify_platform, new_key
from raycloak.attestation.simulators.tdx_platform import COMPONENT_SVNS, PCE_SVN, SimulatedPlatform
from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_LIFETIME_S, SimulatedVendor
from tests.attestation.conftest import MEASUREMENT, NOW, Session, with_tdx
from tests.attestation.tdx.test_verify import REPORT_DATA, refusal, verify
from tests.simulators.tdx import CollateralVariant, VariantVendor

OTHER_FAMILY = bytes.fromhex("00806f050000")


@pytest.fixture(scope="module")
def quote(session: Session) -> bytes:
    return session.platform.quote(REPORT_DATA, MEASUREMENT)


def test_collateral_below_the_floor_is_a_rollback(session: Session, quote: bytes) -> None:
    strict = with_tdx(session.policy, min_tcb_evaluation_data_number=19)
    facts = dict(verify(session, quote).facts)
    assert list(facts.values()) == [18] * 4  # TCB info, QE identity and two revocation lists
    assert refusal(session, quote, floors=facts) is None
    assert refusal(session, quote, floors={"of another root": 19}) is None
    for name in facts:
        assert refusal(session, quote, floors={name: 19}) == "collateral_rollback"
    assert refusal(session, quote, policy=strict) == "collateral_rollback"


def test_the_floor_of_one_platform_family_is_none_for_another(session: Session, quote: bytes) -> None:
    """Vendors publish for each family in its own time: 19 for one is no reason to refuse 18 for another."""
    ahead = session.vendor.tdx_collateral(NOW, CollateralVariant(fmspc=OTHER_FAMILY, evaluation_number=19))
    machine = replace_family(session.vendor, OTHER_FAMILY)
    facts = dict(verify(session, machine.quote(REPORT_DATA, MEASUREMENT), collateral=ahead).facts)
    of_family = {name: number for name, number in facts.items() if OTHER_FAMILY.hex() in name}
    assert list(of_family.values()) == [19]
    assert refusal(session, quote, floors=of_family) is None
    newer_identity = {name: number for name, number in facts.items() if "TD_QE" in name}
    assert refusal(session, quote, floors=newer_identity) == "collateral_rollback"


def replace_family(vendor: SimulatedVendor, fmspc: bytes) -> SimulatedPlatform:
    """Return a machine of another platform family under the same vendor."""
    instance_id = bytes(range(16))
    key = new_key()
    described = sgx_extension(
        ppid=bytes(16), fmspc=fmspc, instance_id=instance_id, component_svns=COMPONENT_SVNS, pce_svn=PCE_SVN
    )
    certificate = certify_platform(vendor._platform_ca, key.public_key(), described)
    issuers = vendor._platform_ca.pem + vendor._root.pem
    return SimulatedPlatform(Credential(key, certificate), new_key(), issuers, instance_id)


def test_the_newest_list_of_a_common_issuer_counts_whichever_family_it_came_with(
    session: Session, quote: bytes
) -> None:
    """Otherwise the older of two files of one bundle would be a rollback once the newer one was seen."""
    revoking = CollateralVariant(fmspc=OTHER_FAMILY, evaluation_number=19, revoked_platforms=(session.platform,))
    harmless = CollateralVariant(fmspc=OTHER_FAMILY, evaluation_number=19)
    older = CollateralVariant(fmspc=OTHER_FAMILY, evaluation_number=17, revoked_platforms=(session.platform,))
    own = session.collateral.tdx[0]
    for variant, code in ((revoking, "revoked"), (harmless, None), (older, None)):
        other = session.vendor.tdx_collateral(NOW, variant)
        for bundle in ((own, other), (other, own)):
            assert refusal(session, quote, bundle=bundle) == code
    seen = verify(session, quote, bundle=(own, session.vendor.tdx_collateral(NOW, harmless))).facts
    assert sorted(number for _, number in seen) == [18, 18, 19, 19]
    foreign = VariantVendor.create().tdx_collateral(NOW, harmless)
    assert refusal(session, quote, bundle=(own, foreign)) is None


def test_of_two_editions_for_one_family_the_newer_one_counts_in_any_order(session: Session, quote: bytes) -> None:
    """An old file that was left in the list is no reason to refuse, nor to rate a platform as it was."""
    own = session.collateral.tdx[0]
    expired = session.vendor.tdx_collateral(NOW - COLLATERAL_LIFETIME_S)
    fixed = session.vendor.tdx_collateral(NOW, CollateralVariant(evaluation_number=19, tcb_status="OutOfDate"))
    for other, code in ((expired, None), (fixed, "tcb_status")):
        assert {refusal(session, quote, bundle=bundle) for bundle in ((own, other), (other, own))} == {code}
