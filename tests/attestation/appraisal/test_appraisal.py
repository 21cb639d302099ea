from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.appraisal.appraisal import MAX_PRESENTATION_BYTES, Appraisal, open_presentation
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import EvidenceClass, GpuEvidence, Presentation
from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.keys import AgreementKey, IdentityKey
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_LIFETIME_S, SimulatedVendor
from raycloak.attestation.tdx.rules import RTMRS, TdxRules
from raycloak.metrics.errors import EvidenceError
from tests.anchors import INTEL_TDX_ANCHOR
from tests.attestation.conftest import MEASUREMENT, NOW, Session, with_tdx
from tests.simulators.tdx import QuoteVariant


def refusal(session: Session, envelope: Envelope, **changes: Any) -> str | None:
    try:
        session.appraise(envelope, **changes)
    except EvidenceError as error:
        return error.code
    return None


def test_honest_evidence_is_accepted_and_reported_in_full(session: Session) -> None:
    member = session.member()
    envelope = member.envelope()
    appraisal = session.appraise(envelope)
    assert appraisal.evidence_class is EvidenceClass.SIMULATED
    assert (appraisal.member_id, appraisal.role) == ("worker-0", "worker")
    assert appraisal.mask_key == member.mask.public
    assert appraisal.identity_key == member.identity.public
    assert appraisal.known_answer == b"k" * 32
    assert appraisal.evidence_digest == digest(envelope.body)
    assert appraisal.policy_digest == session.policy.digest()
    assert appraisal.platform_id == session.platform.instance_id
    assert [step for step, _ in appraisal.steps][:3] == ["possession", "format", "root"]


REGISTERS = {name: bytes([position]) * 48 for position, name in enumerate(TdxRules().registers)}
FILLED = QuoteVariant(rtmrs=b"".join(REGISTERS[name] for name in RTMRS), mr_config_id=REGISTERS["mr_config_id"])


@pytest.mark.parametrize("name", REGISTERS)
def test_a_register_that_the_policy_lists_is_compared(session: Session, name: str) -> None:
    """Firmware of the right measurement may start any kernel: what it started is in the registers alone."""
    envelope = session.member().envelope(FILLED)
    other = bytes([99]) * 48
    for accepted, code in (
        (None, None),
        ((REGISTERS[name],), None),
        ((other, REGISTERS[name]), None),
        ((other,), "measurement_unknown"),
        ((), "measurement_unknown"),
    ):
        policy = with_tdx(session.policy, **{name: accepted})
        assert refusal(session, envelope, policy=policy) == code
    empty = session.member().envelope()
    policy = with_tdx(session.policy, **{name: (bytes(48),)})
    assert refusal(session, empty, policy=policy) is None
    if any(REGISTERS[name]):
        assert refusal(session, envelope, policy=policy) == "measurement_unknown"


def test_the_result_says_which_registers_were_compared(session: Session) -> None:
    envelope = session.member().envelope(FILLED)
    assert dict(session.appraise(envelope).steps)["registers"] == "not compared"
    policy = with_tdx(session.policy, rtmr1=(REGISTERS["rtmr1"],), rtmr2=(REGISTERS["rtmr2"],))
    assert dict(session.appraise(envelope, policy=policy).steps)["registers"] == "rtmr1, rtmr2"


def test_an_aggregator_is_appraised_in_its_own_role(session: Session) -> None:
    envelope = session.member(member_id="aggregator-0", role="aggregator").envelope()
    appraisal = session.appraise(envelope, member_id="aggregator-0", role="aggregator")
    assert (appraisal.role, appraisal.known_answer) == ("aggregator", b"")


def test_appraisal_is_a_pure_function(session: Session) -> None:
    envelope = session.member().envelope()
    assert session.appraise(envelope) == session.appraise(envelope)


def test_expiry_is_the_earliest_of_collateral_and_lifetime(session: Session) -> None:
    envelope = session.member().envelope()
    long = session.policy.model_copy(update={"evidence_lifetime_s": 60 * 24 * 3600})
    assert session.appraise(envelope).expires_at == NOW + session.policy.evidence_lifetime_s
    assert session.appraise(envelope, policy=long).expires_at == NOW + COLLATERAL_LIFETIME_S


# Keys and possession


@pytest.mark.parametrize(
    "swap",
    [
        lambda: {"hpke_key": HpkeKey.generate().public},
        lambda: {"mask_key": AgreementKey.generate().public},
        lambda: {"known_answer": b"K" * 32},
        lambda: {"nonce": b"N" * 32},
        lambda: {"gpu_evidence": (b"gpu",)},
    ],
)
def test_a_swapped_key_or_field_is_not_bound(session: Session, swap: Any) -> None:
    member = session.member()
    swapped = member.presentation().model_copy(update=swap())
    assert refusal(session, seal(swapped, member.identity)) == "key_not_bound"


def test_a_swapped_identity_key_is_not_bound(session: Session) -> None:
    thief = IdentityKey.generate()
    stolen = session.member().presentation().model_copy(update={"identity_key": thief.public})
    assert refusal(session, seal(stolen, thief)) == "key_not_bound"


def test_relayed_evidence_without_the_key_is_refused(session: Session) -> None:
    envelope = seal(session.member().presentation(), IdentityKey.generate())
    assert refusal(session, envelope) == "peer_not_bound"
    assert refusal(session, Envelope(body=envelope.body, signature=b"")) == "peer_not_bound"


def test_a_signature_over_another_message_type_proves_nothing(session: Session) -> None:
    member = session.member()
    presentation = member.presentation()
    assert refusal(
        session, Envelope(body=presentation.encode(), signature=member.identity.sign(presentation.encode()))
    ) == ("peer_not_bound")


P = 2**255 - 19
LOW_X25519 = [
    *(u.to_bytes(32, "little") for u in (0, 1, P - 1, P, P + 1, 2**255, 2**255 + P - 1)),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
]


@pytest.mark.parametrize("low", LOW_X25519)
def test_low_order_agreement_keys_are_refused_even_when_bound(session: Session, low: bytes) -> None:
    member = session.member()
    hpke = member.hpke.public[:1184] + low
    with pytest.raises(ValueError, match="shared key"):  # the library agrees
        member.mask.agree(low)
    assert refusal(session, member.envelope(mask_key=low)) == "key_not_bound"
    assert refusal(session, member.envelope(hpke_key=hpke)) == "key_not_bound"


def test_unusable_mlkem_keys_are_refused_even_when_bound(session: Session) -> None:
    member = session.member()
    for mlkem in (bytes(1184), b"\xff" * 1184):
        assert refusal(session, member.envelope(hpke_key=mlkem + member.mask.public)) == "key_not_bound"


IDENTITY_POINT = b"\1" + bytes(31)
ORDER_8 = bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05")


@pytest.mark.parametrize("low", [bytes(32), IDENTITY_POINT, ORDER_8, ORDER_8[:-1] + b"\x85", P.to_bytes(32, "little")])
def test_a_low_order_identity_key_proves_no_possession(session: Session, low: bytes) -> None:
    presentation = session.member().presentation(identity_key=low)
    forged = Envelope(body=presentation.encode(), signature=IDENTITY_POINT + bytes(32))
    assert refusal(session, forged) == "key_not_bound"


# Session


@pytest.mark.parametrize(
    "other",
    [
        {"run_id": "run-2"},
        {"member_id": "worker-1"},
        {"manifest_digest": b"M" * 32},
        {"role": "aggregator", "known_answer": b""},
    ],
)
def test_evidence_of_another_session_is_foreign(session: Session, other: dict[str, Any]) -> None:
    assert refusal(session, session.member().envelope(**other)) == "nonce_foreign"


@pytest.mark.parametrize("relabelled", [{"run_id": "run-2"}, {"member_id": "worker-1"}, {"manifest_digest": b"M" * 32}])
def test_evidence_relabelled_for_this_session_is_not_bound(session: Session, relabelled: dict[str, Any]) -> None:
    """The quote was made for another session; the fields around it were changed afterwards."""
    member = session.member()
    ours = member.fields()
    foreign = member.presentation(**relabelled).model_copy(update={name: ours[name] for name in relabelled})
    assert refusal(session, seal(foreign, member.identity)) == "key_not_bound"


def test_evidence_of_one_role_is_not_bound_for_another(session: Session) -> None:
    member = session.member(role="aggregator")
    relabelled = member.presentation().model_copy(update={"role": "worker", "known_answer": b"k" * 32})
    assert refusal(session, seal(relabelled, member.identity)) == "key_not_bound"


# Policy


@pytest.mark.parametrize("accepted", [(), (bytes(48),), (bytes(48), b"x" * 48)])
def test_unknown_empty_or_zero_measurement_sets_admit_nothing(session: Session, accepted: tuple[bytes, ...]) -> None:
    policy = with_tdx(session.policy, measurements=accepted)
    assert refusal(session, session.member().envelope(), policy=policy) == "measurement_unknown"


def test_a_zero_measurement_is_refused_even_when_listed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.attestation.conftest.MEASUREMENT", bytes(48))
    policy = with_tdx(session.policy, measurements=(bytes(48), MEASUREMENT))
    assert refusal(session, session.member().envelope(), policy=policy) == "measurement_unknown"


def test_a_simulator_never_satisfies_a_hardware_policy(session: Session) -> None:
    envelope = session.member().envelope()
    hardware_only = {"accepted_classes": (EvidenceClass.INTEL_TDX,)}
    known = session.policy.model_copy(update=hardware_only | {"anchors": (*session.policy.anchors, INTEL_TDX_ANCHOR)})
    unknown = session.policy.model_copy(update=hardware_only | {"anchors": (INTEL_TDX_ANCHOR,)})
    assert refusal(session, envelope, policy=known) == "simulator_not_allowed"
    assert refusal(session, envelope, policy=unknown) == "root_unknown"


def test_evidence_of_another_simulator_is_refused(session: Session) -> None:
    policy = simulated_policy(SimulatedVendor.create(), MEASUREMENT)
    assert refusal(session, session.member().envelope(), policy=policy) == "root_unknown"


def test_code_that_the_policy_does_not_list_is_refused(session: Session) -> None:
    listed, other = b"l" * 32, b"o" * 32
    policy = session.policy.model_copy(update={"code": (listed,)})
    member = session.member()
    assert refusal(session, member.envelope(code=other), policy=policy) == "code_unlisted"
    assert refusal(session, member.envelope(code=other)) is None
    for code, shown in ((listed, listed.hex()), (b"", "none")):
        assert ("code", shown) in session.appraise(member.envelope(code=code), policy=policy).steps
    # Nor can its sender say another thing of code than its quote does.
    relabelled = member.presentation(code=other).model_copy(update={"code": listed})
    assert refusal(session, seal(relabelled, member.identity), policy=policy) == "key_not_bound"


def test_platforms_that_are_not_listed_are_refused(session: Session) -> None:
    envelope = session.member().envelope()
    for platforms, code in (
        ((), "peer_not_bound"),
        ((b"p" * 16,), "peer_not_bound"),
        ((session.platform.instance_id,), None),
    ):
        policy = session.policy.model_copy(update={"platforms": platforms})
        assert refusal(session, envelope, policy=policy) == code


def test_gpu_evidence_that_no_policy_asks_for_is_refused(session: Session) -> None:
    gpu = GpuEvidence(report=b"r", chain=()).encode()
    assert refusal(session, session.member().envelope(gpu_evidence=(gpu,))) == "gpu_not_bound"
    assert refusal(session, session.member().envelope(gpu_evidence=(b"gpu",))) == "evidence_malformed"


def test_verifier_refusals_come_through_with_one_code(session: Session) -> None:
    debug = QuoteVariant(td_attributes=bytes.fromhex("0100001000000000"))
    assert refusal(session, session.member().envelope(debug)) == "debug"
    assert refusal(session, session.member().envelope(), now=NOW + 10**8) == "collateral_stale"
    facts = dict(session.appraise(session.member().envelope()).facts)
    floors = {name: number + 1 for name, number in facts.items()}
    assert refusal(session, session.member().envelope(), floors=floors) == "collateral_rollback"


# Form


def test_oversized_or_malformed_bodies_are_refused(session: Session) -> None:
    envelope = session.member().envelope()
    for body in (b"", b"{}", envelope.body + b" ", b" " * (MAX_PRESENTATION_BYTES + 1), envelope.body[:-1]):
        assert refusal(session, Envelope(body=body, signature=envelope.signature)) == "evidence_malformed"


@given(st.binary(max_size=80), st.binary(max_size=64))
def test_any_bytes_get_a_refusal_and_no_other_error(body: bytes, signature: bytes) -> None:
    with pytest.raises(EvidenceError) as refused:
        open_presentation(Envelope(body=body, signature=signature))
    assert refused.value.code == "evidence_malformed"


UNCHANGED = ("role", "gpu_evidence", "switch_evidence", "quote_family", "certificates")


@given(st.data())
def test_whatever_changes_in_the_evidence_it_is_refused_or_the_same(session: Session, data: st.DataObject) -> None:
    member = session.member()
    honest = member.presentation(code=b"c" * 32)
    name = data.draw(st.sampled_from([name for name in Presentation.model_fields if name not in UNCHANGED]))
    value = getattr(honest, name)
    raw = bytearray(value.encode() if isinstance(value, str) else value)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 6))
    changed = honest.model_copy(update={name: raw.decode("ascii") if isinstance(value, str) else bytes(raw)})
    try:
        appraisal = session.appraise(seal(changed, member.identity))
    except EvidenceError:
        return
    assert name == "quote"
    assert content(appraisal) == content(session.appraise(seal(honest, member.identity)))


def content(appraisal: Appraisal) -> tuple[Any, ...]:
    return (
        appraisal.hpke_key,
        appraisal.mask_key,
        appraisal.identity_key,
        appraisal.measurement,
        appraisal.platform_id,
    )
