"""AMD's revocation lists: who is on them, who signed them, when they hold, and that they only grow newer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_AGE_S, COLLATERAL_LIFETIME_S
from tests.attestation.conftest import NOW
from tests.attestation.snp.snp_bench import ADMIT_ALL, SnpBench, bench_of
from tests.simulators.snp import CRL_NUMBER, SimulatedAmd
from tests.simulators.snp_pki import AuthorityKeys, EndorsementVariant


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


def test_a_revoked_ca_or_endorsement_key_is_refused(bench: SnpBench) -> None:
    revoked_ca = bench.amd.crl(NOW, revoked=bench.machine.chain[1:])
    assert bench.refusal(bench.report(), crls=(revoked_ca,)) == "revoked"
    numbered = bench.with_machine(endorsement=EndorsementVariant(serial=99))
    assert numbered.refusal(numbered.report()) is None
    revoked_key = bench.amd.crl(NOW, revoked=numbered.machine.chain[:1])
    assert numbered.refusal(numbered.report(), crls=(revoked_key,)) == "revoked"
    assert bench.refusal(bench.report(), crls=(revoked_key,)) is None


def test_revocation_is_judged_before_a_lists_age(bench: SnpBench) -> None:
    crl = bench.amd.crl(NOW, revoked=bench.machine.chain[1:])
    assert bench.refusal(bench.report(), crls=(crl,), now=NOW + COLLATERAL_LIFETIME_S) == "revoked"


def test_a_list_that_its_issuer_did_not_sign_is_tampered(bench: SnpBench, stranger: SimulatedAmd) -> None:
    assert bench.refusal(bench.report(), crls=(bench.amd.crl(NOW, signer=stranger),)) == "evidence_tampered"


def test_a_missing_unreadable_or_outdated_list_refuses_where_one_is_required(bench: SnpBench, turin: SnpBench) -> None:
    report, lenient = bench.report(), ADMIT_ALL.model_copy(update={"require_crl": False})
    for crls in ((), (turin.crl,), (b"",), (bench.crl, b"?"), (bench.amd.crl(NOW - COLLATERAL_LIFETIME_S),)):
        assert bench.refusal(report, crls=crls) == "collateral_stale"
    assert bench.verify(report, crls=(), rules=lenient).facts == ()
    assert bench.refusal(report, crls=(turin.crl,), rules=lenient) is None
    assert bench.refusal(report, crls=(bench.crl, turin.crl)) is None
    assert bench.refusal(report, crls=(b"?",), rules=lenient) == "collateral_stale"


def test_the_window_of_the_list_has_exact_edges(bench: SnpBench) -> None:
    start, end = NOW - COLLATERAL_AGE_S, NOW + COLLATERAL_LIFETIME_S
    assert [bench.refusal(bench.report(), now=now) for now in (start, end - 1)] == [None, None]
    assert {bench.refusal(bench.report(), now=now) for now in (start - 1, end)} == {"collateral_stale"}


def test_a_list_below_the_highest_number_seen_is_a_rollback(bench: SnpBench) -> None:
    floors = dict(bench.verify(bench.report()).facts)
    higher = {name: number + 1 for name, number in floors.items()}
    assert bench.refusal(bench.report(), floors=floors) is None
    assert bench.refusal(bench.report(), floors=higher) == "collateral_rollback"
    newer = bench.amd.crl(NOW, number=CRL_NUMBER + 1)
    assert bench.refusal(bench.report(), floors=higher, crls=(bench.crl, newer)) is None
    debug = bench.report(policy=0xB_0000)
    assert bench.refusal(debug, floors=higher) == "collateral_rollback"


def test_an_old_edition_of_a_list_is_passed_over_beside_the_newer_one(bench: SnpBench) -> None:
    """Only where both are for the same kind of key, and whom the old one revokes stays revoked."""
    past = NOW - 2 * COLLATERAL_LIFETIME_S
    old, new = bench.amd.crl(past, number=5), bench.amd.crl(NOW, number=6)
    for crls in ((old, new), (new, old)):
        assert bench.refusal(bench.report(), crls=crls) is None
    assert bench.refusal(bench.report(), crls=(old,)) == "collateral_stale"
    assert bench.refusal(bench.report(), crls={"VCEK": (new,), "VLEK": (old,)}) == "collateral_stale"
    revoking = bench.amd.crl(past, revoked=bench.machine.chain[1:], number=5)
    assert bench.refusal(bench.report(), crls=(revoking, new)) == "revoked"
    assert bench.refusal(bench.report(), crls={"VCEK": (new,), "VLEK": (revoking,)}) == "revoked"


def test_the_list_for_the_other_kind_of_key_is_no_list(bench: SnpBench) -> None:
    """One root signs both. Where they do not say which they are, only the place they were published at tells."""
    other = {"VCEK": "VLEK", "VLEK": "VCEK"}
    for kind in ("VCEK", "VLEK"):
        of_kind = bench.with_machine(kind)
        assert of_kind.refusal(of_kind.report(), crls={kind: (bench.crl,)}) is None
        assert of_kind.refusal(of_kind.report(), crls={other[kind]: (bench.crl,)}) == "collateral_stale"


def test_a_list_that_states_its_address_is_of_the_kind_in_it(bench: SnpBench) -> None:
    """So a mirror cannot serve the list of one kind of key at the address of the other."""
    address = "https://kdsintf.amd.com/{}/v1/Genoa/crl"
    vcek, vlek = (bench.amd.crl(NOW, address=address.format(kind)) for kind in ("vcek", "vlek"))
    assert bench.refusal(bench.report(), crls={"VCEK": (vlek,)}) == "collateral_stale"
    assert bench.refusal(bench.report(), crls={"VCEK": (vlek,), "VLEK": (vcek,)}) is None
    revoking = bench.amd.crl(NOW, revoked=bench.machine.chain[1:], address=address.format("vlek"))
    assert bench.refusal(bench.report(), crls={"VCEK": (vcek, revoking)}) == "revoked"


def test_lists_of_two_kinds_of_key_have_a_floor_each(bench: SnpBench) -> None:
    """One root publishes both, and numbers each for itself."""
    first, second = (bench.amd.crl(NOW, number=number) for number in (5, 9))
    facts = bench.verify(bench.report(), crls={"VCEK": (first,), "VLEK": (second,)}).facts
    assert sorted(number for _, number in facts) == [5, 9]
    assert bench.refusal(bench.report(), crls=(first,), floors=dict(facts)) is None
    older = bench.amd.crl(NOW, number=4)
    lists = {"VCEK": (older,), "VLEK": (second,)}
    assert bench.refusal(bench.report(), crls=lists, floors=dict(facts)) == "collateral_rollback"


@settings(max_examples=25)
@given(st.data())
def test_a_changed_list_is_refused_or_says_the_same(bench: SnpBench, data: st.DataObject) -> None:
    crl = bytearray(bench.crl)
    crl[data.draw(st.integers(0, len(crl) - 1))] ^= data.draw(st.integers(1, 255))
    assert bench.refusal(bench.report(), crls=(bytes(crl),)) in ("evidence_tampered", "collateral_stale")
