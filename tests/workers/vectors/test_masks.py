"""The guarantees of `workers/vectors/masks.py`, each proved in `docs/proofs/003-mask-cancellation.md`."""

import itertools
import pickle
import random
import tracemalloc

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy.stats import chi2

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import AgreementKey, Secret
from raycloak.attestation.core.roster import Member, Roster
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.vectors.masks import PairSecret, keystream_key, masked_sum, roster_masks
from raycloak.workers.vectors.payload import VectorRange

MANIFEST = digest(b"manifest")
PARAMETERS = digest(b"parameters")
RING_DTYPES = (np.uint32, np.uint64)


def cut(count, length=8):
    return tuple(VectorRange(index=index, offset=index * length, length=length) for index in range(count))


def agreement_key(member_id: str) -> AgreementKey:
    return AgreementKey(X25519PrivateKey.from_private_bytes(digest(member_id.encode())))


def member(member_id: str, hosted: tuple[int, ...] = (), joined: int = 0) -> Member:
    return Member(
        member_id=member_id,
        role="worker",
        mask_key=agreement_key(member_id).public,
        identity_key=digest(b"identity" + member_id.encode()),
        evidence_digest=digest(b"evidence"),
        virtual_workers=hosted,
        joined=joined,
    )


def roster(members, *, step=3, attempt=0, ratchet=0, nonce=b"\1" * 32) -> Roster:
    return Roster(
        run_id="0123456789abcdef",
        manifest_digest=MANIFEST,
        step=step,
        attempt=attempt,
        ratchet=ratchet,
        nonce=nonce,
        members=tuple(members),
    )


def team(count: int) -> list[Member]:
    return [member(f"worker-{index}", (index,)) for index in range(count)]


def pairs_of(own: Member, members) -> dict[str, PairSecret]:
    return {peer.member_id: pair(own, peer) for peer in members if peer.member_id != own.member_id}


def pair(own: Member, peer: Member, run_id="0123456789abcdef", manifest=MANIFEST) -> PairSecret:
    return PairSecret(agreement_key(own.member_id), own, peer, run_id=run_id, manifest_digest=manifest)


def masks_of(own: Member, view: Roster, parameters=PARAMETERS):
    """Return the masks of one worker over a single range, from fresh pair secrets."""
    pairs = pairs_of(own, view.workers)
    return roster_masks(pairs, view, own.member_id, input_digest=parameters, ranges=cut(1))[0]


def masked(vector: np.ndarray, masks) -> np.ndarray:
    out = np.empty_like(vector)
    masked_sum([vector], masks, out)
    return out


def ring_sum(vectors, dtype) -> np.ndarray:
    total = np.zeros_like(vectors[0], dtype)
    for vector in vectors:
        np.add(total, vector, out=total)
    return total


def looks_uniform(words: np.ndarray) -> bool:
    """Test by chi-square over byte values, 255 degrees of freedom; a uniform vector fails with probability 1e-6."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = words.nbytes / 256
    return float(((counts - expected) ** 2).sum() / expected) < chi2.isf(1e-6, 255)


def vectors_of(kind: str, count: int, dtype, size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    top = np.iinfo(dtype).max
    extremes = [0, top, top // 2, top // 2 + 1, 1]
    match kind:
        case "random":
            return [generator.integers(0, top, size, dtype, endpoint=True) for _ in range(count)]
        case "zero":
            return [np.zeros(size, dtype) for _ in range(count)]
        case _:
            return [np.full(size, extremes[index % 5], dtype) for index in range(count)]


# --- cancellation


@pytest.mark.parametrize("count", range(2, 10))
@pytest.mark.parametrize("kind", ["random", "zero", "extreme"])
@pytest.mark.parametrize("dtype", RING_DTYPES)
def test_masks_cancel_bit_for_bit_in_any_order_and_grouping(count, kind, dtype):
    members = team(count)
    view = roster(members)
    clear = vectors_of(kind, count, dtype, 33_000)
    sent = [masked(vector, masks_of(own, view)) for own, vector in zip(members, clear, strict=True)]
    expected = ring_sum(clear, dtype)
    order = random.Random(count)
    for _ in range(3):
        pool = list(sent)
        while len(pool) > 1:
            order.shuffle(pool)
            some = order.randint(2, len(pool))
            pool = [ring_sum(pool[:some], dtype), *pool[some:]]
        assert np.array_equal(pool[0], expected)


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("dtype", RING_DTYPES)
def test_one_missing_worker_leaves_a_uniform_looking_sum(count, dtype):
    """The clear vectors are all zero, so only masks can make the sum look random.

    Keys are fixed, so the outcome is too; for keys drawn anew one of the checks would alarm with 1e-6 each.
    """
    members = team(count)
    view = roster(members)
    sent = [masked(np.zeros(100_000, dtype), masks_of(own, view)) for own in members]
    for absent in range(count):
        rest = ring_sum(sent[:absent] + sent[absent + 1 :], dtype)
        assert looks_uniform(rest)
    assert not ring_sum(sent, dtype).any()


def test_a_single_masked_vector_says_nothing_about_the_clear_one():
    """Correlation of 200,000 words stays below 6 standard errors, a false alarm below 2e-9; bytes look uniform."""
    members = team(3)
    clear = np.random.default_rng(7).integers(0, 1000, 200_000, np.uint32)
    sent = masked(clear, masks_of(members[0], roster(members)))
    assert looks_uniform(sent)
    correlation = np.corrcoef(clear.astype(np.float64), sent.view(np.int32).astype(np.float64))[0, 1]
    assert abs(correlation) < 6 / np.sqrt(len(clear))


def test_masks_of_extreme_vectors_look_alike():
    """All-zero and all-maximum vectors are told apart by nobody without the keys (alarm 1e-6 per check)."""
    members = team(2)
    masks = masks_of(members[0], roster(members))
    for fill in (0, 2**31 - 1, 2**32 - 1):
        assert looks_uniform(masked(np.full(100_000, fill, np.uint32), masks))


def test_the_lower_id_adds_and_the_higher_subtracts_the_rfc_8439_stream_from_block_zero():
    """Words are little-endian, over more than one block of the loop."""
    members = team(2)
    size = 40_001
    (key, sign), (same_key, opposite) = (masks_of(own, roster(members))[0] for own in members)
    assert key.reveal() == same_key.reveal()
    assert (sign, opposite) == (1, -1)
    stream = Cipher(ChaCha20(key.reveal(), bytes(16)), None).encryptor().update(bytes(4 * size))
    words = np.frombuffer(stream, "<u4")
    assert np.array_equal(masked(np.zeros(size, np.uint32), [(key, 1)]), words)
    assert np.array_equal(masked(np.zeros(size, np.uint32), [(key, -1)]), np.uint32(0) - words)


# --- how they are added


@pytest.mark.parametrize("dtype", RING_DTYPES)
def test_masked_sum_adds_all_vectors_and_leaves_them_unchanged(dtype):
    members = team(4)
    vectors = vectors_of("random", 3, dtype, 50_000)
    before = [vector.copy() for vector in vectors]
    for vector in vectors:
        vector.flags.writeable = False
    masks = masks_of(members[1], roster(members))
    out = np.empty_like(before[0])
    masked_sum(vectors, masks, out)
    in_place = ring_sum(vectors, dtype)
    masked_sum([in_place], masks, in_place)
    assert np.array_equal(out, in_place)
    assert all(np.array_equal(a, b) for a, b in zip(vectors, before, strict=True))
    shuffled = np.empty_like(out)
    masked_sum(vectors[::-1], masks[::-1], shuffled)
    assert np.array_equal(out, shuffled)


def test_no_mask_is_materialised():
    members = team(9)
    masks = masks_of(members[0], roster(members))
    vector, out = np.ones(1_000_000, np.uint32), np.empty(1_000_000, np.uint32)
    tracemalloc.start()
    masked_sum([vector], masks, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 19


# --- keys


def test_every_part_of_the_context_changes_the_mask_key():
    secret = Secret(digest(b"pair"))
    base = {
        "roster_digest": digest(b"roster"),
        "step": 5,
        "attempt": 1,
        "input_digest": PARAMETERS,
        "cut": b"c" * 32,
        "range_index": 0,
    }
    changes = {
        "roster_digest": digest(b"another roster"),
        "step": 6,
        "attempt": 2,
        "input_digest": digest(b"another model"),
        "cut": b"d" * 32,
        "range_index": 1,
    }
    key = keystream_key(secret, **base).reveal()
    assert keystream_key(secret, **base).reveal() == key
    assert keystream_key(Secret(digest(b"another pair")), **base).reveal() != key
    for name, value in changes.items():
        assert keystream_key(secret, **{**base, name: value}).reveal() != key, name


def test_no_mask_key_repeats_over_pairs_steps_attempts_models_and_ranges():
    members = team(4)
    seen = set()
    expected = 0
    for own in members:
        pairs = pairs_of(own, members)
        for step, attempt, model in itertools.product(range(4), range(3), (PARAMETERS, digest(b"other"))):
            view = roster(members, step=step, attempt=attempt, ratchet=step)
            masks = roster_masks(pairs, view, own.member_id, input_digest=model, ranges=cut(3))
            keys = [key.reveal() for part in masks for key, _ in part]
            assert len(keys) == 9
            seen.update(keys)
            expected += len(keys)
    assert len(seen) == expected // 2


@pytest.mark.parametrize("changed", ["attempt", "step", "nonce", "hosting", "parameters"])
def test_another_attempt_step_roster_or_model_gives_another_mask(changed):
    """Both masked vectors of zero differ, and so does their difference from zero: no mask repeats (alarm 1e-6)."""
    members = team(3)
    first = masks_of(members[0], roster(members))
    other_members = [member("worker-0", (0, 1)), member("worker-1", (2,)), member("worker-2", ())]
    views = {
        "attempt": (roster(members, attempt=1), PARAMETERS),
        "step": (roster(members, step=4), PARAMETERS),
        "nonce": (roster(members, nonce=b"\2" * 32), PARAMETERS),
        "hosting": (roster(other_members), PARAMETERS),
        "parameters": (roster(members), digest(b"another model")),
    }
    zero = np.zeros(100_000, np.uint32)
    difference = masked(zero, first) - masked(zero, masks_of(members[0], *views[changed]))
    assert looks_uniform(difference)


def test_counterexample_an_attempt_counter_that_restarts_shows_no_moved_vector():
    """Step and attempt repeat after a restart, with another hosting map; only the rosters differ.

    With one mask for both attempts their difference would be the moved virtual worker's vector in clear.
    """
    stays, moves = vectors_of("random", 2, np.uint32, 100_000)
    moves &= np.uint32(0xFFFF)
    before = [member("worker-0", (0, 1)), member("worker-1", (2,))]
    after = [member("worker-0", (0,)), member("worker-1", (1, 2))]
    views = [
        roster(before, attempt=0, nonce=b"\1" * 32),
        roster(after, attempt=0, nonce=b"\2" * 32),
    ]
    out = [np.empty_like(stays) for _ in views]
    masked_sum([stays, moves], masks_of(before[0], views[0]), out[0])
    masked_sum([stays], masks_of(after[0], views[1]), out[1])
    assert looks_uniform(out[0] - out[1])


def test_attempts_send_other_bytes_for_the_same_decoded_sum():
    members = team(3)
    clear = vectors_of("random", 3, np.uint32, 1000)
    wires = []
    for attempt in (0, 1):
        view = roster(members, attempt=attempt)
        wires.append([masked(vector, masks_of(own, view)) for own, vector in zip(members, clear, strict=True)])
    assert not any(np.array_equal(a, b) for a, b in zip(*wires, strict=True))
    assert np.array_equal(ring_sum(wires[0], np.uint32), ring_sum(wires[1], np.uint32))


@pytest.mark.parametrize("split", ["roster", "model"])
def test_a_split_view_does_not_cancel(split):
    """One worker is shown another roster or model: what the aggregator sums stays masked (alarm 1e-6)."""
    members = team(3)
    view = roster(members)
    lie = (roster(members, nonce=b"\2" * 32), PARAMETERS) if split == "roster" else (view, digest(b"isolating model"))
    zero = np.zeros(100_000, np.uint32)
    sent = [masked(zero, masks_of(own, view)) for own in members[:2]]
    sent.append(masked(zero, masks_of(members[2], *lie)))
    assert looks_uniform(ring_sum(sent, np.uint32))


# --- pair secrets


def key_at(secret: PairSecret) -> bytes:
    return keystream_key(
        secret.secret, roster_digest=MANIFEST, step=0, attempt=0, input_digest=PARAMETERS, cut=bytes(32), range_index=0
    ).reveal()


def test_both_ends_share_a_secret_at_every_index_and_never_the_same_twice():
    a, b = member("worker-a"), member("worker-b")
    ends = pair(a, b), pair(b, a)
    seen = set()
    for _ in range(5):
        assert key_at(ends[0]) == key_at(ends[1])
        seen.add(key_at(ends[0]))
        ends[0].advance()
        ends[1].advance()
    assert len(seen) == 5
    assert (ends[0].sign, ends[1].sign, ends[0].index) == (1, -1, 5)


def test_pairs_runs_and_manifests_have_secrets_of_their_own():
    a, b, c = (member(f"worker-{letter}") for letter in "abc")
    secrets = [
        pair(a, b),
        pair(a, c),
        pair(b, c),
        pair(a, b, run_id="another run id"),
        pair(a, b, manifest=digest(b"another manifest")),
    ]
    assert len({key_at(secret) for secret in secrets}) == 5


def test_the_ratchet_never_goes_back():
    secret = pair(member("worker-a"), member("worker-b"))
    secret.advance_to(3)
    secret.advance_to(3)
    with pytest.raises(ProtocolError) as refusal:
        secret.advance_to(2)
    assert refusal.value.code == "ratchet_behind"
    assert secret.index == 3


def test_a_late_joiner_starts_at_its_admission_and_a_missed_commit_is_caught_up():
    veteran, joiner = member("worker-a", (0,)), member("worker-b", (1,), joined=4)
    assert pair(veteran, joiner).index == pair(joiner, veteran).index == 4
    members = [veteran, joiner]
    behind = pairs_of(veteran, members)
    ahead = pairs_of(joiner, members)
    ahead["worker-a"].advance_to(6)
    view = roster(members, ratchet=6)
    keys = [
        roster_masks(pairs, view, own.member_id, input_digest=PARAMETERS, ranges=cut(1))[0][0][0].reveal()
        for pairs, own in ((behind, veteran), (ahead, joiner))
    ]
    assert keys[0] == keys[1]


def test_a_pair_secret_leaves_no_process():
    secret = pair(member("worker-a"), member("worker-b"))
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert not hasattr(secret, "__dict__")


@pytest.mark.parametrize("attack", ["reflection", "same id", "low order", "foreign key"])
def test_a_key_that_is_not_the_peers_own_is_refused(attack):
    own = member("worker-a")
    peers = {
        "reflection": member("worker-b").model_copy(update={"mask_key": own.mask_key}),
        "same id": member("worker-b").model_copy(update={"member_id": "worker-a"}),
        "low order": member("worker-b").model_copy(update={"mask_key": bytes(32)}),
        "foreign key": member("worker-b"),
    }
    key = agreement_key("worker-c" if attack == "foreign key" else "worker-a")
    with pytest.raises(ProtocolError) as refusal:
        PairSecret(key, own, peers[attack], run_id="r", manifest_digest=MANIFEST)
    assert refusal.value.code == "pair_key"


def test_masks_are_made_for_workers_of_the_roster_with_a_pair_secret_only():
    members = team(3)
    aggregator = member("aggregator-0").model_copy(update={"role": "aggregator"})
    view = roster([*members, aggregator])
    pairs = pairs_of(members[0], members)
    assert len(roster_masks(pairs, view, "worker-0", input_digest=PARAMETERS, ranges=cut(2))) == 2
    assert len(roster_masks(pairs, view, "worker-0", input_digest=PARAMETERS, ranges=cut(1))[0]) == 2
    for own_id in ("aggregator-0", "stranger"):
        with pytest.raises(ProtocolError) as refusal:
            roster_masks(pairs, view, own_id, input_digest=PARAMETERS, ranges=cut(1))
        assert refusal.value.code == "roster_member"
    del pairs["worker-2"]
    with pytest.raises(ProtocolError) as refusal:
        roster_masks(pairs, view, "worker-0", input_digest=PARAMETERS, ranges=cut(1))
    assert refusal.value.code == "pair_missing"


def test_there_is_at_least_one_mask():
    alone = member("worker-0", (0, 1, 2))
    with pytest.raises(ProtocolError) as refusal:
        roster_masks({}, roster([alone]), "worker-0", input_digest=PARAMETERS, ranges=cut(1))
    assert refusal.value.code == "roster_too_small"
