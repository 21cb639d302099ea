"""The aggregator: what it refuses to sum, and that it learns nothing but the sum."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chi2

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.lineage import ModelPoint, SignedStep, open_release
from raycloak.attestation.core.messages import Envelope, open_envelope, seal
from raycloak.attestation.core.roster import Roster
from raycloak.coordinator.aggregation import aggregator as module
from raycloak.coordinator.aggregation.aggregator import MaskedAggregator, ReduceRequest, decoded_average, ring_sum
from raycloak.metrics.errors import ProtocolError, RunFailedError
from raycloak.workers.terms.binding import Binding
from raycloak.workers.terms.model_digest import with_state
from raycloak.workers.vectors.payload import Header, VectorRange
from raycloak.workers.vectors.ring import CACHE_BLOCK_BYTES, decode, ring_dtype
from raycloak.workers.vectors.threads import WordThreads
from tests.protocol import VIRTUAL_WORKERS, HandRun, correlation, orchestrator_key

Answers = tuple[ReduceRequest, list[tuple[np.ndarray, ...]]]


@pytest.fixture(scope="module")
def hand(tmp_path_factory) -> HandRun:
    """Return three workers and three ranges; the aggregators are pure functions, so all tests may share them."""
    return HandRun(tmp_path_factory.mktemp("aggregator"), aggregators=3)


@pytest.fixture(scope="module")
def earlier(hand) -> Answers:
    """Return the answers of an attempt that was given up."""
    return hand.compute(hand.roster())


@pytest.fixture(scope="module")
def answers(hand, earlier) -> Answers:
    return hand.compute(hand.roster())


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> tuple[HandRun, Answers]:
    """Return a model of 5,003 parameters and the answers of three workers."""
    hand = HandRun(tmp_path_factory.mktemp("wide"), model="tests.models:wide_model")
    return hand, hand.compute(hand.roster())


def sum_of(vectors) -> np.ndarray:
    total = np.empty_like(vectors[0])
    ring_sum(vectors, total)
    return total


def refused(hand: HandRun, request: ReduceRequest, vectors, index: int = 0) -> ProtocolError:
    with pytest.raises(ProtocolError) as error:
        hand.reduce(request, vectors, index)
    return error.value


def resigned(hand: HandRun, request: ReduceRequest, position: int, edit: Callable[[Header], dict]) -> ReduceRequest:
    """Return the request with one header changed and signed again by its own sender."""
    header = Header.model_validate_json(request.headers[position].body)
    signer = hand.workers[header.sender]._attester.identity
    changed = seal(header.model_copy(update=edit(header)), signer)
    return with_header(request, position, changed)


def with_header(request: ReduceRequest, position: int, header: Envelope) -> ReduceRequest:
    headers = list(request.headers)
    headers[position] = header
    return request.model_copy(update={"headers": tuple(headers)})


def with_vector(vectors, position: int, vector: np.ndarray, index: int = 0):
    changed = [list(parts) for parts in vectors]
    changed[index][position] = vector
    return changed


def looks_uniform(words: np.ndarray) -> bool:
    """Test by chi-square over bytes, 255 degrees of freedom; uniform words fail with probability 1e-7."""
    counts = np.bincount(np.ascontiguousarray(words).view(np.uint8), minlength=256)
    expected = words.nbytes / 256
    return float(((counts - expected) ** 2).sum() / expected) < chi2.isf(1e-7, 255)


# --- where it may run


def test_an_aggregator_whose_update_could_round_otherwise_is_refused_by_name(hand):
    """A GPU of the workers is not needed here; their CPU kernels and versions are. Its own work is on one thread."""
    numerics = hand.manifest.computation.numerics

    def code(**changes) -> str:
        computation = hand.manifest.computation.model_copy(update={"numerics": numerics.model_copy(update=changes)})
        manifest = hand.manifest.model_copy(update={"computation": computation})
        challenge = hand.orchestrator.challenge("aggregator-9", "aggregator")
        with pytest.raises(ProtocolError) as error:
            MaskedAggregator("aggregator-9", hand.source).present(challenge, manifest, hand.ranges[0])
        assert "aggregator-9" in error.value.message
        return error.value.code

    assert code(device="cuda:another", engine="another", deterministic=False, threads=2) == "challenge_mismatch", (
        "the numerics are accepted"
    )
    for changes in ({"cpu_capability": "ANOTHER"}, {"torch": "1.0"}, {"numpy": "1.0"}):
        assert code(**changes) == "manifest_mismatch"


# --- what it does


def test_it_decodes_divides_by_the_public_batch_size_and_updates(hand, answers):
    request, vectors = answers
    clear = [hand.clear_vector(v) for v in range(VIRTUAL_WORKERS)]
    total = decode(sum(clear[1:], clear[0]), hand.mechanism.gamma_log2)
    for owned in hand.ranges:
        report, updated, state = hand.reduce(request, vectors, owned.index)
        average = total[owned.start : owned.stop] / 20
        assert np.allclose(updated, hand.parameters[owned.index] - 0.5 * average, rtol=1e-6, atol=1e-7)
        assert [tensor.name for tensor in report.release.tensors] == [tensor.name for tensor in owned.tensors]
        assert list(state) == [f"{tensor.name}/momentum_buffer" for tensor in owned.tensors]


def test_reducing_is_a_pure_function_of_what_is_given(hand, answers):
    request, vectors = answers
    inputs = [hand.parameters[0], *vectors[0], *hand.states[0].values()]
    before = [array.copy() for array in inputs]
    for array in inputs:
        array.setflags(write=False)
    first, second = hand.reduce(request, vectors), hand.reduce(request, vectors)
    assert first[0].release == second[0].release
    assert first[1].tobytes() == second[1].tobytes()
    assert {name: array.tobytes() for name, array in first[2].items()} == {
        name: array.tobytes() for name, array in second[2].items()
    }
    assert all(np.array_equal(array, copy) for array, copy in zip(inputs, before, strict=True))


def test_two_attempts_of_a_step_decode_to_one_value(hand, earlier, answers):
    first, second = hand.reduce(*earlier), hand.reduce(*answers)
    assert first[1].tobytes() == second[1].tobytes()
    assert not any(np.array_equal(a, b) for a, b in zip(earlier[1][0], answers[1][0], strict=True))


def test_a_released_parameter_that_is_not_finite_stops_the_run(hand, answers):
    request, vectors = answers
    states = {
        f"{each.name}/momentum_buffer": np.full(each.shape, np.inf, np.float32) for each in hand.ranges[0].tensors
    }
    with pytest.raises(RunFailedError) as error:
        hand.aggregators[0].reduce(request, hand.binding(request), hand.parameters[0], states, *vectors[0])
    assert error.value.code == "non_finite_parameters"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_that_is_decoded_block_by_block_has_the_bits_of_the_whole_and_takes_no_second_copy(bits, dtype):
    size = 2**20 + 7
    rng = np.random.default_rng(3)
    vectors = [rng.integers(0, 2**bits, size, ring_dtype(bits), endpoint=False) for _ in range(3)]
    expected = (decode(sum_of(vectors), -20) / 3).astype(dtype)
    tracemalloc.start()
    found = decoded_average(vectors, bits, -20, 3, dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tobytes() == expected.tobytes()
    assert found.nbytes <= peak < found.nbytes + 5 * CACHE_BLOCK_BYTES


@pytest.mark.parametrize("bits", [32, 64])
def test_guarantee_no_bit_of_an_average_depends_on_the_number_of_threads(bits, monkeypatch):
    monkeypatch.setattr(module, "PIECE_WORDS", 16)
    for size in (0, 1, 15, 16, 17, 5 * 16 - 1, 1003):
        rng = np.random.default_rng(size)
        vectors = [rng.integers(0, 2**bits, size, ring_dtype(bits), endpoint=False) for _ in range(3)]
        # Beyond float32, so that no thread may warn of infinity.
        for gamma_log2 in (-20, 110):
            terms = vectors, bits, gamma_log2, 3, np.float32
            alone = decoded_average(*terms).tobytes()
            assert {decoded_average(*terms, WordThreads(count)).tobytes() for count in (2, 3, 7)} == {alone}


@pytest.mark.parametrize("bits", [32, 64])
def test_ring_sums_wrap_and_leave_their_inputs(bits):
    dtype = np.dtype(f"<u{bits // 8}")
    vectors = [np.array([2 ** (bits - 1), 1], dtype), np.array([2 ** (bits - 1), 2], dtype)]
    assert sum_of(vectors).tolist() == [0, 3]
    assert vectors[0].tolist() == [2 ** (bits - 1), 1]


def test_it_answers_no_challenge_of_another_member(hand):
    challenge = hand.orchestrator.challenge("aggregator-1", "aggregator")
    with pytest.raises(ProtocolError, match="challenge_mismatch"):
        hand.aggregators[0].present(challenge, hand.manifest, hand.ranges[0])


# --- what it refuses


HEADER_CHANGES = {
    "run_id": "another",
    "manifest_digest": bytes(32),
    "step": 1,
    "attempt": 0,
    "roster_digest": bytes(32),
    "input_digest": bytes(32),
    "sender": "worker-0",
    "virtual_workers": (1, 4),
    "vector_tags": (bytes(16),),
    "ring_bits": 64,
}


@pytest.mark.parametrize("field", HEADER_CHANGES)
def test_a_signed_header_of_anything_else_is_refused_with_sender_and_field_named(hand, answers, field):
    request, vectors = answers
    error = refused(hand, resigned(hand, request, 1, lambda _: {field: HEADER_CHANGES[field]}), vectors)
    assert error.code == "header_mismatch"
    assert "worker-1" in error.message
    assert field in error.message


def test_a_header_of_other_ranges_or_lengths_is_refused_and_named(hand, answers):
    request, vectors = answers

    def altered(**changes):
        return lambda header: {"payloads": (header.payloads[0].model_copy(update=changes), *header.payloads[1:])}

    for edit, code in (
        (altered(range_index=1), "range_mismatch"),
        (lambda header: {"payloads": header.payloads[::-1]}, "range_mismatch"),
        (lambda header: {"payloads": header.payloads[:1]}, "range_mismatch"),
        (altered(length=3), "length_mismatch"),
        (altered(offset=1), "length_mismatch"),
    ):
        error = refused(hand, resigned(hand, request, 2, edit), vectors)
        assert error.code == code
        assert "worker-2" in error.message


def test_a_header_that_its_sender_did_not_sign_is_refused(hand, answers):
    request, vectors = answers
    header = Header.model_validate_json(request.headers[1].body)
    stranger = seal(header, IdentityKey.generate())
    assert refused(hand, with_header(request, 1, stranger), vectors).code == "signature"
    flipped = bytearray(request.headers[1].body)
    flipped[40] ^= 1
    changed = Envelope(body=bytes(flipped), signature=request.headers[1].signature)
    assert refused(hand, with_header(request, 1, changed), vectors).code == "signature"


@pytest.mark.parametrize("position", [0, -1])
def test_one_flipped_bit_of_a_vector_is_refused_and_its_sender_named(hand, answers, position):
    request, vectors = answers
    for sender in range(3):
        changed = vectors[0][sender].copy()
        changed[position] ^= np.uint32(1 << 31)
        error = refused(hand, request, with_vector(vectors, sender, changed))
        assert error.code == "payload_tag"
        assert f"worker-{sender}" in error.message


def test_a_vector_of_another_length_ring_range_or_sender_is_refused(hand, answers):
    request, vectors = answers
    own = vectors[0][0]
    assert refused(hand, request, with_vector(vectors, 0, own[:-1].copy())).code == "length_mismatch"
    assert refused(hand, request, with_vector(vectors, 0, own.astype(np.uint64))).code == "length_mismatch"
    assert refused(hand, request, with_vector(vectors, 0, vectors[1][0])).code == "length_mismatch"
    assert refused(hand, request, with_vector(vectors, 0, vectors[0][1])).code == "payload_tag"
    assert refused(hand, request, [vectors[0][::-1], *vectors[1:]]).code == "payload_tag"


def test_missing_and_duplicate_vectors_are_refused(hand, answers):
    request, vectors = answers
    first, second, third = request.headers
    assert refused(hand, request, [vectors[0][:2]]).code == "incomplete_cover"
    assert refused(hand, request, [(*vectors[0], vectors[0][0])]).code == "incomplete_cover"
    fewer = request.model_copy(update={"headers": (first, second)})
    assert refused(hand, fewer, [vectors[0][:2]]).code == "incomplete_cover"
    assert refused(hand, fewer, vectors).code == "incomplete_cover"
    twice = request.model_copy(update={"headers": (first, second, second)})
    doubled = [(vectors[0][0], vectors[0][1], vectors[0][1])]
    assert refused(hand, twice, doubled).code == "signature"
    swapped = request.model_copy(update={"headers": (second, first, third)})
    assert refused(hand, swapped, vectors).code == "signature"


def test_a_vector_of_an_earlier_attempt_is_refused(hand, earlier, answers):
    """A late answer: alone, with its own header, or all of them under the new roster."""
    (old, old_vectors), (request, vectors) = earlier, answers
    assert refused(hand, request, with_vector(vectors, 1, old_vectors[0][1])).code == "payload_tag"
    late = with_header(request, 1, old.headers[1])
    error = refused(hand, late, with_vector(vectors, 1, old_vectors[0][1]))
    assert error.code == "header_mismatch"
    assert "attempt" in error.message
    assert refused(hand, request.model_copy(update={"headers": old.headers}), old_vectors).code == "header_mismatch"


def test_parameters_that_the_workers_did_not_compute_from_are_refused(hand, answers):
    request, vectors = answers
    error = refused(hand, request.model_copy(update={"input_digest": bytes(32)}), vectors)
    assert error.code == "header_mismatch"
    assert "input_digest" in error.message


def test_ranges_that_are_not_its_own_are_refused(hand, answers):
    request, vectors = answers
    whole = VectorRange(index=0, offset=0, length=hand.mechanism.dimension)
    assert refused(hand, request.model_copy(update={"ranges": (whole,)}), vectors).code == "range_mismatch"
    assert refused(hand, request.model_copy(update={"ranges": ()}), vectors).code == "range_mismatch"


def test_workers_that_were_told_another_cut_are_of_no_use(tmp_path):
    """Headers and request agree with each other, but not with the range that the aggregator was admitted for."""
    hand = HandRun(tmp_path, aggregators=2)
    total = hand.mechanism.dimension
    other = (VectorRange(index=0, offset=0, length=1), VectorRange(index=1, offset=1, length=total - 1))
    assert other != hand.vector_ranges
    roster = hand.roster()
    told = [hand.ask(name, hand.request(roster, ranges=other)) for name in hand.workers]
    headers = tuple(reply.header for reply, _ in told)
    request = ReduceRequest(roster=roster, headers=headers, input_digest=hand.digest, ranges=other)
    vectors = list(zip(*(vectors for _, vectors in told), strict=True))
    assert refused(hand, request, vectors).code == "range_mismatch"
    assert refused(hand, request, vectors, 1).code == "range_mismatch"


def test_the_vector_of_another_range_goes_nowhere_else(hand, answers):
    request, vectors = answers
    for index, other in ((0, 1), (1, 2), (2, 0)):
        moved = [vectors[other] if each == index else vectors[each] for each in range(3)]
        assert refused(hand, request, moved, index).code in ("length_mismatch", "payload_tag")


def test_a_roster_that_is_not_the_orchestrators_or_not_whole_is_refused(hand, answers):
    request, vectors = answers
    body = Roster.model_validate_json(request.roster.body)
    stranger = seal(body, IdentityKey.generate())
    assert refused(hand, request.model_copy(update={"roster": stranger}), vectors).code == "signature"
    first, second, third, *aggregators = body.members
    partial = second.model_copy(update={"virtual_workers": (1, 4)})
    twice = second.model_copy(update={"virtual_workers": (0, 1, 4, 7)})
    for forged, code in (
        (hand.forged(request.roster, (first, partial, third, *aggregators)), "roster_cover"),
        (hand.forged(request.roster, (first, twice, third, *aggregators)), "roster_cover"),
        (hand.forged(request.roster, (first, third, *aggregators)), "roster_cover"),
        (hand.forged(request.roster, run_id="another"), "roster_mismatch"),
        (hand.forged(request.roster, manifest_digest=bytes(32)), "roster_mismatch"),
        (hand.forged(request.roster, (first, second, third, *aggregators[::-1])), "roster_own_entry"),
        (hand.forged(request.roster, (first, second, third)), "roster_own_entry"),
    ):
        assert refused(hand, request.model_copy(update={"roster": forged}), vectors).code == code


def test_a_roster_that_hides_a_worker_decodes_nothing(hand, answers):
    """Its virtual workers given to another: the headers do not fit, so the smaller sum is never made."""
    request, vectors = answers
    first, second, third, *aggregators = Roster.model_validate_json(request.roster.body).members
    taken = second.model_copy(update={"virtual_workers": (1, 2, 4, 5, 7)})
    forged = hand.forged(request.roster, (first, taken, *aggregators))
    smaller = request.model_copy(update={"roster": forged, "headers": request.headers[:2]})
    assert refused(hand, smaller, [parts[:2] for parts in vectors]).code == "header_mismatch"
    assert third.member_id == "worker-2"


def test_everything_is_verified_before_a_word_is_added(hand, answers, monkeypatch):
    request, vectors = answers
    added = []
    monkeypatch.setattr(module, "ring_sum", lambda *arguments: added.append(arguments))
    changed = vectors[0][2].copy()
    changed[0] += 1
    refused(hand, request, with_vector(vectors, 2, changed))
    assert added == []


def test_a_training_step_is_no_measurement(hand, answers):
    request, vectors = answers
    with pytest.raises(ProtocolError, match="query_unknown"):
        hand.aggregators[0].measure(request, hand.binding(request), *vectors[0])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run_id": "ffffffffffffffff"}, "binding_mismatch"),
        ({"query": "evaluation"}, "binding_mismatch"),
        ({"step": 1}, "binding_mismatch"),
        ({"manifest_digest": b"n" * 32}, "binding_mismatch"),
        ({"vectors_digest": b"w" * 32}, "binding_mismatch"),
        ({"fencing": 0}, "binding_fenced"),
    ],
)
def test_nothing_is_decoded_without_the_ledgers_binding_of_these_vectors(hand, answers, monkeypatch, changes, code):
    request, vectors = answers
    hand.reduce(request, vectors)
    decoded = []
    monkeypatch.setattr(module, "decode", lambda *arguments: decoded.append(arguments))
    monkeypatch.setattr(module, "ring_sum", lambda *arguments: decoded.append(arguments))
    for binding, refusal in (
        (hand.binding(request, **changes), code),
        (
            seal(open_envelope(Binding, hand.binding(request), hand.ledger_key.public), IdentityKey.generate()),
            "signature",
        ),
        (Envelope(body=b"", signature=b""), "signature"),
        (hand.receipt(), "signature"),
    ):
        with pytest.raises(ProtocolError) as error:
            hand.reduce(request, vectors, binding=binding)
        assert error.value.code == refusal
    assert decoded == []


# --- what it learns


def test_a_single_masked_vector_says_nothing_of_the_clear_one(wide):
    """Per vector: correlation below 6 standard errors (alarm 2e-9) and uniform bytes (alarm 1e-7)."""
    hand, (_, (vectors,)) = wide
    for vector, hosted in zip(vectors, hand.hosting.values(), strict=True):
        clear = [hand.clear_vector(v) for v in hosted]
        assert correlation(vector, sum(clear[1:], clear[0])) < 6
        assert looks_uniform(vector)
        assert not looks_uniform(sum(clear[1:], clear[0]))


def test_masks_cancel_in_the_whole_and_in_no_part(wide):
    """Each proper subset of three workers' vectors adds up to uniform words (alarm 1e-7 each)."""
    hand, (_, (vectors,)) = wide
    clear = [hand.clear_vector(v) for v in range(VIRTUAL_WORKERS)]
    assert np.array_equal(sum_of(vectors), sum(clear[1:], clear[0]))
    for absent in range(3):
        assert looks_uniform(sum_of([vector for i, vector in enumerate(vectors) if i != absent]))


# --- what it signs


def test_guarantee_it_signs_what_it_was_given_and_what_it_made(hand, answers):
    """By the key of its evidence, for the attempt and the binding; another state is another signature."""
    request, vectors = answers
    ranges, states = [], [{}, {}, {}]
    for owned in hand.ranges:
        report, updated, states[owned.index] = hand.reduce(request, vectors, owned.index)
        ranges.append(report.release)
        assert report.release.tensors == with_state(updated, states[owned.index], owned.tensors)
    of_run = {"run_id": hand.run_id, "manifest_digest": hand.manifest.digest()}
    released = SignedStep(roster=request.roster, ranges=tuple(ranges))
    found = open_release(released, orchestrator_key=orchestrator_key().public, **of_run)
    tensors = [tensor for part in ranges for tensor in part.tensors]
    assert (found.query, found.step, found.input_digest) == ("gradient", 0, hand.digest)
    assert found.binding == Binding.model_validate_json(hand.binding(request).body).head
    assert found.before == ModelPoint.initial(hand.digest)
    assert found.after == ModelPoint.of(tensors)
    own = hand.parameters[0], states[0]
    other, *_ = hand.aggregators[0].reduce(request, hand.binding(request), *own, *vectors[0])
    mixed = released.model_copy(update={"ranges": (other.release, *ranges[1:])})
    with pytest.raises(ProtocolError, match="release_mismatch"):
        open_release(mixed, orchestrator_key=orchestrator_key().public, **of_run)


def test_parameters_that_the_step_was_not_charged_for_are_not_updated(hand, answers):
    request, vectors = answers

    def code(asked: ReduceRequest, parameters: np.ndarray, index: int = 0) -> str:
        own = parameters, hand.states[index]
        with pytest.raises(ProtocolError) as error:
            hand.aggregators[index].reduce(asked, hand.binding(asked), *own, *vectors[index])
        return error.value.code

    for index in range(3):
        assert code(request, hand.parameters[index] + np.float32(1), index) == "parameters_mismatch"
    first, *rest = request.before
    other = first.model_copy(update={"content": bytes(32)})
    assert code(request.model_copy(update={"before": (other, *rest)}), hand.parameters[1], 1) == "parameters_mismatch"
    for changes in ({"before": ()}, {"before": request.before[:-1]}, {"batches": (b"b" * 32,)}):
        assert code(request.model_copy(update=changes), hand.parameters[0]) == "parameters_mismatch"
