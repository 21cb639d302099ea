"""Vectors that mix sums of earlier steps: what they add up to, whom they draw, and which sums a worker keeps."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.attestation.core.keys import Purpose, derive
from raycloak.metrics.errors import RefusedError
from raycloak.workers import virtual_worker
from raycloak.workers.inputs.datasets import slice_ids
from raycloak.workers.run_member import PastSums
from raycloak.workers.vectors.ring import mix_into, ring_dtype
from raycloak.workers.virtual_worker import OwnSum
from tests.mixed import BANDS, mixed_mechanism
from tests.protocol import DATA_ROOT, computer, initial_parameters, keys_of

KEYS, PARAMETERS, VIRTUAL_WORKER = keys_of(b"c" * 32, 0), initial_parameters(), 0
OF_MODEL = DATA_ROOT, PARAMETERS


def input_of(step: int) -> bytes:
    return bytes([step + 1]) * 32


def own_sum(step: int, parameters: np.ndarray = PARAMETERS) -> OwnSum:
    chosen = computer(mixed_mechanism())
    return chosen.own_sum(VIRTUAL_WORKER, KEYS, step, input_of(step), DATA_ROOT, parameters)


def vector(step: int, past: list[OwnSum]) -> virtual_worker.EncodedVector:
    own = VIRTUAL_WORKER, KEYS, step, input_of(step), *OF_MODEL
    return computer(mixed_mechanism()).vector(*own, past=past)


def signed(words: np.ndarray) -> list[int]:
    return words.view(f"<i{words.itemsize}").tolist()


def rounded_mix(sums: list[list[int]], coefficients: tuple[int, ...]) -> list[int]:
    """Return the mix in Python's integers, rounded half to even as Python rounds fractions."""
    pairs = [zip(coefficients, each, strict=False) for each in zip(*sums, strict=True)]
    return [round(sum(Fraction(c * s, COEFFICIENT_UNIT) for c, s in each)) for each in pairs]


# --- the mix


def test_guarantee_a_vector_with_past_sums_differs_from_one_without_by_exactly_their_rounded_mix():
    """The noise has one key in both, so it is the same, and there is one draw of it: none for the sums."""
    chosen, past = mixed_mechanism(), [own_sum(4), own_sum(3)]
    alone, mixed = vector(5, []), vector(5, past)
    own = own_sum(5)
    sums = [signed(each.values) for each in (own, *past)]
    expected = np.array(rounded_mix(sums, chosen.coefficients)) - np.array(sums[0])
    moved = (mixed.values - alone.values).view(f"<i{alone.values.itemsize}")
    assert np.array_equal(moved, expected)
    assert np.abs(expected).max() > 1000
    assert [each.own.tag for each in (alone, mixed) if each.own is not None] == [own.tag] * 2
    assert alone.tag != mixed.tag


def test_an_own_sum_has_no_noise_and_a_tag_of_a_key_of_its_own(monkeypatch):
    derived: list[Purpose] = []

    def spy(secret, purpose, *fields):
        derived.append(purpose)
        return derive(secret, purpose, *fields)

    monkeypatch.setattr(virtual_worker, "derive", spy)
    silent = own_sum(3)
    assert sorted(derived) == sorted([Purpose.PLACES, Purpose.SAMPLING, Purpose.SUM_TAG])
    # Of clipped gradients of two examples at most: noise alone is some two hundred times as large.
    chosen = mixed_mechanism()
    assert np.linalg.norm(np.array(signed(silent.values)) * chosen.gamma) < 2.1 * chosen.max_grad_norm
    derived.clear()
    vector(3, [])
    own = [Purpose.PLACES, Purpose.SAMPLING, Purpose.SUM_TAG]
    assert sorted(derived) == sorted([*own, Purpose.NOISE, Purpose.VECTOR_TAG])


@pytest.mark.parametrize("changed", ["step", "input", "keys", "model"])
def test_the_tag_of_a_sum_is_another_for_whatever_may_change_it(changed):
    chosen, honest = computer(mixed_mechanism()), own_sum(3)
    step, given_input, keys, parameters = 3, input_of(3), KEYS, PARAMETERS
    if changed == "step":
        step = 3 + BANDS
    elif changed == "input":
        given_input = input_of(9)
    elif changed == "keys":
        keys = keys_of(b"d" * 32, 0)
    else:
        parameters = PARAMETERS + np.float32(0.25)
    found = chosen.own_sum(VIRTUAL_WORKER, keys, step, given_input, DATA_ROOT, parameters)
    assert found.tag != honest.tag


@settings(deadline=None)
@given(st.data(), st.sampled_from([32, 64]), st.integers(2, 6))
def test_the_mix_is_that_of_fractions_in_both_rings(data, bits, bands):
    """Halves are among the sums, and round to even on both sides of zero."""
    coefficients = (
        COEFFICIENT_UNIT,
        *data.draw(st.lists(st.integers(0, 4 * COEFFICIENT_UNIT), min_size=bands - 1, max_size=bands - 1)),
    )
    count, length, largest = data.draw(st.integers(1, bands)), data.draw(st.integers(1, 9)), 2 ** (bits - 8)
    small = st.integers(-8, 8).map(lambda k: k * COEFFICIENT_UNIT // 2)
    values = st.lists(st.integers(-largest, largest) | small, min_size=length, max_size=length)
    # A mix is computed in 64 bits: what is planned never leaves 62 of them.
    scale = 1 if bits == 32 else 2**24
    sums = [[each // scale for each in data.draw(values)] for _ in range(count)]
    words = [np.array(each, f"<i{bits // 8}").view(ring_dtype(bits)) for each in sums]
    out = np.empty(length, ring_dtype(bits))
    mix_into(words, coefficients, out)
    modulus = 2**bits
    assert out.tolist() == [each % modulus for each in rounded_mix(sums, coefficients)]


@pytest.mark.parametrize("half", [1, 3, -1, -3, 5])
def test_a_mix_rounds_once_and_half_to_even(half):
    """Half a coefficient of one: the sums are not rounded one by one, nor to the next above."""
    halves, out = np.array([half], "<i4").view("<u4"), np.empty(1, "<u4")
    unit = COEFFICIENT_UNIT
    mix_into([np.zeros(1, "<u4"), halves], (unit, unit // 2), out)
    assert signed(out) == [round(Fraction(half, 2))]
    mix_into([np.zeros(1, "<u4"), halves, halves], (unit, unit // 2, unit // 2), out)
    assert signed(out) == [half]


def test_a_mix_of_more_sums_than_coefficients_is_refused():
    words = np.zeros(3, "<u4")
    for sums in ([], [words] * 3):
        with pytest.raises(RefusedError, match="proof_bound"):
            mix_into(sums, (COEFFICIENT_UNIT, 1), words.copy())
    with pytest.raises(RefusedError, match="proof_bound"):
        mix_into([words, np.zeros(3, "<u8")], (COEFFICIENT_UNIT, 1), words.copy())


# --- whom a step draws


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_guarantee_an_example_is_drawn_in_steps_that_are_a_round_apart_and_in_no_other(monkeypatch, rate):
    """The proof charges one step of a round: of b consecutive ones, an example may be in one."""
    genuine = virtual_worker.draw_ids
    chosen = computer(mixed_mechanism().model_copy(update={"sample_rate": rate}))

    for v in (0, 5):
        steps: dict[int, np.ndarray] = {}
        for step in range(6 * BANDS):

            def spy(*arguments, step=step, steps=steps):
                steps[step] = genuine(*arguments)
                return steps[step]

            monkeypatch.setattr(virtual_worker, "draw_ids", spy)
            chosen.own_sum(v, keys_of(b"c" * 32, v), step, input_of(step), *OF_MODEL)
        drawn: dict[int, list[int]] = {}
        for step, ids in steps.items():
            for each in ids[ids >= 0]:
                drawn.setdefault(int(each), []).append(step)
        assert drawn.keys() <= set(slice_ids(v, 8, 40).tolist())
        for each in drawn.values():
            assert len({step % BANDS for step in each}) == 1
        if rate == 1.0:
            # Each example has its turn in every round.
            assert drawn.keys() == set(slice_ids(v, 8, 40).tolist())
            assert all(len(each) == 6 for each in drawn.values())


def test_without_correlated_noise_every_step_draws_from_the_whole_slice(monkeypatch):
    given_ids: list[list[int]] = []
    genuine = virtual_worker.draw_ids
    monkeypatch.setattr(
        virtual_worker, "draw_ids", lambda key, ids, *rest: given_ids.append(ids.tolist()) or genuine(key, ids, *rest)
    )
    plain = mixed_mechanism().model_copy(update={"coefficients": ()})
    for step in range(3):
        assert computer(plain).vector(0, KEYS, step, input_of(step), *OF_MODEL).own is None
    assert given_ids == [slice_ids(0, 8, 40).tolist()] * 3


# --- the sums that a worker keeps


def sum_of(word: str) -> OwnSum:
    return OwnSum(word, word.encode())


def followed(*inputs: bytes, oldest: int = 0) -> PastSums:
    """Return past sums of virtual workers 1 and 2 for steps with these inputs, step 0 first."""
    past, before = PastSums(), b""
    for step, each in enumerate(inputs):
        past.follow({step - 1: before, step: each}, oldest)
        for v in (1, 2):
            past.keep(step, v, sum_of(f"{step}/{v}"))
        before = each
    return past


def test_sums_that_lead_to_the_present_input_are_kept():
    past = followed(b"a", b"b", b"c")
    past.follow({2: b"c", 3: b"d"}, 1)
    assert [past.lacking(step, [1, 2]) for step in (0, 1, 2, 3)] == [[1, 2], [], [], [1, 2]]
    assert past.of(2, range(2, 0, -1)) == [sum_of("2/2"), sum_of("1/2")]
    assert [past.input_of(step) for step in (1, 2, 3)] == [b"b", b"c", b"d"]


def test_a_repeated_step_finds_the_sums_of_those_before_it():
    past = followed(b"a", b"b", b"c")
    past.follow({1: b"b", 2: b"c"}, 0)
    assert [past.lacking(step, [1, 2]) for step in range(3)] == [[], [], []]


@pytest.mark.parametrize(
    ("inputs", "kept"),
    [
        ({2: b"C", 3: b"d"}, []),
        ({1: b"b", 2: b"C", 3: b"d"}, [0, 1]),
        ({0: b"A", 1: b"b", 2: b"c", 3: b"d"}, [1, 2]),
        ({1: b"B"}, []),
        ({3: b"d", 4: b"e"}, []),
    ],
)
def test_sums_of_another_past_are_dropped(inputs, kept):
    """A digest fixes all before it: here they are plain words, so the third case shows that each step is compared."""
    past = followed(b"a", b"b", b"c")
    past.follow(inputs, 0)
    assert [step for step in range(3) if not past.lacking(step, [1])] == kept


def test_sums_of_other_virtual_workers_are_dropped():
    past = followed(b"a", b"b")
    past.drop_all_but((2, 7))
    assert [past.lacking(step, [1, 2, 7]) for step in (0, 1)] == [[1, 7], [1, 7]]


def test_a_sum_of_a_step_that_is_not_followed_is_refused():
    past = followed(b"a")
    for step in (1, 2):
        with pytest.raises(RefusedError, match="proof_bound"):
            past.keep(step, 1, sum_of("x"))


History = tuple[int, ...]


def name_of(history: History) -> bytes:
    """Return an input digest that fixes all steps before, as a chained one does; of no step, the empty one."""
    return repr(history).encode() if history else b""


@settings(deadline=None)
@given(st.data())
def test_past_sums_are_those_of_a_model_that_knows_whole_histories(data):
    """Steps are repeated, taken back, and given with as many steps before as a question may bring."""
    past, known, kept = PastSums(), dict[int, History](), dict[tuple[int, int], History]()
    for _ in range(data.draw(st.integers(1, 12))):
        base = data.draw(st.sampled_from([(), *known.values()]))
        history = (*base, *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2)))[:8]
        step = len(history) - 1
        given_models, reach = data.draw(st.integers(0, step)), data.draw(st.integers(0, 4))
        first, oldest = step - given_models - 1, step - reach
        inputs = {each: name_of(history[: each + 1]) for each in range(first, step + 1)}
        past.follow(inputs, oldest)
        led = first < 0 or known.get(first) == history[: first + 1]
        known = {
            each: before
            for each, before in known.items()
            if each >= oldest and before == history[: each + 1] and (each > first or led)
        }
        kept = {place: before for place, before in kept.items() if place[0] in known}
        known |= {each: history[: each + 1] for each in range(max(first, 0), step + 1)}
        hosted = tuple(data.draw(st.sets(st.integers(0, 3), min_size=1)))
        past.drop_all_but(hosted)
        kept = {place: before for place, before in kept.items() if place[1] in hosted}
        for each in sorted(known):
            lacking = [v for v in hosted if (each, v) not in kept]
            assert past.lacking(each, hosted) == lacking
            for v in set(hosted) - set(lacking):
                assert past.of(v, [each]) == [sum_of(repr(history[: each + 1]))]
            for v in data.draw(st.sets(st.sampled_from(lacking))) if lacking else ():
                past.keep(each, v, sum_of(repr(history[: each + 1])))
                kept[each, v] = history[: each + 1]
