"""Headers and tags of arrays of `workers/vectors/payload.py`: whatever does not match is refused and named."""

import tracemalloc

import numpy as np
import pytest

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import AgreementKey, IdentityKey, Secret
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.attestation.core.roster import Member, Roster
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.vectors.payload import (
    Header,
    VectorRange,
    VerifiedAttempt,
    check_payload,
    open_header,
    payload_key,
    seal_header,
    tag_payload,
)
from raycloak.workers.vectors.ring import ring_dtype

WORKERS = ("worker-0", "worker-1")
IDENTITIES = {name: IdentityKey.from_seed(Secret(digest(name.encode()))) for name in (*WORKERS, "aggregator-0")}
AGREEMENTS = {name: AgreementKey.generate() for name in (*WORKERS, "aggregator-0", "aggregator-1")}
HOSTED = {"worker-0": (0, 2), "worker-1": (1,)}
RANGES = (VectorRange(index=0, offset=0, length=1500), VectorRange(index=1, offset=1500, length=500))
VECTOR_TAGS = (b"a" * 16, b"b" * 16)


def member(name: str) -> Member:
    return Member(
        member_id=name,
        role="worker" if name in WORKERS else "aggregator",
        mask_key=AGREEMENTS[name].public,
        identity_key=IDENTITIES[name].public if name in IDENTITIES else digest(name.encode()),
        evidence_digest=bytes(32),
        virtual_workers=HOSTED.get(name, ()),
        joined=0,
    )


def roster(**changes) -> Roster:
    fields = {
        "run_id": "0123456789abcdef",
        "manifest_digest": digest(b"manifest"),
        "step": 7,
        "attempt": 1,
        "ratchet": 7,
        "nonce": b"\1" * 32,
        "members": tuple(member(name) for name in AGREEMENTS),
    }
    return Roster(**{**fields, **changes})


def attempt_of(view: Roster | None = None, parameters=b"p" * 32, ranges=RANGES, bits=32) -> VerifiedAttempt:
    return VerifiedAttempt.of(view or roster(), parameters, ranges, bits)


def arrays_of(bits=32) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, 2**bits - 1, part.length, ring_dtype(bits).type) for part in RANGES]


def worker_key(attempt: VerifiedAttempt, index: int, sender="worker-0") -> Secret:
    aggregator = attempt.roster.aggregators[index]
    return payload_key(AGREEMENTS[sender], aggregator, attempt, range_index=index, sender=sender)


def aggregator_key(attempt: VerifiedAttempt, index: int, sender="worker-0") -> Secret:
    own = AGREEMENTS[f"aggregator-{index}"]
    return payload_key(own, attempt.roster.member(sender), attempt, range_index=index, sender=sender)


def answer(attempt: VerifiedAttempt, arrays) -> Envelope:
    tags = [tag_payload(worker_key(attempt, index), array) for index, array in enumerate(arrays)]
    return seal_header(attempt, "worker-0", IDENTITIES["worker-0"], vector_tags=VECTOR_TAGS, payload_tags=tags)


def refusal_of(action, *arguments, **named) -> ProtocolError:
    with pytest.raises(ProtocolError) as refusal:
        action(*arguments, **named)
    return refusal.value


@pytest.mark.parametrize("bits", [32, 64])
def test_an_honest_answer_is_accepted(bits):
    attempt, arrays = attempt_of(bits=bits), arrays_of(bits)
    header = open_header(answer(attempt, arrays), attempt, "worker-0")
    assert (header.sender, header.virtual_workers, header.vector_tags) == ("worker-0", (0, 2), VECTOR_TAGS)
    assert (header.step, header.attempt, header.ring_bits) == (7, 1, bits)
    for index, array in enumerate(arrays):
        array.flags.writeable = False
        check_payload(aggregator_key(attempt, index), array, header, range_index=index)


# --- header


def altered(**changes) -> Envelope:
    """Return a header with changed fields, properly signed by its sender."""
    attempt = attempt_of()
    header = open_header(answer(attempt, arrays_of()), attempt, "worker-0")
    return seal(header.model_copy(update=changes), IDENTITIES["worker-0"])


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "fedcba9876543210"},
        {"manifest_digest": digest(b"another")},
        {"step": 8},
        {"attempt": 0},
        {"roster_digest": digest(b"another")},
        {"input_digest": b"q" * 32},
        {"sender": "worker-1"},
        {"virtual_workers": (0,)},
        {"virtual_workers": (2, 0)},
        {"ring_bits": 64},
        {"vector_tags": VECTOR_TAGS[:1]},
        {"vector_tags": (VECTOR_TAGS[0], b"short")},
        {"step": 9, "attempt": 2},
    ],
)
def test_every_field_is_held_against_the_roster_and_named(changes):
    refusal = refusal_of(open_header, altered(**changes), attempt_of(), "worker-0")
    assert refusal.code == "header_mismatch"
    assert refusal.message == f"the header of worker-0 differs in {', '.join(changes)}"
    assert refusal.exit_code == 3


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda p: p[:1], "range_mismatch"),
        (lambda p: (p[1], p[0]), "range_mismatch"),
        (lambda p: (p[0], p[0]), "range_mismatch"),
        (lambda p: (*p, p[1]), "range_mismatch"),
        (lambda p: (), "range_mismatch"),
        (lambda p: (p[0], p[1].model_copy(update={"length": 499})), "length_mismatch"),
        (lambda p: (p[0].model_copy(update={"offset": 1}), p[1]), "length_mismatch"),
    ],
)
def test_other_ranges_or_lengths_are_refused(edit, code):
    attempt = attempt_of()
    payloads = open_header(answer(attempt, arrays_of()), attempt, "worker-0").payloads
    assert refusal_of(open_header, altered(payloads=edit(payloads)), attempt, "worker-0").code == code


def test_a_header_of_another_roster_of_the_same_step_and_attempt_is_refused():
    envelope = answer(attempt_of(roster(nonce=b"\2" * 32)), arrays_of())
    assert "roster_digest" in refusal_of(open_header, envelope, attempt_of(), "worker-0").message


def test_a_header_that_its_sender_did_not_sign_is_refused():
    attempt = attempt_of()
    envelope = answer(attempt, arrays_of())
    assert refusal_of(open_header, envelope, attempt, "worker-1").code == "signature"
    forged = seal_header(
        attempt, "worker-0", IDENTITIES["worker-1"], vector_tags=VECTOR_TAGS, payload_tags=[bytes(16)] * 2
    )
    assert refusal_of(open_header, forged, attempt, "worker-0").code == "signature"


def test_every_changed_byte_of_a_header_is_refused():
    attempt = attempt_of()
    envelope = answer(attempt, arrays_of())
    for position in range(len(envelope.body)):
        body = bytearray(envelope.body)
        body[position] ^= 1
        refusal = refusal_of(open_header, Envelope(body=bytes(body), signature=envelope.signature), attempt, "worker-0")
        assert refusal.code == "signature"
    for position in range(64):
        signature = bytearray(envelope.signature)
        signature[position] ^= 1
        assert refusal_of(
            open_header, Envelope(body=envelope.body, signature=bytes(signature)), attempt, "worker-0"
        ).code


def test_only_workers_of_the_roster_send_headers():
    attempt = attempt_of()
    header = open_header(answer(attempt, arrays_of()), attempt, "worker-0")
    own = header.model_copy(update={"sender": "aggregator-0", "virtual_workers": (), "vector_tags": ()})
    envelope = seal(own, IDENTITIES["aggregator-0"])
    assert refusal_of(open_header, envelope, attempt, "aggregator-0").code == "roster_member"
    assert refusal_of(open_header, envelope, attempt, "stranger").code == "roster_member"


def test_framing_stays_below_one_kibibyte():
    """Eight virtual workers and three ranges, with ten-digit offsets and a six-digit step."""
    hosted = tuple(range(992, 1000))
    sender = member("worker-0").model_copy(update={"member_id": "worker-0123456789abcdef", "virtual_workers": hosted})
    view = roster(step=999_999, attempt=99, members=(sender, *roster().members[1:]))
    ranges = tuple(VectorRange(index=index, offset=10**9 * (index + 1), length=10**9) for index in range(3))
    envelope = seal_header(
        attempt_of(view, ranges=ranges),
        sender.member_id,
        IDENTITIES["worker-0"],
        vector_tags=[b"\xff" * 16] * 8,
        payload_tags=[b"\xff" * 16] * 3,
    )
    assert len(envelope.body) + len(envelope.signature) < 1024
    assert open_header(envelope, attempt_of(view, ranges=ranges), sender.member_id).virtual_workers == hosted


# --- payload tags


def opened(attempt: VerifiedAttempt, arrays) -> Header:
    return open_header(answer(attempt, arrays), attempt, "worker-0")


def test_any_changed_bit_of_an_array_is_refused():
    attempt, arrays = attempt_of(), arrays_of()
    header, key = opened(attempt, arrays), aggregator_key(attempt, 0)
    for position in (0, 1, 749, 1499):
        for bit in (0, 17, 31):
            changed = arrays[0].copy()
            changed[position] ^= np.uint32(1 << bit)
            refusal = refusal_of(check_payload, key, changed, header, range_index=0)
            assert refusal.code == "payload_tag"
            assert "worker-0" in refusal.message


def test_another_length_or_ring_is_refused():
    attempt, arrays = attempt_of(), arrays_of()
    header, key = opened(attempt, arrays), aggregator_key(attempt, 0)
    wide = np.frombuffer(arrays[0].tobytes(), np.uint64)
    for array in (arrays[0][:-1], np.append(arrays[0], np.uint32(0)), arrays[0].view(np.int32), wide, arrays[0][None]):
        assert refusal_of(check_payload, key, array, header, range_index=0).code == "length_mismatch"


def test_arrays_of_other_ranges_attempts_or_senders_are_refused():
    ranges = (VectorRange(index=0, offset=0, length=1000), VectorRange(index=1, offset=1000, length=1000))
    array = np.arange(1000, dtype=np.uint32)
    attempt = attempt_of(ranges=ranges)
    header = opened(attempt, [array, array + np.uint32(1)])
    assert refusal_of(check_payload, aggregator_key(attempt, 1), array, header, range_index=1).code == "payload_tag"
    wrong = (
        aggregator_key(attempt_of(roster(attempt=2), ranges=ranges), 0),
        aggregator_key(attempt, 0, sender="worker-1"),
        aggregator_key(attempt, 1),
    )
    for key in wrong:
        assert refusal_of(check_payload, key, array, header, range_index=0).code == "payload_tag"
    check_payload(aggregator_key(attempt, 0), array, header, range_index=0)


def test_worker_and_aggregator_derive_the_same_one_time_key_and_no_context_shares_one():
    attempts = (
        attempt_of(),
        attempt_of(roster(run_id="another")),
        attempt_of(roster(nonce=b"\2" * 32)),
        attempt_of(roster(step=8)),
        attempt_of(roster(attempt=2)),
        attempt_of(parameters=b"q" * 32),
    )
    keys = set()
    for attempt in attempts:
        for index in (0, 1):
            for sender in WORKERS:
                key = worker_key(attempt, index, sender).reveal()
                assert key == aggregator_key(attempt, index, sender).reveal()
                keys.add(key)
    assert len(keys) == len(attempts) * 4


def test_each_part_of_the_context_is_in_the_one_time_key():
    """One pair of keys throughout, and a roster digest that is held equal, so only the named part differs."""
    base = attempt_of()
    seen = {worker_key(base, 0).reveal()}
    for changes in ({"run_id": "another"}, {"step": 8}, {"attempt": 2}):
        same_digest = VerifiedAttempt(roster(**changes), base.roster_digest, base.input_digest, RANGES, 32)
        seen.add(worker_key(same_digest, 0).reveal())
    aggregator = base.roster.aggregators[0]
    own = AGREEMENTS["worker-0"]
    seen.add(payload_key(own, aggregator, base, range_index=1, sender="worker-0").reveal())
    seen.add(payload_key(own, aggregator, base, range_index=0, sender="worker-1").reveal())
    assert len(seen) == 6


def test_a_low_order_key_is_refused():
    peer = member("aggregator-0").model_copy(update={"mask_key": bytes(32)})
    refusal = refusal_of(payload_key, AGREEMENTS["worker-0"], peer, attempt_of(), range_index=0, sender="worker-0")
    assert refusal.code == "pair_key"


def test_tagging_and_checking_copy_nothing():
    part = VectorRange(index=0, offset=0, length=1_000_000)
    attempt = attempt_of(ranges=(part,))
    array = np.ones(part.length, np.uint32)
    key = worker_key(attempt, 0)
    tracemalloc.start()
    tag = tag_payload(key, array)
    envelope = seal_header(attempt, "worker-0", IDENTITIES["worker-0"], vector_tags=VECTOR_TAGS, payload_tags=[tag])
    check_payload(key, array, open_header(envelope, attempt, "worker-0"), range_index=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18


def test_ranges_of_more_words_than_31_bits_count_are_signed_as_they_are():
    parts = (VectorRange(index=0, offset=0, length=2**31 + 5), VectorRange(index=1, offset=2**31 + 5, length=2**33))
    attempt = attempt_of(ranges=parts)
    tags = [b"t" * 16, b"u" * 16]
    envelope = seal_header(attempt, "worker-0", IDENTITIES["worker-0"], vector_tags=VECTOR_TAGS, payload_tags=tags)
    header = open_header(envelope, attempt, "worker-0")
    assert [(each.offset, each.length) for each in header.payloads] == [(0, 2**31 + 5), (2**31 + 5, 2**33)]
    other = attempt_of(ranges=(parts[0].model_copy(update={"length": 5}), parts[1]))
    assert refusal_of(open_header, envelope, other, "worker-0").code == "length_mismatch"
