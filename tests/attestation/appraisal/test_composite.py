"""Composite evidence: an SEV-SNP guest with confidential GPUs, and members beside each other."""

import json
from dataclasses import replace
from typing import Any

import pytest

from raycloak.attestation.appraisal.appraisal import Appraisal, verify_guest
from raycloak.attestation.appraisal.eat import claims_set
from raycloak.attestation.appraisal.enrolment import Enrolment, check_enrolment
from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.core.report_data import expected_report_data
from raycloak.attestation.gpu.verify import gpu_nonce
from raycloak.attestation.orchestrator.admissions import admitted_body
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.snp.report import parse_report
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.trust.guest import GuestClaims
from raycloak.metrics.errors import EvidenceError
from tests.attestation.composite_site import NONCE, Site, composite_site
from tests.attestation.conftest import NOW, Session
from tests.simulators.snp_pki import AuthorityKeys


@pytest.fixture(scope="module")
def site(session: Session, amd_keys: AuthorityKeys) -> Site:
    return composite_site(session, amd_keys)


def test_an_snp_guest_with_its_gpus_is_accepted(site: Site) -> None:
    appraisal = site.appraise(site.presentation())
    assert appraisal.platform_id == site.machine.chip_id
    assert len(appraisal.gpus) == 2
    assert appraisal.evidence_classes == (EvidenceClass.SIMULATED,)
    assert appraisal.expires_at <= min(gpu.expires_at for gpu in appraisal.gpus)
    steps = [step for step, _ in appraisal.steps]
    assert steps.index("measurement") < steps.index("binding") < steps.index("GPU 0 root") < steps.index("machine")


def test_a_tdx_guest_may_have_the_same_gpus(site: Site) -> None:
    presentation = site.member.presentation(gpu_evidence=site.gpu_evidence())
    assert len(site.appraise(presentation).gpus) == 2


def test_gpus_that_are_missing_extra_or_there_twice_are_not_bound(site: Site) -> None:
    first, second = site.gpus
    for chosen in ((first,), (first, second, second), (first, first)):
        assert site.refusal(site.presentation(gpu_evidence=site.gpu_evidence(*chosen))) == "gpu_not_bound"
    assert site.refusal(site.presentation(gpu_evidence=())) == "gpu_not_bound"


def test_gpus_over_another_nonce_or_key_are_not_bound(site: Site) -> None:
    for nonce in (NONCE, gpu_nonce(b"o" * 32, site.member.hpke.public), gpu_nonce(NONCE, bytes(1216))):
        evidence = site.gpu_evidence(nonce=nonce)
        assert site.refusal(site.presentation(gpu_evidence=evidence)) == "gpu_not_bound"


def test_gpus_that_the_guest_does_not_vouch_for_are_not_bound(site: Site) -> None:
    honest = site.presentation()
    swapped = honest.model_copy(update={"gpu_evidence": honest.gpu_evidence[::-1]})
    assert site.refusal(swapped) == "key_not_bound"


def test_gpus_in_clear_mode_come_with_their_switches(site: Site) -> None:
    appraisal = site.appraise(site.switched(), policy=site.clear_links)
    assert len(appraisal.switches) == 2
    assert appraisal.links == "clear over attested switches"
    assert appraisal.expires_at <= min(switch.expires_at for switch in appraisal.switches)
    steps = dict(appraisal.steps)
    assert steps["switch 1 mode"] == "locked"
    assert steps["links"] == appraisal.links
    claims = claims_set(appraisal)
    assert set(claims["submods"]) == {"gpu-0", "gpu-1", "switch-0", "switch-1"}
    assert claims["links"] == appraisal.links
    entry = admitted_body(appraisal, NOW, b"")
    assert entry["switches"] == [each.platform_id.hex() for each in appraisal.switches]
    assert "switches" not in admitted_body(site.appraise(site.presentation()), NOW, b"")
    assert site.refusal(site.switched()) == "gpu_state", "the policy accepts no such mode"
    assert site.appraise(site.presentation()).links == "encrypted"


def test_switches_that_the_guest_does_not_vouch_for_are_not_bound(site: Site) -> None:
    honest = site.switched()
    swapped = honest.model_copy(update={"switch_evidence": honest.switch_evidence[::-1]})
    without = honest.model_copy(update={"switch_evidence": ()})
    assert site.refusal(swapped, policy=site.clear_links) == "key_not_bound"
    assert site.refusal(without, policy=site.clear_links) == "key_not_bound"
    assert site.refusal(site.switched(switch_evidence=()), policy=site.clear_links) == "switch_missing"
    first, *_ = honest.switch_evidence
    assert site.refusal(site.switched(switch_evidence=(first, first)), policy=site.clear_links) == "switch_doubled"


def test_report_data_tells_code_and_switches_apart(site: Site) -> None:
    """Each is a field of its own, whichever of them is empty."""
    shown = site.switched()
    code = shown.model_copy(update={"switch_evidence": (), "code": b"c" * 32})
    both = shown.model_copy(update={"code": b"c" * 32})
    bare = shown.model_copy(update={"switch_evidence": ()})
    assert len({expected_report_data(each) for each in (shown, code, both, bare)}) == 4


def test_an_aggregator_presents_no_gpu(site: Site) -> None:
    aggregator = {"role": "aggregator", "member_id": "aggregator-0", "known_answer": b""}
    session = {"role": "aggregator", "member_id": "aggregator-0"}
    assert site.refusal(site.presentation(**aggregator, gpu_evidence=()), **session) is None
    assert site.refusal(site.presentation(**aggregator), **session) == "gpu_not_bound"


def test_a_report_is_judged_in_its_own_format_only(site: Site) -> None:
    presentation = site.presentation()
    assert site.refusal(presentation.model_copy(update={"quote_family": "tdx"})) == "evidence_malformed"
    assert site.refusal(presentation.model_copy(update={"certificates": ()})) == "chain_broken"


def test_reference_values_of_one_format_say_nothing_about_the_other(site: Site) -> None:
    policy = site.policy.model_copy(update={"sev_snp": SnpRules()})
    assert site.refusal(site.presentation(), policy=policy) == "measurement_unknown"


def test_a_revocation_list_below_the_floor_is_a_rollback(site: Site) -> None:
    facts = dict(site.appraise(site.presentation()).facts)
    assert facts
    assert site.refusal(site.presentation(), floors=facts) is None
    higher = {name: number + 1 for name, number in facts.items()}
    assert site.refusal(site.presentation(), floors=higher) == "collateral_rollback"


def test_a_masked_chip_id_names_no_machine(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are counted by machine, and a member whose evidence names none gets no counted key."""
    assert site.appraise(site.presentation()).names_machine

    def masked(*arguments: Any) -> GuestClaims:
        return replace(verify_guest(*arguments), names_machine=False)

    monkeypatch.setattr("raycloak.attestation.appraisal.appraisal.verify_guest", masked)
    unlimited = site.policy.model_copy(update={"workers_per_platform": None})
    assert not site.appraise(site.presentation(), policy=unlimited).names_machine
    # Under a limit each guest of one machine would count as a machine of its own.
    assert site.policy.workers_per_platform is not None
    assert site.refusal(site.presentation()) == "peer_not_bound"


def test_host_data_that_the_policy_does_not_list_refuses_a_member(site: Site) -> None:
    presentation, rules = site.presentation(), site.policy.sev_snp
    own = parse_report(presentation.quote).host_data
    for listed, code in (((own,), None), ((b"x" * 32,), "measurement_unknown"), ((), "measurement_unknown")):
        policy = site.policy.model_copy(update={"sev_snp": rules.model_copy(update={"host_data": listed})})
        assert site.refusal(presentation, policy=policy) == code


def test_missing_reference_values_and_answers_refuse(site: Site) -> None:
    without_rims = site.collateral.model_copy(update={"gpu_rims": ()})
    without_ocsp = site.collateral.model_copy(update={"gpu_ocsp": ()})
    without_crls = site.collateral.model_copy(update={"snp_vcek_crls": ()})
    assert site.refusal(site.presentation(), collateral=without_rims) == "gpu_state"
    assert site.refusal(site.presentation(), collateral=without_ocsp) == "collateral_stale"
    assert site.refusal(site.presentation(), collateral=without_crls) == "collateral_stale"


# Members beside each other


def code(policy: Policy, *members: Appraisal) -> str | None:
    try:
        check_enrolment(members, policy)
    except EvidenceError as error:
        return error.code
    return None


def test_two_workers_on_one_platform_are_refused_unless_the_policy_allows_them(site: Site) -> None:
    one = replace(site.appraise(site.presentation()), gpus=())
    two, aggregator = replace(one, member_id="worker-1"), replace(one, member_id="a", role="aggregator")
    elsewhere = replace(two, platform_id=bytes(64))
    assert code(site.policy, one, two) == "peer_not_bound"
    assert code(site.policy, one, elsewhere, aggregator) is None
    assert code(site.policy.model_copy(update={"workers_per_platform": 2}), one, two) is None
    three = replace(one, member_id="worker-2")
    assert code(site.policy.model_copy(update={"workers_per_platform": 2}), one, two, three) == "peer_not_bound"
    assert code(site.policy.model_copy(update={"workers_per_platform": None}), one, two, three) is None


def test_who_is_dropped_or_comes_again_takes_up_no_second_place(site: Site) -> None:
    enrolment, one = Enrolment(), site.appraise(site.presentation())
    for _ in range(2):
        enrolment.check(one, site.policy)
        enrolment.put(one)
    two = replace(one, member_id="worker-1")
    with pytest.raises(EvidenceError, match="peer_not_bound"):
        enrolment.check(two, site.policy)
    enrolment.drop(one.member_id)
    enrolment.check(two, site.policy)


def test_a_gpu_is_enrolled_once(site: Site) -> None:
    one = site.appraise(site.presentation())
    thief = replace(one, member_id="worker-1", platform_id=bytes(64), gpus=one.gpus[1:])
    assert code(site.policy, one, thief) == "peer_not_bound"
    assert code(site.policy, replace(one, gpus=one.gpus[:1]), thief) is None


def test_in_the_way_are_owners_of_a_members_gpus_and_the_oldest_on_its_machine(site: Site) -> None:
    one, enrolment = site.appraise(site.presentation()), Enrolment()
    others = [
        replace(one, member_id="worker-1", platform_id=bytes(64), gpus=one.gpus[:1]),
        replace(one, member_id="worker-2", gpus=()),
        replace(one, member_id="worker-3", gpus=()),
    ]
    for each in others:
        enrolment.put(each)
    enrolment.put(others[1])
    two, unlimited = (site.policy.model_copy(update={"workers_per_platform": most}) for most in (2, None))
    assert enrolment.in_the_way(one, unlimited) == ["worker-1"]
    assert enrolment.in_the_way(one, two) == ["worker-1", "worker-3"], "worker-2 came again after worker-3"
    assert enrolment.in_the_way(others[1], two) == [], "nobody is in his own way"
    for member_id in enrolment.in_the_way(one, two):
        enrolment.drop(member_id)
    enrolment.check(one, two)


# Claim names


def test_an_appraisal_has_the_claim_names_of_rfc_9711(site: Site) -> None:
    appraisal = site.appraise(site.presentation())
    claims = json.loads(json.dumps(claims_set(appraisal)))
    assert {"eat_nonce", "ueid", "hwmodel", "dbgstat", "exp", "submods"} <= set(claims)
    assert claims["dbgstat"] == "disabled-since-boot"
    assert claims["exp"] == appraisal.expires_at
    gpus = claims["submods"]
    assert set(gpus) == {"gpu-0", "gpu-1"}
    assert gpus["gpu-0"]["ueid"] != gpus["gpu-1"]["ueid"]
    assert gpus["gpu-0"]["eat_nonce"] == gpus["gpu-1"]["eat_nonce"] != claims["eat_nonce"]
